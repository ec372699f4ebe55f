"""A model, its optimizer and its data under way: one step, one pass, or a short run."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import count, islice
from pathlib import Path
from typing import TypeAlias

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchvision.ops import DropBlock2d, StochasticDepth

from basisprune.callback import Callback
from basisprune.errors import ConfigError, DataError, TrainingError
from basisprune.tasks import CLASSIFICATION, Task
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import mode
from basisprune.training.accelerating import as_shown, wrapped
from basisprune.training.checkpoint import Past, load_checkpoint, set_damaged_aside
from basisprune.training.config import TrainConfig, learning_rate, weights_ramp
from basisprune.training.evaluation import Data, Evaluation, evaluate
from basisprune.training.history import EpochRecord, best_epoch, out_of_patience
from basisprune.training.lessons import Feed, Lesson, Pupil
from basisprune.training.progress import TrainingClock
from basisprune.training.trainable import make_optimizer, project_scales
from basisprune.transfer.model import known_spec

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
