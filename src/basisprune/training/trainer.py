"""A model, its optimizer and its data under way: one step, one pass, or a short run."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path
from typing import TypeAlias, cast

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedDataParallelKwargs, ProjectConfiguration
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchvision.ops import DropBlock2d, StochasticDepth

from basisprune.callback import Callback
from basisprune.data import LoaderPart, blend, is_prepared, make_loader, own_part, prepare
from basisprune.errors import ConfigError, DataError, MissingExtraError, TrainingError
from basisprune.tasks import CLASSIFICATION, Rows, Task
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import mode, placed
from basisprune.torchkit.watching import example_input, parameters_of, upstream, watch_run
from basisprune.training.checkpoint import (
    EpochRecord,
    Past,
    best_epoch,
    load_checkpoint,
    out_of_patience,
    set_damaged_aside,
)
from basisprune.training.config import TrainConfig, learning_rate, weights_ramp
from basisprune.training.evaluation import Data, Evaluation, evaluate, floats, moved
from basisprune.training.progress import TrainingClock
from basisprune.training.trainable import classes_of, make_optimizer, project_scales
from basisprune.transfer.model import known_spec, spec_of
from basisprune.types import dotted


def require_tracker(config: TrainConfig) -> None:
    """Raise MissingExtraError for a tracker that is not installed."""
    if config.tracker is not None and find_spec(config.tracker) is None:
        raise MissingExtraError(config.tracker, extra=config.tracker)


def make_accelerator(config: TrainConfig, checkpoint: str | Path | None = None) -> Accelerator:
    """An Accelerator for the run: its precision and, by name, its tracker (whose logs lie by the checkpoint).

    Raises MissingExtraError for a tracker that is not installed, ConfigError for a precision that the device
    does not have.
    """
    require_tracker(config)
    folder = str(Path(checkpoint).parent) if checkpoint is not None else "."
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != config.mixed_precision:
        AcceleratorState._reset_state()  # Accelerate keeps one precision per process, and refuses another
    try:
        return Accelerator(
            mixed_precision=config.mixed_precision,
            log_with=config.tracker,
            project_config=ProjectConfiguration(folder, logging_dir=folder),
        )
    except ValueError as error:
        AcceleratorState._reset_state()
        raise ConfigError(f"mixed_precision: {config.mixed_precision!r} given; {error}") from error


def wrapped(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """The model as Accelerate runs it: by itself, or with gradients that several processes have in common.

    Processes would wait forever for the gradient of what takes no part in a step, such as a norm that nothing reads.
    To look for such parameters in each step costs time, so that it is only done if a run shows one.
    """
    # A layer that is left out at random may be so in one process only, and they must all look or none.
    undecided = accelerator.num_processes > 1 and accelerator.ddp_handler is None
    if undecided and Processes.here().total(int(has_idle_parameters(model))):
        accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    return accelerator.prepare_model(model)  # type: ignore[no-any-return]


def has_idle_parameters(model: nn.Module) -> bool:
    """Whether the output of the model in training does not depend on something that is trained."""
    example = example_input(model, spec_of(model).shape)
    nodes = upstream(watch_run(model, example, train=True, whole=True).output_nodes)
    used = parameters_of(nodes)
    return any(each.requires_grad and id(each) not in used for each in model.parameters())


def as_shown(config: Mapping[str, object]) -> dict[str, int | float | str]:
    """The settings as trackers take them: numbers and texts under dotted names."""
    return {key: value if isinstance(value, int | float | str) else str(value) for key, value in dotted(config)}


@dataclass(frozen=True)
class Pupil:
    """The model, as it is and as Accelerate wraps it, with its teacher if it has one."""

    model: nn.Module
    wrapped: nn.Module
    config: TrainConfig
    accelerator: Accelerator
    teacher: nn.Module | None = None


class Lesson:
    """The loss of a batch, and the metric of all batches since `reset`.

    Raises ConfigError for settings that the task has no use for.
    """

    def __init__(self, pupil: Pupil, task: Task) -> None:
        config = pupil.config
        _refuse_useless(config, task)
        self.pupil = pupil
        self.task = task.in_training(label_smoothing=config.label_smoothing, temperature=config.distill_temperature)
        self.classes = classes_of(pupil.model) if config.augmentation.blends else 0
        self.last: tuple[object, object, int] | None = None
        self.reset()

    def loss(self, inputs: Tensor, targets: object, generator: torch.Generator) -> Tensor:
        """The task's loss, in part with the distance from what the teacher says."""
        pupil, task, blending = self.pupil, self.task, self.pupil.config.augmentation
        wanted, seen = targets, targets
        if blending.blends:
            inputs, wanted = blend(inputs, cast(Tensor, targets), blending, classes=self.classes, generator=generator)
            seen = wanted.argmax(1)
        wanted, seen = moved((wanted, seen), pupil.accelerator.device)  # type: ignore[misc]
        with pupil.accelerator.autocast():
            batch = placed(inputs, pupil.model)
            if task.model_loss is not None:
                return task.mean_loss(pupil.wrapped, batch, wanted)
            output = task.output(pupil.wrapped(batch))
        output = floats(output)
        loss = task.output_loss(output, wanted)
        if pupil.teacher is not None and task.distance is not None:
            with torch.no_grad(), mode(pupil.teacher, training=False), pupil.accelerator.autocast():
                taught = floats(task.output(pupil.teacher(placed(inputs, pupil.teacher))))
            share = pupil.config.distill
            loss = (1 - share) * loss + share * task.checked_loss(task.distance(output, taught))
        self.last = output, seen, len(batch)
        return loss

    @torch.no_grad()
    def note(self) -> None:
        """Keep the outcomes of the last batch."""
        if self.last is not None:
            self.rows.append(self.task.rows(*self.last))
            hits = self.task.hits(self.rows[-1])
            if hits is not None:
                self.right += int(hits.sum())
                self.seen += len(hits)
        self.last = None

    def reset(self) -> None:
        """Forget the outcomes."""
        self.rows: list[Rows] = []
        self.right = self.seen = 0

    def so_far(self) -> float | None:
        """The accuracy of what was noted; None for other metrics, which take a while."""
        return self.right / self.seen if self.seen else None

    def value(self) -> float | None:
        """The metric of what was noted; None if the network computes its loss itself."""
        return self.task.outcomes(self.rows).value if self.rows else None


