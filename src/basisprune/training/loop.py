"""The one training loop: what is trainable, the recipe, resume (the paper's Algorithm 1, `finetuning`)."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torchmetrics import MeanMetric

from basisprune.errors import ConfigError, DataError, TrainingError
from basisprune.listener import Listener
from basisprune.tasks import CLASSIFICATION, Task
from basisprune.torchkit.kinds import refuse_untrainable
from basisprune.torchkit.processes import Processes, answering
from basisprune.torchkit.running import mode
from basisprune.torchkit.weight_norms import copied
from basisprune.training.accelerating import as_shown, make_accelerator, wrapped
from basisprune.training.checkpoint import Past, load_checkpoint, save_checkpoint, set_damaged_aside
from basisprune.training.config import TrainConfig, learning_rate, weights_ramp
from basisprune.training.evaluation import Data, evaluate
from basisprune.training.history import EpochRecord, best_epoch, out_of_patience
from basisprune.training.lessons import Feed, Pupil, make_lesson
from basisprune.training.precision import in_full_precision
from basisprune.training.progress import TrainingClock, hearing
from basisprune.training.trainable import make_optimizer, project_scales
from basisprune.transfer.model import known_spec

logger = logging.getLogger(__name__)

Stop: TypeAlias = Callable[[Sequence[EpochRecord]], bool]


@dataclass(frozen=True)
class FitResult:
    """The trained model and one record for each epoch."""

    model: nn.Module
    history: tuple[EpochRecord, ...]


@dataclass(frozen=True)
class Session:
    """What a training may have around it.

    `teacher` is another network for the same images and classes, `stop` is asked after each epoch, with the
    records so far, whether to end early, and `accelerator` is the one that carries the training (None: a new
    one by the configuration). `listener` hears of each step; without one, `fit` draws a bar. `task` is what is
    trained for, by default classes of images.
    """

    teacher: nn.Module | None = None
    stop: Stop | None = None
    accelerator: Accelerator | None = None
    listener: Listener | None = None
    task: Task = CLASSIFICATION

    def ends(self, past: Past, config: TrainConfig) -> bool:
        """Whether the training is over after the epochs in the past."""
        history = past.history
        if len(history) >= config.epochs or out_of_patience(history, config.patience):
            return True
        return bool(history) and self.stop is not None and self.stop(history)


def check_patience(config: TrainConfig, val: object) -> None:
    """Raise ConfigError where the training is to end when validation images say so, and there are none."""
    if config.patience is not None and val is None:
        raise ConfigError(f"patience: {config.patience} given, but no validation images to judge by; pass val")


def fit(
    model: nn.Module,
    train: Data,
    val: Data | None,
    config: TrainConfig,
    *,
    checkpoint: str | Path | None = None,
    progress: bool | None = None,
    inplace: bool = False,
    session: Session | None = None,
) -> FitResult:
    """The model trained as `config` says: norms, basis scales and classifier, and with `train="all"` all weights.

    `train` and `val` are datasets (or loaders) of pixels; the model's `input_spec` tells how they are prepared. With
    another task in the session, they are any iterables of batches that the task reads, whose inputs are taken as they
    are, and "accuracy" is its metric. With `checkpoint`, the state is written there after each epoch, and a run that
    was killed goes on from it and ends in the same weights. `progress=None` shows a bar in a terminal only. Accelerate
    carries the training: run it under `accelerate launch` or `torchrun` for several GPUs or nodes, which divide each
    batch among them, and all see the folder of the checkpoint.

    With `config.patience`, the training ends when this many epochs brought no better accuracy on `val`, and the
    model has the weights of the best one. With `config.distill`, it also learns what the `teacher` of the
    session says of each augmented batch in eval mode. The teacher moves to the device of the training and is
    otherwise not changed; with `distill=0` it is not asked at all. A run that is resumed needs the same one.

    A network in float64 is trained in it. One in bfloat16 or float16 is trained in float32, because steps of training
    are lost to rounding there, and comes back in its own precision.

    Raises TrainingError when the loss is no longer finite (the last checkpoint stays), CheckpointError when
    the checkpoint belongs to another run, ConfigError when there is no teacher to learn from, or a wrong one,
    or nothing to be patient about.
    """
    session = session or Session()
    refuse_untrainable(model, "fit")
    check_patience(config, val)
    model = model if inplace else copied(model)
    with in_full_precision(model), answering():
        return _fitted(model, (train, val), config, session, None if checkpoint is None else Path(checkpoint), progress)


def _fitted(
    model: nn.Module,
    data: tuple[Data, Data | None],
    config: TrainConfig,
    session: Session,
    path: Path | None,
    progress: bool | None,
) -> FitResult:
    accelerator = session.accelerator or make_accelerator(config, path)
    run = _Run(model, *data, config, accelerator, session)
    say = logger.warning if session.listener is None else session.listener.say
    past = Past() if path is None else run.resume(path, say)
    show = progress if accelerator.is_main_process else False
    with run.tracked(), hearing(session.listener if accelerator.is_main_process else None, show=show) as hearer:
        clock = TrainingClock(config.epochs, run.steps, hearer)
        while not session.ends(past, config):
            past = run.after(past, run.epoch(len(past.history), clock))
            if path is not None and accelerator.is_main_process:
                save_checkpoint(path, run.model, run.optimizer, config, past, accelerator.scaler)
    run.finish(past)
    return FitResult(run.model, past.history)


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


class _Run:
    """A model, its optimizer and its data under way through the epochs."""

    def __init__(
        self,
        model: nn.Module,
        train: Data,
        val: Data | None,
        config: TrainConfig,
        accelerator: Accelerator,
        session: Session,
    ) -> None:
        self.config, self.accelerator, self.val, self.task = config, accelerator, val, session.task
        self.processes = Processes.here()
        self.feed = Feed(train, session.task, model, config, accelerator)
        teacher = _checked_teacher(session.teacher, model, config)
        if config.channels_last and not _has_volumes(model):
            model = model.to(memory_format=torch.channels_last)
        self.model = model.to(accelerator.device)
        self.optimizer = accelerator.prepare_optimizer(make_optimizer(self.model, config))
        teacher = None if teacher is None else teacher.to(accelerator.device)
        self.lesson = make_lesson(
            Pupil(self.model, wrapped(model, accelerator), config, accelerator, teacher), session.task
        )
        # Only the main process shows it on the way, so it must not wait for the others.
        self.loss = MeanMetric(sync_on_compute=False)
        self.loss.to(accelerator.device)
        self.waiting = False
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
        if self.config.patience is None:
            return Past(history)
        is_best = best_epoch(history) == len(past.history)
        return Past(history, copy.deepcopy(self.model.state_dict()) if is_best else past.best)

    def finish(self, past: Past) -> None:
        """Leaves the model in eval mode, with its best weights if it was trained with patience."""
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
                    raise TrainingError(
                        f"epoch {epoch}, step {step}: the loss is {value} at learning rate {rate:.3g}; lower "
                        "lr, or check the images. The last checkpoint, if any, is untouched"
                    )
                seen = len(inputs) * self.accelerator.num_processes
                clock.step(epoch, seen, self.loss.compute().item(), self.lesson.so_far())
        if not all(bool(parameter.isfinite().all()) for parameter in self._parameters()):
            raise TrainingError(
                f"epoch {epoch}: weights are no longer finite after learning rate {rate:.3g}; lower lr. The last "
                "checkpoint, if any, is untouched"
            )
        self.processes.agree(self.model)  # in the statistics of the norms, which each has of its own images
        held_out: tuple[float, float] | tuple[None, None] = None, None
        if self.val is not None:
            found = evaluate(
                self.model,
                self.val,
                batch_size=config.batch_size,
                prepared=config.prepared,
                accelerator=self.accelerator,
                task=self.task,
                workers=config.workers,
            )
            held_out = found.loss, found.accuracy
        return EpochRecord(epoch, rate, *self._of_all_processes(), *held_out)

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
            if self.config.norm_statistics == "fixed":
                for module in self.model.modules():
                    if isinstance(module, nn.modules.batchnorm._NormBase):
                        module.eval()
            yield


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
