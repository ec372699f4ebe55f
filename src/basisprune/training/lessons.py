"""What a training learns from one batch: the loss of a task, and what its outputs are worth on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from basisprune.data import LoaderPart, blend, make_loader, own_part, prepare
from basisprune.errors import ConfigError
from basisprune.tasks.base import Rows, Task
from basisprune.torchkit.running import mode, placed
from basisprune.training.config import TrainConfig
from basisprune.training.outcomes import floats, joined, moved
from basisprune.training.precision import single_at_least
from basisprune.training.trainable import classes_of
from basisprune.transfer.model import spec_of


class Lesson(Protocol):
    """The loss of a batch, and the metric of all batches since `reset`."""

    def loss(self, inputs: Tensor, targets: object, generator: torch.Generator) -> Tensor:
        """The loss to be minimised."""

    def note(self) -> None:
        """Counts the outputs of the last batch."""

    def reset(self) -> None:
        """Forgets what was counted."""

    def so_far(self) -> float | None:
        """The metric of what was counted, if that is quick to tell."""

    def value(self) -> float | None:
        """The metric of what was counted; None where there is none."""


@dataclass(frozen=True)
class Pupil:
    """The model, as it is and as Accelerate wraps it, with its teacher if it has one."""

    model: nn.Module
    wrapped: nn.Module
    config: TrainConfig
    accelerator: Accelerator
    teacher: nn.Module | None = None


class ClassLesson:
    """Classes of images: cross entropy, with smoothed labels, blended images and a teacher's classes if asked for."""

    def __init__(self, pupil: Pupil) -> None:
        self.pupil = pupil
        self.classes = classes_of(pupil.model)
        # Only the main process shows it on the way, so it must not wait for the others.
        self.accuracy = MulticlassAccuracy(self.classes, average="micro", sync_on_compute=False)
        self.accuracy.to(pupil.accelerator.device)
        self.last: tuple[Tensor, Tensor] | None = None

    def loss(self, inputs: Tensor, targets: object, generator: torch.Generator) -> Tensor:
        """The cross entropy, in part with what the teacher says."""
        config, labels = self.pupil.config, cast(Tensor, targets)
        batch, truth = inputs, labels
        if config.augmentation.blends:
            batch, truth = blend(batch, labels, config.augmentation, classes=self.classes, generator=generator)
            labels = truth.argmax(1)
        with self.pupil.accelerator.autocast():
            logits = self.pupil.wrapped(placed(batch, self.pupil.model))
        loss = F.cross_entropy(single_at_least(logits), truth, label_smoothing=config.label_smoothing)
        if self.pupil.teacher is not None:
            loss = (1 - config.distill) * loss + config.distill * self._distance(self.pupil.teacher, batch, logits)
        self.last = logits.detach(), labels
        return loss

    def _distance(self, teacher: nn.Module, batch: Tensor, logits: Tensor) -> Tensor:
        """How far the model's classes, softened, are from what the teacher says of the batch."""
        with torch.no_grad(), mode(teacher, training=False), self.pupil.accelerator.autocast():
            taught: Tensor = teacher(placed(batch, teacher))
        if taught.shape != logits.shape:
            shapes = f"{tuple(taught.shape)} where the model outputs {tuple(logits.shape)}"
            raise ConfigError(f"teacher: outputs {shapes}; it must distinguish the same classes")
        heat = self.pupil.config.distill_temperature
        student, goal = (F.log_softmax(single_at_least(values) / heat, dim=-1) for values in (logits, taught))
        # The square keeps the gradient as large as that of the labels, whatever the temperature.
        return heat**2 * F.kl_div(student, goal, reduction="batchmean", log_target=True)

    def note(self) -> None:
        """Counts the classes of the last batch."""
        if self.last is not None:
            self.accuracy.update(*self.last)

    def reset(self) -> None:
        """Forgets what was counted."""
        self.accuracy.reset()

    def so_far(self) -> float | None:
        """The accuracy."""
        return float(self.accuracy.compute().item())

    def value(self) -> float | None:
        """The accuracy."""
        return self.so_far()


class TaskLesson:
    """Any other task: its own loss, and its metric at the end."""

    def __init__(self, pupil: Pupil, task: Task) -> None:
        self.pupil, self.task = pupil, task
        self.rows: list[Rows] = []
        self.last: tuple[object, object, int] | None = None

    def loss(self, inputs: Tensor, targets: object, generator: torch.Generator) -> Tensor:  # noqa: ARG002
        """The task's loss, in part with its distance from what the teacher says."""
        pupil, task = self.pupil, self.task
        batch, there = placed(inputs, pupil.model), moved(targets, pupil.accelerator.device)
        if task.model_loss is not None:
            with pupil.accelerator.autocast():
                return task.mean_loss(pupil.wrapped, batch, there)
        with pupil.accelerator.autocast():
            output = task.output(pupil.wrapped(batch))
        output = floats(output)
        loss = task.output_loss(output, there)
        if pupil.teacher is not None and task.distance is not None:
            with torch.no_grad(), mode(pupil.teacher, training=False), pupil.accelerator.autocast():
                taught = floats(task.output(pupil.teacher(placed(batch, pupil.teacher))))
            share = pupil.config.distill
            loss = (1 - share) * loss + share * task.checked_loss(task.distance(output, taught))
        self.last = output, there, len(batch)
        return loss

    @torch.no_grad()
    def note(self) -> None:
        """Keeps the outcomes of the last batch."""
        if self.last is not None:
            self.rows.append(self.task.rows(*self.last))
        self.last = None

    def reset(self) -> None:
        """Forgets them."""
        self.rows = []

    def so_far(self) -> float | None:
        """Nothing: a metric of all examples may take a while."""
        return None

    def value(self) -> float | None:
        """The metric of the outcomes; None if the network computes its loss itself."""
        return joined(self.task, self.rows).value if self.rows else None


def make_lesson(pupil: Pupil, task: Task) -> Lesson:
    """The lesson for a task; raises ConfigError for settings that it has no use for."""
    if task.is_classification:
        return ClassLesson(pupil)
    faults = []
    if pupil.config.label_smoothing:
        faults.append(f"label_smoothing: {pupil.config.label_smoothing} given; it is for classification only")
    if pupil.config.augmentation.blends:
        faults.append("augmentation: mixup and cutmix given; they are for classification only")
    if pupil.config.distill and task.distance is None:
        faults.append(
            f"distill: {pupil.config.distill} given, but the task {task.name} does not say how far two outputs are "
            "apart; pass Task(distance=...), or distill=0"
        )
    if faults:
        raise ConfigError.of("fit", faults)
    return TaskLesson(pupil, task)


class Feed:
    """The batches of a training, epoch by epoch: images that are prepared and augmented here, or somebody's own."""

    def __init__(
        self, data: object, task: Task, model: nn.Module, config: TrainConfig, accelerator: Accelerator
    ) -> None:
        self.data, self.config, self.accelerator = data, config, accelerator
        self.own = own_part(data, task, config.batch_size, shuffle=True)
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
                images, self.spec, prepared=config.prepared, augmentation=config.augmentation, generator=generator
            )
            yield batch, labels

    def _images(self, epoch: int) -> object:
        assert self.spec is not None
        config = self.config
        loader = make_loader(
            self.data,  # type: ignore[arg-type]
            math.ceil(config.batch_size / self.accelerator.num_processes),
            shuffle=True,
            seed=config.seed,
            epoch=epoch,
            workers=config.workers,
            size=self.spec.image_size,
        )
        assert not isinstance(loader, LoaderPart)
        return self.accelerator.prepare_data_loader(loader)
