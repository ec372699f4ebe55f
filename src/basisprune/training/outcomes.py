"""What a network does with each example of any task: rows of numbers, and the metric of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from basisprune.data import PreparedBatches, own_part
from basisprune.errors import DataError
from basisprune.tasks.base import Rows, Task
from basisprune.torchkit.running import ReadBatch, mode, placed
from basisprune.training.precision import single_at_least
from basisprune.training.units import Units, draws_of, sums, units_in, weights_of
from basisprune.transfer.model import spec_of

_BLOCKS = 200  # of examples that are left out together, at most

Answer = Callable[[Tensor], object]
"""Inputs -> what a network outputs, computed by PyTorch or any other program."""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The outcomes (n, k) of a network on the same examples as those of others, and the task that they are of."""

    task: Task
    rows: Rows
    units: Units | None = None

    def __len__(self) -> int:
        """The number of units."""
        return len(self.rows) if self.units is None else len(np.unique(self.units))

    @cached_property
    def value(self) -> float:
        """The metric; with units, of one example of each, in the mean over which one that is."""
        return float(np.mean([self.task.value(rows) for rows in self._drawn]))

    @cached_property
    def each(self) -> Rows:
        """What each unit, or each block of them, says of the metric: numbers (m,) whose mean is about the metric.

        For the mean of a column these are its numbers, or their mean in each unit. For any other metric they are
        Tukey's jackknife values, m * metric - (m - 1) * the metric without the block; their spread tells how far the
        metric can be trusted.
        """
        if self.task.metric is None:
            column = self.rows[:, 0]
            return column if self.units is None else sums(column * weights_of(self.units), self.units)
        blocks = np.array_split(np.arange(len(self)), min(len(self), _BLOCKS))
        count = len(blocks)
        if count < 2:
            return np.array([self.value])
        without = [
            np.mean([self.task.value(np.delete(rows, block, axis=0)) for rows in self._drawn]) for block in blocks
        ]
        found: Rows = count * self.value - (count - 1) * np.array(without)
        return found

    @cached_property
    def _drawn(self) -> list[Rows]:
        if self.units is None:
            return [self.rows]
        if self.task.metric is None:
            return [self.each[:, None]]
        return [self.rows[draw] for draw in draws_of(self.units)]


def floats(output: object) -> object:
    """The output with its tensors of half precision in float32."""
    return tree_map(
        lambda leaf: single_at_least(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, output
    )


def moved(targets: object, device: torch.device) -> object:
    """The targets on that device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, targets)


def task_batches(
    data: object,
    model: nn.Module,
    task: Task,
    *,
    batch_size: int = 128,
    prepared: bool = False,
    shared: bool = False,
) -> Iterable[ReadBatch]:
    """The data as batches of what the network reads and the targets: somebody's own, or images prepared here.

    Images that are `shared` are divided among the processes of a distributed run.
    """
    own = own_part(data, task, batch_size)
    if own is not None:
        return own
    images = cast("Dataset[object]", data)  # which is looked at there
    return cast(
        "Iterable[ReadBatch]",
        PreparedBatches(images, spec_of(model), batch_size=batch_size, prepared=prepared, shared=shared),
    )


def answers(model: nn.Module, batches: Iterable[ReadBatch], task: Task) -> Iterator[tuple[object, ReadBatch]]:
    """What counts of the network's output for each batch, with the batch; in the mode that the network is in."""
    for batch in batches:
        yield floats(task.output(model(placed(batch.inputs, model)))), batch


@torch.inference_mode()
def judge(model: nn.Module, data: object, task: Task, *, batch_size: int = 128, prepared: bool = False) -> Outcomes:
    """The outcomes of the model on all examples of the data, in order, in eval mode; the model is not changed."""
    device = next(model.parameters()).device
    with mode(model, training=False):
        rows = [
            task.rows(output, moved(batch.targets, device), len(batch.inputs))
            for output, batch in answers(
                model, task_batches(data, model, task, batch_size=batch_size, prepared=prepared), task
            )
        ]
    return joined(task, rows, data)


def joined(task: Task, rows: list[Rows], data: object = None) -> Outcomes:
    """The outcomes of all batches of the data, and which of them belong together.

    Raises DataError if there are none, or if rows differ in length.
    """
    if not rows:
        raise DataError(f"task {task.name}: the data contains no examples")
    widths = sorted({each.shape[1] for each in rows})
    if len(widths) > 1:
        raise DataError(
            f"task {task.name}: outcome returned rows of {' and of '.join(map(str, widths))} numbers; all need as many"
        )
    found = np.concatenate(rows)
    return Outcomes(task, found, units_in(data, len(found)))