def _refuse_useless(config: TrainConfig, task: Task) -> None:
    faults = []
    if not task.augments:
        if config.label_smoothing:
            faults.append(f"label_smoothing: {config.label_smoothing} given; it is for classification only")
        if config.augmentation.blends:
            faults.append("augmentation: mixup and cutmix given; they are for classification only")
    if config.distill and task.distance is None:
        faults.append(
            f"distill: {config.distill} given, but the task {task.name} does not say how far two outputs are apart; "
            "pass Task(distance=...), or distill=0"
        )
    if faults:
        raise ConfigError.of("fit", faults)


class Feed:
    """The batches of a training, epoch by epoch: images that are prepared and augmented here, or somebody's own."""

    def __init__(
        self, data: object, task: Task, model: nn.Module, config: TrainConfig, accelerator: Accelerator
    ) -> None:
        self.data, self.config, self.accelerator = data, config, accelerator
        self.own = own_part(data, task, config.batch_size, shuffle=True)
        self.is_prepared = is_prepared(data)
        self.spec = None if self.own is not None else spec_of(model)
        if self.own is not None and (config.augmentation.moves or config.augmentation.paints):
            raise ConfigError(
                f"augmentation: {config.augmentation} given; it is for images that are read here, so change the inputs "
                "in your own loader"
            )

    @property
    def steps(self) -> int:
        """The number of batches of an epoch."""
        return self.own.steps if self.own is not None else len(self._images(0))  # type: ignore[arg-type]

    def epoch(self, epoch: int, generator: torch.Generator) -> Iterator[tuple[Tensor, object]]:
        """The inputs and targets of each batch."""
        if self.own is not None:
            yield from self.own
            return
        assert self.spec is not None
        for images, labels in self._images(epoch):  # type: ignore[attr-defined]
            config = self.config
            batch = prepare(
                images, self.spec, prepared=self.is_prepared, augmentation=config.augmentation, generator=generator
            )
            yield batch, labels

    def _images(self, epoch: int) -> object:
        assert self.spec is not None
        config = self.config
        loader = make_loader(
            self.data,
            math.ceil(config.batch_size / self.accelerator.num_processes),
            shuffle=True,
            seed=config.seed,
            epoch=epoch,
            workers=config.workers,
            size=self.spec.image_size,
        )
        assert not isinstance(loader, LoaderPart)
        return self.accelerator.prepare_data_loader(loader)


