"""A model, its optimizer and its data under way: one step, one pass, or a short run."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count, islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchvision.ops import DropBlock2d, StochasticDepth

from basisprune.errors import ConfigError, DataError, MissingExtraError, TrainingError
from basisprune.torchkit.imports import refuse_code
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import cut_graphs, mode
from basisprune.training.checkpoint import EpochRecord, Past, best_epoch, load_checkpoint, move_damaged
from basisprune.training.config import TrainConfig, learning_rate, weights_ramp
from basisprune.training.evaluation import Data, Evaluation, evaluate
from basisprune.training.lessons import Feed, Lesson, Session
from basisprune.training.progress import TrainingClock
from basisprune.training.trainable import make_optimizer, project_scales
from basisprune.types import dotted

logger = logging.getLogger(__name__)


class DivergedError(TrainingError):
    """A training whose loss is not finite, or above that of its start."""


@dataclass(frozen=True)
class Images:
    """What a training learns from, what it is validated on, and which of the training images were held out of it."""

    train: Data
    val: Data | None = None
    held_out: Data | None = None


def require_tracker(config: TrainConfig) -> None:
    """Raise MissingExtraError for a tracker that is not installed, and ConfigError for one that a file must not choose.

    wandb and mlflow follow settings, and run git, in the current folder, which may be a stranger's.
    """
    if config.tracker not in (None, "tensorboard"):
        refuse_code([("tracker", config.tracker)])
    if config.tracker is not None and find_spec(config.tracker) is None:
        raise MissingExtraError(config.tracker, extra=config.tracker)


def make_accelerator(config: TrainConfig, checkpoint: str | Path | None = None) -> Accelerator:
    """Return an Accelerator with the configured precision and tracker, whose logs lie by the checkpoint.

    Raises MissingExtraError for a tracker that is not installed, ConfigError for a precision that the device lacks.
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


