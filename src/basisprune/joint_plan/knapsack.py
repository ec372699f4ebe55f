"""The least loss for every budget: levers that each trade loss for cost, and the frontier of all their settings.

For each price, all levers are set to where loss + price * cost is lowest given the others, in turns, until none moves;
between two settings, the next price is the one at which both are worth the same, as long as that finds a better one.
Which settings are found does not depend on any budget, so that a larger budget never loses more. The settings of a
single threshold for all are looked at too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from basisprune.planning import Array, Queue

Place: TypeAlias = tuple[str, int]
"""An axis of a parameter: its name and the dimension."""

_TURNS = 30
_LOWEST = 1e-15  # a price, of that at which all that can be lost weighs as much as the whole cost
_FINE = 0.006  # steps of the cost, as a share of the whole, that need not be finer
_THRESHOLDS = 96


@dataclass(frozen=True)
class Lever:
    """One rank or width: `losses[level]` is what goes with all but `queue.starts[level]` slots.

    `reach` says by how much one slot shortens which axes.
    """

    queue: Queue
    losses: Array
    reach: Mapping[Place, float]

    @classmethod
    def of(cls, queue: Queue, reach: Mapping[Place, float]) -> Lever:
        """The lever of a queue that reaches these axes."""
        count, lengths = len(queue.order), np.diff(queue.starts)
        blocks = np.asarray(queue.values) * lengths * count
        losses = np.concatenate([np.cumsum(blocks[::-1])[::-1], [0.0]])
        return cls(queue, losses, reach)


class Sizes(Protocol):
    """What everything costs as levers move."""

    def costs(self, lever: Lever, level: int) -> Array:
        """What all that the lever reaches costs at each of its levels, if it is at this one now."""

    def move(self, lever: Lever, before: int, after: int) -> None:
        """Moves the lever from one level to another."""

    def total(self) -> float:
        """What everything costs now."""


@dataclass(frozen=True)
class Point:
    """A setting of all levers: what it costs, and what is lost."""

    levels: tuple[int, ...]
    cost: float
    loss: float


def explore(levers: Sequence[Lever], sizes: Sizes) -> tuple[Point, ...]:
    """Settings of little loss, from the whole, which comes first, to the cheapest; `sizes` are those of the whole."""
    whole = [len(lever.losses) - 1 for lever in levers]
    setting = _Setting(levers, sizes, list(whole))
    first = setting.point()
    most = sum(float(lever.losses[0]) for lever in levers)
    ends = setting.settled(_LOWEST * most / first.cost if first.cost else 0.0), setting.settled(math.inf)
    found = {point.levels: point for point in (first, *ends)}
    between = [ends]
    while between:
        dear, cheap = between.pop()
        saved = dear.cost - cheap.cost
        if saved <= _FINE * first.cost:
            continue
        price = (cheap.loss - dear.loss) / saved  # at which both are worth the same
        point = setting.settled(price)
        if point.loss + price * point.cost < (cheap.loss + price * cheap.cost) * (1 - 1e-9):
            between += [(dear, point), (point, cheap)]
        found.setdefault(point.levels, point)
    for levels in _by_threshold(levers):
        setting.go(levels)
        point = setting.filled()
        found.setdefault(point.levels, point)
    setting.go(whole)
    return tuple(found.values())


@dataclass
class _Setting:
    """Levers at their levels, and what everything costs there."""

    levers: Sequence[Lever]
    sizes: Sizes
    levels: list[int]

    def point(self) -> Point:
        loss = sum(float(lever.losses[level]) for lever, level in zip(self.levers, self.levels, strict=True))
        return Point(tuple(self.levels), self.sizes.total(), loss)

    def go(self, levels: Sequence[int]) -> None:
        for place, lever in enumerate(self.levers):
            self._move(place, lever, levels[place])

    def settled(self, price: float) -> Point:
        """Where no lever moves any more at this price; all begin whole."""
        self.go([len(lever.losses) - 1 for lever in self.levers])
        for _ in range(_TURNS):
            before = list(self.levels)
            for place, lever in enumerate(self.levers):
                costs = self.sizes.costs(lever, self.levels[place])
                worth = costs if math.isinf(price) else lever.losses + price * costs
                self._move(place, lever, int(np.argmin(worth)))
            if self.levels == before:
                break
        return self.point()

    def filled(self) -> Point:
        """Where every lever keeps all that costs nothing more."""
        for place, lever in enumerate(self.levers):
            level = self.levels[place]
            costs = self.sizes.costs(lever, level)
            self._move(place, lever, int(np.flatnonzero(costs <= costs[level])[-1]))
        return self.point()

    def _move(self, place: int, lever: Lever, level: int) -> None:
        self.sizes.move(lever, self.levels[place], level)
        self.levels[place] = level


def _by_threshold(levers: Sequence[Lever]) -> list[list[int]]:
    """The levels at which all levers keep what is worth more than one threshold, for several of them."""
    values = np.unique(np.concatenate([np.asarray(lever.queue.values) for lever in levers] or [np.zeros(0)]))
    if len(values) > _THRESHOLDS:
        values = np.quantile(values, np.linspace(0, 1, _THRESHOLDS), method="nearest")
    worth = [np.asarray(lever.queue.values) for lever in levers]
    return [[int(np.sum(each > value)) for each in worth] for value in values]
