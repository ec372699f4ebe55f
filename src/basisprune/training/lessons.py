"""What a training learns from a batch: the loss of its task, and the metric of the outputs on the way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from basisprune.data import LoaderPart, blend, is_prepared, make_loader, own_part, prepare
from basisprune.errors import ConfigError
from basisprune.tasks import Rows, Task
from basisprune.torchkit.running import mode, placed
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import floats, moved
from basisprune.training.trainable import classes_of
from basisprune.transfer.model import spec_of


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
    if not task.has_classes:
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