class Trainer:
    """A model, its optimizer and its data under way through the epochs."""

    def __init__(
        self, model: nn.Module, images: Images, config: TrainConfig, accelerator: Accelerator, session: Session
    ) -> None:
        self.config, self.accelerator, self.images, self.task = config, accelerator, images, session.task
        self.processes = Processes.here()
        self.feed = Feed(images.train, session.task, model, config, accelerator)
        has_volumes = any(weight.dim() > 4 for weight in model.parameters())  # which have another layout
        if config.channels_last and not has_volumes:
            model = model.to(memory_format=torch.channels_last)
        self.model = model.to(accelerator.device)
        self.optimizer = accelerator.prepare_optimizer(make_optimizer(self.model, config))
        self.lesson = Lesson(self.model, config, accelerator, session)
        # Only the main process shows it on the way, so it must not wait for the others.
        self.loss = MeanMetric(sync_on_compute=False)
        self.loss.to(accelerator.device)
        self.waiting, self.held_out_count = False, 0
        self.steps = self.feed.steps
        if self.steps == 0:
            raise DataError("fit: the training data contains no batches")

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """Run the tracker, if there is one; afterwards rid the model of what Accelerate put on it."""
        if self.config.tracker:
            settings = dotted(asdict(self.config))
            shown = {key: value if isinstance(value, int | float | str) else str(value) for key, value in settings}
            self.accelerator.init_trackers("basisprune", config=shown)
        try:
            yield
        finally:
            if self.config.tracker:
                self.accelerator.end_training()
            for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
                self.model.__dict__.pop(name, None)

    def resume(self, path: Path, log: Callable[[str], None]) -> Past:
        """Return the past in the checkpoint; none if there is no file, or a damaged one, which is moved aside."""
        self.processes.on_main(lambda: move_damaged(path, log))
        if not path.exists():
            return Past()
        past = load_checkpoint(path, self.model, self.optimizer, self.config, self.accelerator.scaler)
        logger.info("%s: resumes after epoch %d", path, len(past.history))
        return past

    def after(self, past: Past, record: EpochRecord) -> Past:
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
        value, images = record.held_out_accuracy, self.held_out_count
        if value is None or not images or not self.task.is_share:
            return 0.0
        return math.sqrt(value * (1 - value) / images)

    def finish(self, past: Past) -> None:
        """Leave the model in eval mode, with its best weights if epochs were judged."""
        if past.best is not None:
            self.model.load_state_dict(past.best)
        self._let_weights_wait(False)
        cut_graphs(self.model)
        self.model.eval()

    def epoch(self, epoch: int, clock: TrainingClock) -> EpochRecord:
        config = self.config
        seed = (config.seed * 100_003 + epoch) * 1_009 + self.accelerator.process_index
        generator = torch.Generator().manual_seed(seed)
        self.lesson.reset()
        self.loss.reset()
        rate, untouched = config.lr, "lower lr{}. The last checkpoint, if any, is untouched"
        with _seeded(seed), self._training_mode():
            for step, (inputs, targets) in enumerate(self.feed.epoch(epoch, generator)):
                rate = self._set_rates((epoch * self.steps + step) / (config.epochs * self.steps))
                value = self._step(inputs, targets, generator)
                if not math.isfinite(value):
                    where = f"epoch {epoch}, step {step}: the loss is {value} at learning rate {rate:.3g}; "
                    raise DivergedError(where + untouched.format(", or check the images"))
                images = len(inputs) * self.accelerator.num_processes
                clock.step(epoch, images, self.loss.compute().item(), self.lesson.so_far())
        if not self.is_finite:
            where = f"epoch {epoch}: weights are no longer finite after learning rate {rate:.3g}; "
            raise DivergedError(where + untouched.format(""))
        self.processes.agree(self.model)  # in the statistics of the norms, which each has of its own images
        validated, judged = self.evaluated(self.images.val), self.evaluated(self.images.held_out)
        self.held_out_count = 0 if judged is None else judged.count
        pairs = [(None, None) if found is None else (found.loss, found.accuracy) for found in (validated, judged)]
        return EpochRecord(epoch, rate, *self._of_all_processes(), *pairs[0], *pairs[1])

    def evaluated(self, data: Data | None) -> Evaluation | None:
        if data is None:
            return None
        size, workers = self.config.batch_size, self.config.workers
        return evaluate(
            self.model, data, batch_size=size, accelerator=self.accelerator, task=self.task, workers=workers
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
        return all(bool(parameter.isfinite().all()) for parameter in self._parameters())

    def _of_all_processes(self) -> tuple[float, float | None]:
        metric, loss = self.lesson.value(), self.loss.compute()
        local = torch.stack([loss, loss.new_tensor(0.0 if metric is None else metric)])
        mean_loss, mean_metric = self.accelerator.reduce(local, reduction="mean").tolist()
        return mean_loss, None if metric is None else mean_metric

    def _set_rates(self, done: float) -> float:
        """Set the learning rate after the fraction `done` of all steps; each group has its share of it."""
        rate, ramp = learning_rate(self.config, done), weights_ramp(self.config, done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("share", 1.0) * (ramp if group.get("heavy") else 1.0)
        self._let_weights_wait(ramp == 0)
        return rate

    def _let_weights_wait(self, waiting: bool) -> None:
        if waiting != self.waiting and self.accelerator.num_processes == 1:
            for weight in self._parameters(heavy=True):
                weight.requires_grad_(not waiting)
        self.waiting = waiting

    def _parameters(self, *, heavy: bool = False) -> list[nn.Parameter]:
        """Return all that is trained, or the weights of it that the method alone would not train."""
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
        """Set the norms as configured, and dropout and stochastic depth to zero unless they are wanted."""
        with mode(self.model, training=True), ExitStack() as changes:
            for module in self.model.modules():
                if isinstance(module, nn.modules.batchnorm._NormBase):
                    module.train(self.config.norm_statistics == "batch")
                    momentum = self.config.norm_momentum or module.momentum
                    changes.enter_context(_changed(module, "momentum", momentum))
                if not self.config.dropout and (name := _drop_rate(module)) is not None:
                    changes.enter_context(_changed(module, name, 0.0))
            yield


def _drop_rate(module: nn.Module) -> str | None:
    """Return the attribute that says how much dropout, or stochastic depth, drops; None for other modules."""
    if isinstance(module, nn.modules.dropout._DropoutNd | StochasticDepth | DropBlock2d):
        return "p"
    return "drop_prob" if "drop_prob" in vars(module) else None  # timm's


@contextmanager
def _changed(module: nn.Module, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Draw PyTorch's random numbers (dropout, stochastic depth) from this seed; restore the old state."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
