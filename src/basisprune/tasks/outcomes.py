"""The outcome of each example, and the units of examples that belong together.

Examples that belong together, as copies of an image or images of one patient do, count as one unit. All metrics are
those of a unit drawn at random, and then an example of it: each unit counts the same, however many examples it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from basisprune.errors import DataError

if TYPE_CHECKING:
    from basisprune.tasks.base import Task

Rows: TypeAlias = npt.NDArray[np.float64]
"""The outcomes of examples, (n, k): one row of numbers for each."""
Units: TypeAlias = npt.NDArray[np.int64]
"""The number of each example's unit."""

_BLOCKS = 200  # of units that are left out together, at most
_MOST_DRAWS = 16


@dataclass(frozen=True, eq=False)
class Outcomes:
    """The outcomes of a network on a part of the data: `rows` (n, k), one for each example, in order.

    `units` are the numbers of the examples' units; None where each example is its own.
    """

    task: Task
    rows: Rows
    units: Units | None = None

    def __len__(self) -> int:
        """The number of units."""
        return len(self.rows) if self.units is None else len(np.unique(self.units))

    @cached_property
    def value(self) -> float:
        """The metric; with units, of one example of each, averaged over the choice."""
        return float(np.mean([self.task.value(rows) for rows in self._drawn]))

    @cached_property
    def each(self) -> Rows:
        """Numbers (m,) of the units, or blocks of them, whose mean is about the metric.

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

    def lost_and_won(self, after: Outcomes) -> tuple[int, int]:
        """Count the units that get worse and better; zeros for a metric that is no mean of examples."""
        if self.task.metric is not None:
            return 0, 0
        return int((self.each > after.each).sum()), int((self.each < after.each).sum())

    @cached_property
    def _drawn(self) -> list[Rows]:
        if self.units is None:
            return [self.rows]
        if self.task.metric is None:
            return [self.each[:, None]]
        return [self.rows[draw] for draw in draws_of(self.units)]


def units_in(data: object, count: int) -> Units | None:
    """Return the units of all `count` examples of the data; None where each example is its own."""
    units: Units | None = getattr(data, "units", None)
    if units is not None and len(units) != count:
        raise DataError(f"{count:,} examples seen where {len(units):,} are known; the data gives others than before")
    return units


def sums(values: npt.NDArray[np.generic], units: Units) -> Rows:
    """Sum the values of each unit.

    >>> sums(np.array([1.0, 2.0, 4.0]), np.array([7, 3, 7]))
    array([2., 5.])
    """
    _, places = np.unique(units, return_inverse=True)
    return np.bincount(places.ravel(), values).astype(np.float64)


def weights_of(units: Units) -> Rows:
    """Return the weights of the examples, whose sum is 1 in each unit."""
    _, places, counts = np.unique(units, return_inverse=True, return_counts=True)
    found: Rows = 1 / counts[places.ravel()]
    return found


def draws_of(units: Units) -> list[npt.NDArray[np.int64]]:
    """Return several draws of one example (its index) for each unit, in which all examples have their turn."""
    order = np.argsort(units, kind="stable")
    _, starts, counts = np.unique(units[order], return_index=True, return_counts=True)
    return [order[starts + turn % counts] for turn in range(min(int(counts.max()), _MOST_DRAWS))]