logger = logging.getLogger(__name__)

Stop: TypeAlias = Callable[[Sequence[EpochRecord]], bool]


@dataclass(frozen=True)
class Session:
    """What a training may have around it.

    `teacher` is another network for the same images and classes, `stop` is asked after each epoch, with the
    records so far, whether to end early, and `accelerator` is the one that carries the training (None: a new
    one by the configuration). `callback` callback of each step; without one, `fit` draws a bar. `task` is what is
    trained for, by default classes of images.
    """

    teacher: nn.Module | None = None
    stop: Stop | None = None
    accelerator: Accelerator | None = None
    callback: Callback | None = None
    task: Task = CLASSIFICATION

    def log(self, line: str) -> None:
        """Pass a line on to the callback, or to the log without one."""
        if self.callback is None:
            logger.info(line)
        else:
            self.callback.log(line)

    def ends(self, past: Past, config: TrainConfig) -> bool:
        """Whether the training is over after the epochs in the past."""
        history = past.history
        if len(history) >= config.epochs or out_of_patience(history, config.patience):
            return True
        return bool(history) and self.stop is not None and self.stop(history)


def _checked_teacher(teacher: nn.Module | None, model: nn.Module, config: TrainConfig) -> nn.Module | None:
    if config.distill == 0:
        return None
    if teacher is None:
        raise ConfigError(
            f"distill: {config.distill} given, but no teacher; pass session=Session(teacher=...) to fit, or distill=0"
        )
    spec, wanted = known_spec(model), getattr(teacher, "input_spec", None)
    if spec is not None and wanted not in (None, spec):
        raise ConfigError(f"teacher: it wants images as {wanted}, the model as {spec}; both are shown the same")
    return teacher


class DivergedError(TrainingError):
    """A training whose loss is not finite, or above that of its start."""


@dataclass(frozen=True)
class Images:
    """What a training learns from, what it is validated on, and which of the training images were held out of it."""

    train: Data
    val: Data | None = None
    held_out: Data | None = None


