"""What a training learns from a batch of any task: its batches, their loss, and the metric on the way."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs
from torch import Tensor, nn

from basisprune.callback import Callback
from basisprune.data import blend, is_prepared, make_loader, own_part, prepare
from basisprune.errors import ConfigError
from basisprune.tasks import CLASSIFICATION, Rows, Task
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import mode, placed, plain_tensors
from basisprune.torchkit.watching import example_input, parameters_of, upstream, watch_run
from basisprune.training.checkpoint import EpochRecord, Past, out_of_patience
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import floats, moved
from basisprune.training.trainable import classes_of
from basisprune.transfer.model import known_spec, spec_of

logger = logging.getLogger(__name__)

Stop: TypeAlias = Callable[[Sequence[EpochRecord]], bool]


@dataclass(frozen=True)
class Session:
    """What a training may have around it.

    Args:
        teacher: Another network for the same images and classes, to learn from with `distill`.
        stop: Asked after each epoch, with the records so far, whether to end early.
        accelerator: The one that carries the training; None: a new one by the configuration.
        callback: Notified of each step; without one, `fit` draws a bar.
        task: What is trained for.
    """

    teacher: nn.Module | None = None
    stop: Stop | None = None
    accelerator: Accelerator | None = None
    callback: Callback | None = None
    task: Task = CLASSIFICATION

    def log(self, line: str) -> None:
        (logger.info if self.callback is None else self.callback.log)(line)

    def ends(self, past: Past, config: TrainConfig) -> bool:
        history = past.history
        if len(history) >= config.epochs or out_of_patience(history, config.patience):
            return True
        return bool(history) and self.stop is not None and self.stop(history)


def wrapped(model: nn.Module, accelerator: Accelerator) -> nn.Module:
    """Return the model as Accelerate runs it: by itself, or with gradients that several processes have in common.

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
    used = parameters_of(upstream(watch_run(model, example, train=True, whole=True).output_nodes))
    return any(each.requires_grad and id(each) not in used for each in model.parameters())


class Feed:
    """The batches of a training, epoch by epoch: images that are prepared and augmented here, or a user's own."""

    def __init__(
        self, data: object, task: Task, model: nn.Module, config: TrainConfig, accelerator: Accelerator
    ) -> None:
        self.data, self.config, self.accelerator = data, config, accelerator
        self.own = own_part(data, task, config.batch_size, shuffle=True)
        if self.own is None:
            self.is_prepared, self.spec = is_prepared(data), spec_of(model)
        elif config.augmentation.moves or config.augmentation.paints:
            raise ConfigError(
                f"augmentation: {config.augmentation} given; it is for images that are read here, so change the inputs "
                "in your own loader"
            )

    @property
    def steps(self) -> int:
        return len(self._images(0)) if self.own is None else self.own.steps

    def epoch(self, epoch: int, generator: torch.Generator) -> Iterator[tuple[Tensor, object]]:
        if self.own is not None:
            yield from self.own
            return
        prepared, augmentation = self.is_prepared, self.config.augmentation
        for images, labels in map(plain_tensors, self._images(epoch)):
            batch = prepare(images, self.spec, prepared=prepared, augmentation=augmentation, generator=generator)
            yield batch, labels

    def _images(self, epoch: int) -> Any:
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
        return self.accelerator.prepare_data_loader(loader)


class Lesson:
    """The loss of a batch, and the metric of all batches since `reset`."""

    def __init__(self, model: nn.Module, config: TrainConfig, accelerator: Accelerator, session: Session) -> None:
        self.teacher = _checked_teacher(session, model, config)
        if self.teacher is not None:
            self.teacher.to(accelerator.device)
        self.model, self.config, self.accelerator = model, config, accelerator
        self.wrapped = wrapped(model, accelerator)
        self.task = session.task.in_training(
            label_smoothing=config.label_smoothing, temperature=config.distill_temperature
        )
        self.classes = classes_of(model) if config.augmentation.blends else 0
        self.last: tuple[object, object, int] | None = None
        self.reset()

    def loss(self, inputs: Tensor, targets: object, generator: torch.Generator) -> Tensor:
        """Return the task's loss, in part with the distance from what the teacher says."""
        task, blending, autocast = self.task, self.config.augmentation, self.accelerator.autocast
        wanted, counted = targets, targets
        if blending.blends:
            inputs, wanted = blend(inputs, cast(Tensor, targets), blending, classes=self.classes, generator=generator)
            counted = wanted.argmax(1)
        wanted, counted = moved((wanted, counted), self.accelerator.device)  # type: ignore[misc]
        with autocast():
            batch = placed(inputs, self.model)
            if task.model_loss is not None:
                return task.mean_loss(self.wrapped, batch, wanted)
            output = task.output(self.wrapped(batch))
        output = floats(output)
        loss = task.output_loss(output, wanted)
        if self.teacher is not None and task.distance is not None:
            with torch.no_grad(), mode(self.teacher, training=False), autocast():
                taught = floats(task.output(self.teacher(placed(inputs, self.teacher))))
            share = self.config.distill
            loss = (1 - share) * loss + share * task.checked_loss(task.distance(output, taught))
        self.last = output, counted, len(batch)
        return loss

    @torch.no_grad()
    def note(self) -> None:
        if self.last is not None:
            self.rows.append(self.task.rows(*self.last))
            hits = self.task.hits(self.rows[-1])
            if hits is not None:
                self.right += int(hits.sum())
                self.seen += len(hits)
        self.last = None

    def reset(self) -> None:
        self.rows: list[Rows] = []
        self.right = self.seen = 0

    def so_far(self) -> float | None:
        """Return the accuracy of what was noted; None for other metrics, which take a while."""
        return self.right / self.seen if self.seen else None

    def value(self) -> float | None:
        """Return the metric of what was noted; None if the network computes its loss itself."""
        return self.task.outcomes(self.rows).value if self.rows else None


def _checked_teacher(session: Session, model: nn.Module, config: TrainConfig) -> nn.Module | None:
    """Return the teacher; raise ConfigError without one, and for settings that the task has no use for."""
    task, faults = session.task, []
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
    if config.distill and session.teacher is None:
        faults.append(
            f"distill: {config.distill} given, but no teacher; pass session=Session(teacher=...) to fit, or distill=0"
        )
    if faults:
        raise ConfigError.of("fit", faults)
    if config.distill == 0:
        return None
    spec, wanted = known_spec(model), getattr(session.teacher, "input_spec", None)
    if spec is not None and wanted not in (None, spec):
        raise ConfigError(f"teacher: it wants images as {wanted}, the model as {spec}; both are shown the same")
    return session.teacher
