"""The one training loop: what is trainable, the recipe, resume (the paper's Algorithm 1, `finetuning`)."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from basisprune.basis.layers import BasisPair, BasisScalingConv
from basisprune.data import make_loader, prepare
from basisprune.errors import ConfigError, DataError, MissingExtraError, ModelError, TrainingError
from basisprune.torchkit.running import mode
from basisprune.torchkit.surgery import find_layers, is_norm
from basisprune.training.checkpoint import load_checkpoint, save_checkpoint
from basisprune.training.config import TrainConfig, learning_rate
from basisprune.training.progress import TrainingProgress
from basisprune.transfer.model import spec_of
from basisprune.types import dotted

logger = logging.getLogger(__name__)

Data = Dataset[Any] | DataLoader[Any]
Stop = Callable[[Sequence["EpochRecord"]], bool]


@dataclass(frozen=True)
class EpochRecord:
    """What one pass over the training images showed; the accuracies are fractions."""

    epoch: int
    learning_rate: float
    train_loss: float
    train_accuracy: float
    val_loss: float | None
    val_accuracy: float | None


@dataclass(frozen=True)
class FitResult:
    """The trained model and one record for each epoch."""

    model: nn.Module
    history: tuple[EpochRecord, ...]


@dataclass(frozen=True)
class Evaluation:
    """The mean loss and the fraction of `count` images that are classified correctly."""

    loss: float
    accuracy: float
    count: int


def set_trainable(model: nn.Module, *, scales: bool = True) -> list[nn.Parameter]:
    """The parameters that the method trains: norm layers, basis scales, classifier; all others are frozen.

    The classifier is the model's `classifier` (as in `transfer_model`), or what timm's `get_classifier` gives,
    or else its last linear layer. Without `scales`, these are frozen too. Changes `requires_grad` in place.
    """
    chosen: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, BasisScalingConv):
            chosen[id(module.scale)] = module.scale
        elif is_norm(module):
            chosen.update({id(parameter): parameter for parameter in module.parameters(recurse=False)})
    for head in find_classifiers(model):
        chosen.update({id(parameter): parameter for parameter in head.parameters()})
    if not scales:
        for _, scaling in find_layers(model, BasisScalingConv):
            chosen.pop(id(scaling.scale))
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    return list(chosen.values())


def find_classifiers(model: nn.Module) -> list[nn.Module]:
    """The module that gives the classes."""
    if isinstance(getattr(model, "classifier", None), nn.Module):
        return [model.classifier]  # type: ignore[list-item]
    if callable(getattr(model, "get_classifier", None)):
        return [model.get_classifier()]  # type: ignore[operator]
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, BasisPair)
    found = [layer for _, layer in find_layers(model, kinds, opaque=BasisPair) if _is_linear(layer)]
    return found[-1:]


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer.basis if isinstance(layer, BasisPair) else layer, nn.Linear)


def project_scales(model: nn.Module) -> None:
    """Sets negative basis scaling factors to zero, in place: the paper constrains them to be non-negative."""
    scales = [module.scale.data for module in model.modules() if isinstance(module, BasisScalingConv)]
    if scales:
        torch._foreach_clamp_min_(scales, 0.0)


def fit(
    model: nn.Module,
    train: Data,
    val: Data | None,
    config: TrainConfig,
    *,
    checkpoint: str | Path | None = None,
    accelerator: Accelerator | None = None,
    progress: bool | None = None,
    stop: Stop | None = None,
    teacher: nn.Module | None = None,
    inplace: bool = False,
) -> FitResult:
    """The model with norms, basis scales and classifier trained as `config` says; everything else is frozen.

    `train` and `val` are datasets (or loaders) of pixels; the model's `input_spec` tells how they are
    prepared. With `checkpoint`, the state is written there after each epoch, and a run that was killed goes
    on from it and ends in the same weights. `progress=None` shows a bar in a terminal only. `stop` is asked
    after each epoch, with the records so far, whether to end early. Accelerate carries the training: run it
    under `accelerate launch` for several GPUs or nodes.

    With `config.distill`, the model also learns what `teacher`, another network for the same images and
    classes, says of each augmented batch in eval mode. The teacher moves to the device of the training and is
    otherwise not changed; with `distill=0` it is not asked at all. A run that is resumed needs the same one.

    Raises TrainingError when the loss is no longer finite (the last checkpoint stays), CheckpointError when
    the checkpoint belongs to another run, ConfigError when there is no teacher to learn from, or a wrong one.
    """
    model = model if inplace else copy.deepcopy(model)
    accelerator = accelerator or make_accelerator(config, checkpoint)
    run = _Run(model, train, val, config, accelerator, _checked_teacher(teacher, model, config))
    path = None if checkpoint is None else Path(checkpoint)
    history = run.resume(path) if path is not None and path.exists() else []
    show = progress if accelerator.is_main_process else False
    with run.tracked(), TrainingProgress(config.epochs, run.steps, show=show) as bar:
        for epoch in range(len(history), config.epochs):
            if stop is not None and history and stop(history):
                break
            record = run.epoch(epoch, bar)
            history.append(record)
            logger.info("%s", record)
            accelerator.log({key: v for key, v in asdict(record).items() if v is not None}, step=epoch)
            if path is not None and accelerator.is_main_process:
                records = [asdict(past) for past in history]
                save_checkpoint(path, run.model, run.optimizer, config, records, accelerator.scaler)
    run.model.eval()
    return FitResult(run.model, tuple(history))


def evaluate(
    model: nn.Module,
    data: Data,
    *,
    batch_size: int = 128,
    prepared: bool = False,
    accelerator: Accelerator | None = None,
) -> Evaluation:
    """The loss and accuracy of the model on the data, in eval mode.

    The model is moved to the accelerator's device, and otherwise not changed.
    """
    accelerator = accelerator or Accelerator()
    spec = spec_of(model)
    loader = accelerator.prepare_data_loader(make_loader(data, batch_size))
    device = accelerator.device
    accuracy = MulticlassAccuracy(classes_of(model), average="micro", sync_on_compute=False).to(device)
    loss = MeanMetric(sync_on_compute=False).to(device)
    count = 0
    model.to(device)
    with torch.inference_mode(), mode(model, training=False), accelerator.autocast():
        for images, labels in loader:
            logits = model(prepare(images, spec, prepared=prepared)).float()
            logits, labels = accelerator.gather_for_metrics((logits, labels))
            accuracy.update(logits, labels)
            loss.update(F.cross_entropy(logits, labels), len(labels))
            count += len(labels)
    if count == 0:
        raise DataError("evaluate: the data holds no image")
    return Evaluation(loss.compute().item(), accuracy.compute().item(), count)


def make_accelerator(config: TrainConfig, checkpoint: str | Path | None = None) -> Accelerator:
    """An Accelerator for the run: its precision and, by name, its tracker (whose logs lie by the checkpoint).

    Raises MissingExtraError for a tracker that is not installed, ConfigError for a precision that the device
    does not have.
    """
    if config.tracker is not None and find_spec(config.tracker) is None:
        raise MissingExtraError(config.tracker, extra=config.tracker)
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


def classes_of(model: nn.Module) -> int:
    """The number of classes that the model tells apart; raises ModelError where no linear layer ends it."""
    kinds: tuple[type[nn.Module], ...] = (nn.Linear, BasisPair)
    heads = [layer for head in find_classifiers(model) for _, layer in find_layers(head, kinds, opaque=BasisPair)]
    if not heads:
        raise ModelError(f"{type(model).__name__} has no linear classifier; build it with transfer_model")
    return heads[-1].out_features  # type: ignore[return-value]


def _checked_teacher(teacher: nn.Module | None, model: nn.Module, config: TrainConfig) -> nn.Module | None:
    if config.distill == 0:
        return None
    if teacher is None:
        raise ConfigError(f"distill: {config.distill} given, but no teacher; pass fit(..., teacher=), or distill=0")
    spec, wanted = spec_of(model), getattr(teacher, "input_spec", None)
    if wanted not in (None, spec):
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
        teacher: nn.Module | None,
    ) -> None:
        self.config, self.accelerator, self.train, self.val = config, accelerator, train, val
        self.spec = spec_of(model)
        self.parameters = set_trainable(model, scales=config.train_scales)
        if config.channels_last:
            model = model.to(memory_format=torch.channels_last)
        self.optimizer = accelerator.prepare_optimizer(_optimizer(self.parameters, config))
        self.model = model.to(accelerator.device)
        self.teacher = None if teacher is None else teacher.to(accelerator.device)
        self.wrapped = accelerator.prepare_model(model)
        # Only the main process shows them on the way, so they must not wait for the others.
        self.accuracy = MulticlassAccuracy(classes_of(model), average="micro", sync_on_compute=False)
        self.loss = MeanMetric(sync_on_compute=False)
        self.accuracy.to(accelerator.device), self.loss.to(accelerator.device)
        self.steps = len(self._loader(0))
        if self.steps == 0:
            raise DataError("fit: the training data holds no batch")

    def _loader(self, epoch: int) -> DataLoader[Any]:
        config = self.config
        loader = make_loader(
            self.train, config.batch_size, shuffle=True, seed=config.seed, epoch=epoch, workers=config.workers
        )
        return self.accelerator.prepare_data_loader(loader)  # type: ignore[no-any-return]

    @contextmanager
    def tracked(self) -> Iterator[None]:
        """The tracker runs, if there is one; afterwards the model is rid of what Accelerate put on it."""
        if self.config.tracker:
            self.accelerator.init_trackers("basisprune", config=_as_shown(asdict(self.config)))
        try:
            yield
        finally:
            if self.config.tracker:
                self.accelerator.end_training()
            for name in ("forward", "_original_forward", "_is_accelerate_prepared"):
                self.model.__dict__.pop(name, None)

    def resume(self, path: Path) -> list[EpochRecord]:
        history = load_checkpoint(path, self.model, self.optimizer, self.config, self.accelerator.scaler)
        logger.info("%s: goes on after epoch %d", path, len(history))
        return [EpochRecord(**record) for record in history]

    def epoch(self, epoch: int, bar: TrainingProgress) -> EpochRecord:
        """One pass over the training images, then the accuracy on the validation images."""
        config = self.config
        seed = (config.seed * 100_003 + epoch) * 1_009 + self.accelerator.process_index
        generator = torch.Generator().manual_seed(seed)
        self.accuracy.reset()
        self.loss.reset()
        rate = config.lr
        with _seeded(seed), self._training_mode():
            for step, (images, labels) in enumerate(self._loader(epoch)):
                rate = learning_rate(config, (epoch * self.steps + step) / (config.epochs * self.steps))
                value = self._step(images, labels, rate, generator)
                if not math.isfinite(value):
                    raise TrainingError(
                        f"epoch {epoch}, step {step}: the loss is {value} at learning rate {rate:.3g}; lower "
                        "lr, or check the images. The last checkpoint, if any, is untouched"
                    )
                bar.step(epoch, len(labels) * self.accelerator.num_processes, self.loss, self.accuracy)
        if not all(bool(parameter.isfinite().all()) for parameter in self.parameters):
            raise TrainingError(
                f"epoch {epoch}: weights are no longer finite after learning rate {rate:.3g}; lower lr. The last "
                "checkpoint, if any, is untouched"
            )
        held_out: tuple[float, float] | tuple[None, None] = None, None
        if self.val is not None:
            size, prepared = config.batch_size, config.prepared
            found = evaluate(self.model, self.val, batch_size=size, prepared=prepared, accelerator=self.accelerator)
            held_out = found.loss, found.accuracy
        local = torch.stack([self.loss.compute(), self.accuracy.compute()])
        loss, accuracy = self.accelerator.reduce(local, reduction="mean").tolist()
        return EpochRecord(epoch, rate, loss, accuracy, *held_out)

    def _step(self, images: Tensor, labels: Tensor, rate: float, generator: torch.Generator) -> float:
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = prepare(
            images, self.spec, prepared=config.prepared, augmentation=config.augmentation, generator=generator
        )
        with self.accelerator.autocast():
            logits = self.wrapped(batch)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=config.label_smoothing)
        if self.teacher is not None:
            loss = (1 - config.distill) * loss + config.distill * self._distance(self.teacher, batch, logits)
        value = loss.item()
        if math.isfinite(value):
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if config.train_scales:
                project_scales(self.model)
            self.accuracy.update(logits.detach(), labels)
            self.loss.update(value, len(labels))
        return value

    def _distance(self, teacher: nn.Module, batch: Tensor, logits: Tensor) -> Tensor:
        """How far the model's classes, softened, are from what the teacher says of the batch."""
        with torch.no_grad(), mode(teacher, training=False), self.accelerator.autocast():
            taught: Tensor = teacher(batch)
        if taught.shape != logits.shape:
            shapes = f"{tuple(taught.shape)} where the model puts out {tuple(logits.shape)}"
            raise ConfigError(f"teacher: puts out {shapes}; it must tell the same classes apart")
        heat = self.config.distill_temperature
        student, goal = (F.log_softmax(values.float() / heat, dim=-1) for values in (logits, taught))
        # The square keeps the gradient as large as that of the labels, whatever the temperature.
        return heat**2 * F.kl_div(student, goal, reduction="batchmean", log_target=True)

    @contextmanager
    def _training_mode(self) -> Iterator[None]:
        with mode(self.model, training=True):
            if self.config.norm_statistics == "fixed":
                for module in self.model.modules():
                    if isinstance(module, nn.modules.batchnorm._NormBase):
                        module.eval()
            yield


def _optimizer(parameters: list[nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    if config.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay)
    return torch.optim.SGD(parameters, lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """PyTorch's random numbers (dropout, stochastic depth) from this seed; the old state comes back."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def _as_shown(config: dict[str, Any]) -> dict[str, int | float | str]:
    """The settings as trackers take them: numbers and texts under dotted names."""
    return {key: value if isinstance(value, int | float | str) else str(value) for key, value in dotted(config)}