class Trainer:
    """A model, its optimizer and its data under way through the epochs."""

    def __init__(
        self, model: nn.Module, images: Images, config: TrainConfig, accelerator: Accelerator, session: Session
    ) -> None:
        self.config, self.accelerator, self.images, self.task = config, accelerator, images, session.task
        self.processes = Processes.here()
        self.feed = Feed(images.train, session.task, model, config, accelerator)
        teacher = _checked_teacher(session.teacher, model, config)
        if config.channels_last and not _has_volumes(model):
            model = model.to(memory_format=torch.channels_last)
        self.model = model.to(accelerator.device)
        self.optimizer = accelerator.prepare_optimizer(make_optimizer(self.model, config))
        teacher = None if teacher is None else teacher.to(accelerator.device)
        self.lesson = Lesson(Pupil(self.model, wrapped(model, accelerator), config, accelerator, teacher), session.task)
        # Only the main process shows it on the way, so it must not wait for the others.
        self.loss = MeanMetric(sync_on_compute=False)
        self.loss.to(accelerator.device)
        self.waiting, self.held_out_count = False, 0
        self.steps = self.feed.steps
        if self.steps == 0:
            raise DataError("fit: the training data contains no batches")

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """The tracker runs, if there is one; afterwards the model is rid of what Accelerate put on it."""
        if self.config.tracker:
            self.accelerator.init_trackers("basisprune", config=as_shown(asdict(self.config)))
        try:
            yield
        finally:
            if self.config.tracker:
                self.accelerator.end_training()
            for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
                self.model.__dict__.pop(name, None)

    def resume(self, path: Path, say: Callable[[str], None]) -> Past:
        """What the checkpoint holds; nothing without one, or if it was damaged, for which it is set aside."""
        self.processes.on_main(lambda: set_damaged_aside(path, say))
        if not path.exists():
            return Past()
        past = load_checkpoint(path, self.model, self.optimizer, self.config, self.accelerator.scaler)
        logger.info("%s: resumes after epoch %d", path, len(past.history))
        return past

    def after(self, past: Past, record: EpochRecord) -> Past:
        """The past with one more epoch, which is reported to the tracker."""
        logger.info("%s", record)
        numbers = {key: value for key, value in asdict(record).items() if value is not None}
        self.accelerator.log(numbers, step=record.epoch)
        history = (*past.history, record)
        if self.config.patience is None and self.images.held_out is None:
            return Past(history)
        is_best = best_epoch(history, self._noise(record)) == len(past.history)
        return Past(history, copy.deepcopy(self.model.state_dict()) if is_best else past.best)

    def _noise(self, record: EpochRecord) -> float:
        """One standard error of the accuracy on the images held out; 0 without them, or if the metric is no share."""
        value, count = record.held_out_accuracy, self.held_out_count
        if value is None or not count or not self.task.is_share:
            return 0.0
        return math.sqrt(value * (1 - value) / count)

    def finish(self, past: Past) -> None:
        """Leaves the model in eval mode, with its best weights if epochs were judged."""
        if past.best is not None:
            self.model.load_state_dict(past.best)
        self._let_weights_wait(False)
        self.model.eval()

    def epoch(self, epoch: int, clock: TrainingClock) -> EpochRecord:
        """One pass over the training images, then the accuracy on the validation images."""
        config = self.config
        seed = (config.seed * 100_003 + epoch) * 1_009 + self.accelerator.process_index
        generator = torch.Generator().manual_seed(seed)
        self.lesson.reset()
        self.loss.reset()
        rate = config.lr
        with _seeded(seed), self._training_mode():
            for step, (inputs, targets) in enumerate(self.feed.epoch(epoch, generator)):
                rate = self._set_rates((epoch * self.steps + step) / (config.epochs * self.steps))
                value = self._step(inputs, targets, generator)
                if not math.isfinite(value):
                    raise DivergedError(
                        f"epoch {epoch}, step {step}: the loss is {value} at learning rate {rate:.3g}; lower "
                        "lr, or check the images. The last checkpoint, if any, is untouched"
                    )
                seen = len(inputs) * self.accelerator.num_processes
                clock.step(epoch, seen, self.loss.compute().item(), self.lesson.so_far())
        if not self.is_finite:
            raise DivergedError(
                f"epoch {epoch}: weights are no longer finite after learning rate {rate:.3g}; lower lr. The last "
                "checkpoint, if any, is untouched"
            )
        self.processes.agree(self.model)  # in the statistics of the norms, which each has of its own images
        validated, judged = self.evaluated(self.images.val), self.evaluated(self.images.held_out)
        self.held_out_count = 0 if judged is None else judged.count
        pairs = [(None, None) if found is None else (found.loss, found.accuracy) for found in (validated, judged)]
        return EpochRecord(epoch, rate, *self._of_all_processes(), *pairs[0], *pairs[1])

    def evaluated(self, data: Data | None) -> Evaluation | None:
        """Evaluate the model as it is; None without data."""
        if data is None:
            return None
        return evaluate(
            self.model,
            data,
            batch_size=self.config.batch_size,
            accelerator=self.accelerator,
            task=self.task,
            workers=self.config.workers,
        )

    def sprint(self, steps: int) -> bool:
        """Train for this many steps on a schedule of that length; return whether loss and weights stayed finite."""
        generator = torch.Generator().manual_seed(self.config.seed)
        passes = (batch for epoch in count() for batch in self.feed.epoch(epoch, generator))
        finite = True
        with _seeded(self.config.seed), self._training_mode():
            for step, (inputs, targets) in enumerate(islice(passes, steps)):
                self._set_rates(step / steps)
                finite = finite and math.isfinite(self._step(inputs, targets, generator))
        self.processes.agree(self.model)
        self.finish(Past())
        finite = finite and self.is_finite
        return self.processes.total(int(not finite)) == 0

    @property
    def is_finite(self) -> bool:
        """Whether all that is trained is finite."""
        return all(bool(parameter.isfinite().all()) for parameter in self._parameters())

    def _of_all_processes(self) -> tuple[float, float | None]:
        """The loss and the metric of the epoch's training images."""
        metric = self.lesson.value()
        loss = self.loss.compute()
        local = torch.stack([loss, loss.new_tensor(0.0 if metric is None else metric)])
        mean_loss, mean_metric = self.accelerator.reduce(local, reduction="mean").tolist()
        return mean_loss, None if metric is None else mean_metric

    def _set_rates(self, done: float) -> float:
        """The learning rate after the fraction `done` of all steps; each group has its share of it from now on."""
        rate, ramp = learning_rate(self.config, done), weights_ramp(self.config, done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0) * (ramp if group.get("heavy") else 1.0)
        self._let_weights_wait(ramp == 0)
        return rate

    def _let_weights_wait(self, waiting: bool) -> None:
        """Freezes the weights that join later, or lets them join."""
        if waiting != self.waiting and self.accelerator.num_processes == 1:
            for weight in self._parameters(heavy=True):
                weight.requires_grad_(not waiting)
        self.waiting = waiting

    def _parameters(self, *, heavy: bool = False) -> list[nn.Parameter]:
        """All that is trained, or the weights of it that the method alone would not train."""
        groups = self.optimizer.param_groups
        return [each for group in groups if not heavy or group.get("heavy") for each in group["params"]]

    def _step(self, inputs: Tensor, targets: object, generator: torch.Generator) -> float:
        config = self.config
        loss = self.lesson.loss(inputs, targets, generator)
        value = loss.item()
        if math.isfinite(value):
            self.accelerator.backward(loss)
            if self.waiting:  # several processes must agree on the gradients, so that there they are formed
                for weight in self._parameters(heavy=True):
                    weight.grad = None
            if config.clip_norm is not None:
                self.accelerator.clip_grad_norm_(self._parameters(), config.clip_norm)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if config.train_scales:
                project_scales(self.model)
            self.lesson.note()
            self.loss.update(value, len(inputs))
        return value

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        with mode(self.model, training=True):
            norms = [each for each in self.model.modules() if isinstance(each, nn.modules.batchnorm._NormBase)]
            for norm in norms:
                norm.train(self.config.norm_statistics == "batch")
            with ExitStack() as changes:
                for norm in norms:
                    changes.enter_context(_changed(norm, "momentum", self.config.norm_momentum or norm.momentum))
                for module in () if self.config.dropout else self.model.modules():
                    if (name := _drop_rate(module)) is not None:
                        changes.enter_context(_changed(module, name, 0.0))
                yield


def _drop_rate(module: nn.Module) -> str | None:
    """Return the attribute that says how much dropout, or stochastic depth, drops; None for other modules."""
    if isinstance(module, nn.modules.dropout._DropoutNd | StochasticDepth | DropBlock2d):
        return "p"
    return "drop_prob" if "drop_prob" in vars(module) else None  # timm's


@contextmanager
def _changed(module: nn.Module, name: str, value: object) -> Iterator[None]:
    """Give an attribute another value temporarily."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _has_volumes(model: nn.Module) -> bool:
    """Whether it has weights of 3d convs, for which PyTorch has another layout."""
    return any(weight.dim() > 4 for weight in model.parameters())


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """PyTorch's random numbers (dropout, stochastic depth) from this seed; the old state comes back."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
