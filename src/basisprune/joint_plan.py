"""Basis vectors, filters and whole branches in one plan: a knapsack over what each loses and costs (not in the paper).

The loss is the sum of the scores of all that goes, halved; the cost of a weight, or the time of a layer, depends on how
many vectors and filters stay at either side of it. Each layer's rank and each group's width is a lever. For each price,
all levers are set to where loss + price * cost is lowest given the others, until none moves; between two
settings, the next price is the one at which both are worth the same, as long as that finds a better one. The settings
of a single threshold for all scores are looked at too. Which settings are found does not depend on any budget, so that
a larger budget never loses more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from torch import nn

from basisprune.basis.layers import BasisPair, basis_pairs, half_name
from basisprune.errors import PlanError, TooMuchError
from basisprune.layer_times import NetworkTimes
from basisprune.planning import Array, PlanConfig, Queue, checked_values, filter_plan, group_parts, traced, unit_scores
from basisprune.torchkit.surgery import is_transposed
from basisprune.types import BasisPlan, Block, Coupling, Group, JointPlan, LayerPlan, Scores

Place: TypeAlias = tuple[str, int]
"""An axis of a parameter: its name and the dimension."""

Costs: TypeAlias = Mapping[str, int] | NetworkTimes
"""What `weight_uses` tells of a model, or the times of its layers on a device."""

Price: TypeAlias = Callable[[Sequence[Array]], Array]
"""What a parameter of this shape costs."""


_TURNS = 30
_LOWEST = 1e-15  # a price, of that at which all that can be lost weighs as much as the whole cost
_FINE = 0.006  # steps of the cost, as a share of the whole, that need not be finer
_THRESHOLDS = 96


def plan_together(
    model: nn.Module,
    basis: Scores,
    filters: Scores,
    pruning_ratio: float,
    config: PlanConfig | None = None,
    *,
    coupling: Coupling | None = None,
    costs: Costs | None = None,
) -> JointPlan:
    """Plan the removal of at least the fraction `pruning_ratio` of parameters, multiply-adds or time, at least loss.

    One point of `plan_frontier`, which has the settings. Raises PlanError when there is not that much to remove.
    """
    return plan_frontier(model, basis, filters, config, coupling=coupling, costs=costs).plan(pruning_ratio)


def plan_frontier(
    model: nn.Module,
    basis: Scores,
    filters: Scores,
    config: PlanConfig | None = None,
    *,
    coupling: Coupling | None = None,
    costs: Costs | None = None,
    blocks: Sequence[Block] = (),
) -> PlanFrontier:
    """Find the plans of least loss for every budget, of which `plan(ratio)` returns one.

    `basis` and `filters` are scores in units of the loss, as `joint_loss` gives them; either may have no layers, and
    what has no scores is left alone. With `config.per="parameter"` (the default) all parameters count, but for the
    scales, which merge into the weights; "mac" counts multiply-adds and needs as `costs` what `weight_uses(model)`
    tells; "latency" counts seconds and needs the NetworkTimes of the model. A pair costs what the one conv costs that
    it stands for, where that is less, as `fold` makes it. `config` has the least that each layer and group keeps, and
    the multiples that they keep; by latency, those of the device if it sets none. `blocks` of the network, from
    `find_blocks`, may go as a whole, for the sum of the scores of the pair at the end of their branch. Raises PlanError
    when scores or settings do not fit. The model is only counted.
    """
    config = config or PlanConfig(per="parameter")
    _check(basis, filters, config, costs)
    if isinstance(costs, NetworkTimes) and config.round_to is None:
        config = replace(config, round_to=costs.table.block)
    coupling = coupling or traced(model)
    pairs = basis_pairs(model) if basis.layers else {}
    sizes = _Sizes(model, pairs, _pricing(model, config, costs))
    levers = {("basis", name): _rank_lever(name, pairs.get(name), basis, config) for name in basis.layers}
    for group in coupling.groups:
        if all(name in filters.layers for name in group.layers):
            levers["filters", group.name] = _width_lever(model, group, filters, config)
    known = {block.name: block for block in blocks if block.last in basis.layers}
    # They come last: what remains of a branch when its ranks are set decides whether it is worth its cost.
    levers |= {("blocks", name): _block_lever(block, basis, sizes) for name, block in known.items()}
    points = explore(list(levers.values()), sizes)
    return PlanFrontier(model, coupling, basis, config, levers, points, known)


@dataclass(frozen=True)
class PlanFrontier:
    """The plans of least loss for a network, from the whole one to the smallest that the settings allow."""

    model: nn.Module
    coupling: Coupling
    basis: Scores
    config: PlanConfig
    levers: Mapping[tuple[str, str], Lever]
    points: Sequence[Point]
    blocks: Mapping[str, Block]

    @property
    def cost(self) -> float:
        """The cost of the whole network."""
        return self.points[0].cost

    def point(self, pruning_ratio: float) -> Point:
        """The point of least loss that removes this fraction of the cost; raises PlanError where none does."""
        if not 0 <= pruning_ratio < 1:
            raise PlanError(f"pruning_ratio: {pruning_ratio} given; it is the fraction removed, 0 <= ratio < 1")
        if pruning_ratio == 0:
            return self.points[0]
        goal = (1 - pruning_ratio) * self.cost * (1 + 1e-12)
        small = [point for point in self.points if point.cost <= goal]
        if not small:
            left = min(point.cost for point in self.points)
            raise TooMuchError(
                f"pruning_ratio: {pruning_ratio} would leave {goal:.4g} of {self.cost:.4g}, but {left:.4g} must stay; "
                f"pass at most {math.floor(1000 * (1 - left / self.cost)) / 1000}, or lower min_keep and min_share"
            )
        return min(small, key=lambda point: (point.loss, point.cost))

    def plan_within(self, cost: float) -> JointPlan:
        """The plan of least loss that costs at most so much; the cheapest if none does."""
        least = min(point.cost for point in self.points)
        return self.plan(max(0.0, 1 - max(cost, least) / self.cost))

    def expected_loss(self, pruning_ratio: float) -> float:
        """What the loss is expected to rise if this fraction of the cost goes."""
        return self.point(pruning_ratio).loss / 2

    def plan(self, pruning_ratio: float) -> JointPlan:
        """The plan of the point of least loss that removes this fraction of the cost."""
        chosen = self.point(pruning_ratio)
        found = zip(self.levers.items(), chosen.levels, strict=True)
        kept = {key: lever.queue.keep(len(lever.losses) - 1 - level) for (key, lever), level in found}
        options = {"scores": "loss", **asdict(self.config)}
        layers = {
            name: LayerPlan(kept["basis", name], len(layer.values), layer.means)
            for name, layer in self.basis.layers.items()
        }
        groups = self.coupling.groups
        widths = {group.name: kept.get(("filters", group.name), tuple(range(group.size))) for group in groups}
        return JointPlan(
            BasisPlan(layers, pruning_ratio, options),
            filter_plan(self.model, self.coupling, widths, pruning_ratio, options),
            pruning_ratio,
            self.cost,
            chosen.cost,
            chosen.loss / 2,
            tuple(block for name, block in self.blocks.items() if not kept["blocks", name]),
        )


def _check(basis: Scores, filters: Scores, config: PlanConfig, costs: Costs | None) -> None:
    faults = []
    for name, scores in (("basis", basis), ("filters", filters)):
        if scores.layers and scores.method != "loss":
            faults.append(f"{name}: scores by {scores.method!r} given; only those in units of the loss compare")
    if config.per == "vector" or config.normalise != "none":
        faults.append(f"config: per={config.per!r}, normalise={config.normalise!r}; per cost and as they are is needed")
    timed = isinstance(costs, NetworkTimes)
    if config.per == "mac" and (costs is None or timed):
        faults.append("costs: per='mac' needs weight_uses(model)")
    if config.per == "latency" and not timed:
        faults.append("costs: per='latency' needs the NetworkTimes of the model, which time_network(model) measures")
    if faults:
        raise PlanError.of("plan_together", faults)


def _pricing(model: nn.Module, config: PlanConfig, costs: Costs | None) -> Mapping[str, Price]:
    """What each weight costs as a function of its shape; those that cost nothing are left out."""
    if isinstance(costs, NetworkTimes):
        found = {f"{name}.weight" if name else "weight": partial(_seconds, costs, name) for name in costs.layers}
        return {name: price for name, price in found.items() if name in dict(model.named_parameters())}
    uses = costs if config.per == "mac" else None
    each = {name: 1 if uses is None else uses.get(name, 0) for name, _ in model.named_parameters()}
    return {name: partial(_weighted, float(price)) for name, price in each.items() if price}


def _weighted(price: float, sizes: Sequence[Array]) -> Array:
    return price * functools.reduce(np.multiply, sizes, np.asarray(1.0))


def _seconds(times: NetworkTimes, name: str, sizes: Sequence[Array]) -> Array:
    """The time of a layer whose weight has these sizes: (outputs, inputs of a group, *) or one for each channel."""
    shape = times.layers[name][0]
    inputs = sizes[0] if shape.kind != "conv" else sizes[1] * shape.groups
    return times.seconds(name, inputs, sizes[0])


def _rank_lever(name: str, pair: BasisPair | None, basis: Scores, config: PlanConfig) -> Lever:
    layer = basis.layers[name]
    if pair is None or pair.rank != len(layer.values):
        held = "no pair" if pair is None else f"rank {pair.rank}"
        raise PlanError(f"{name}: {len(layer.values)} scores given, the model has {held} there")
    queue = Queue.of(checked_values(name, layer), group_parts(name, layer), 1.0, config)
    first, second = f"{half_name(name, 'basis')}.weight", f"{half_name(name, 'scaling')}.weight"
    # In a transposed conv one column stands for a vector of every group.
    made: Place = (first, 1) if is_transposed(pair.basis) else (first, 0)
    return Lever.of(queue, {made: 1 if made[1] else layer.groups, (second, 1): 1})


def _width_lever(model: nn.Module, group: Group, filters: Scores, config: PlanConfig) -> Lever:
    parts = np.asarray(group.parts, dtype=np.int64)
    queue = Queue.of(unit_scores(model, group, filters, config), parts, 1.0, config)
    reach: dict[Place, float] = {}
    for axis in group.axes:
        place = (axis.parameter, axis.dim)
        reach[place] = reach.get(place, 0) + len(parts) * len(axis.index) / group.size
    return Lever.of(queue, reach)


def _block_lever(block: Block, basis: Scores, sizes: _Sizes) -> Lever:
    """Whether the block stays; without it, nothing in it costs anything."""
    worth = float(np.sum(checked_values(block.last, basis.layers[block.last])))
    queue = Queue(np.zeros((1, 1), dtype=np.int64), [0, 1], [worth], [1.0])
    return Lever.of(queue, dict.fromkeys(sizes.presence(f"{block.name}."), 1.0))


class _Pair(NamedTuple):
    """The weights of a pair, and where the first has the channels that the one conv would output."""

    first: str
    second: str
    dim: int
    groups: int


class _Sizes:
    """The sizes of all parameters as levers move, and what they cost; the last size is 0 for those that are gone."""

    def __init__(self, model: nn.Module, pairs: Mapping[str, BasisPair], prices: Mapping[str, Price]) -> None:
        free = {f"{half_name(name, 'scaling')}.scale" for name in pairs}
        self._prices = {name: price for name, price in prices.items() if name not in free}
        self._shapes = {
            name: [np.asarray(float(size)) for size in (*value.shape, 1)]
            for name, value in model.named_parameters()
            if name in self._prices
        }
        self._pairs: dict[str, _Pair] = {}
        for name, pair in pairs.items():
            first, second = (f"{half_name(name, half)}.weight" for half in ("basis", "scaling"))
            transposed = is_transposed(pair.basis)
            parts = _Pair(first, second, int(transposed), pair.scaling.groups if transposed else 1)
            if first in self._shapes and second in self._shapes:
                self._pairs |= {first: parts, second: parts}

    def presence(self, prefix: str) -> list[Place]:
        """Where it says of each parameter under that name whether it is there."""
        return [(name, len(sizes) - 1) for name, sizes in self._shapes.items() if name.startswith(prefix)]

    def costs(self, lever: Lever, level: int) -> Array:
        kept = np.asarray(lever.queue.starts, dtype=np.float64)
        moved = {
            (name, dim): self._shapes[name][dim] + (kept - kept[level]) * each
            for (name, dim), each in lever.reach.items()
            if name in self._shapes
        }
        terms = dict.fromkeys(self._pairs[name].first if name in self._pairs else name for name, _ in moved)
        return sum((self._term(name, moved) for name in terms), np.zeros(len(kept)))

    def move(self, lever: Lever, before: int, after: int) -> None:
        slots = lever.queue.starts[after] - lever.queue.starts[before]
        for (name, dim), each in lever.reach.items():
            if name in self._shapes:
                self._shapes[name][dim] = self._shapes[name][dim] + slots * each

    def total(self) -> float:
        own = [name for name in self._shapes if name not in self._pairs or self._pairs[name].first == name]
        return float(sum(float(self._term(name, {})) for name in own))

    def _term(self, name: str, moved: Mapping[Place, Array]) -> Array:
        pair = self._pairs.get(name)
        *first, there = self._shape(name, moved)
        cost = self._prices[name](first)
        if pair is None:
            return cost * there
        *second, _ = self._shape(pair.second, moved)
        dense = [*first[: pair.dim], second[0] / pair.groups, *first[pair.dim + 1 :]]
        return np.minimum(cost + self._prices[pair.second](second), self._prices[name](dense)) * there

    def _shape(self, name: str, moved: Mapping[Place, Array]) -> list[Array]:
        return [moved.get((name, dim), size) for dim, size in enumerate(self._shapes[name])]


# ------------------------------------------------------------------------------------------- the knapsack


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
        count, lengths = len(queue.order), np.diff(queue.starts)
        blocks = np.asarray(queue.values) * lengths * count
        losses = np.concatenate([np.cumsum(blocks[::-1])[::-1], [0.0]])
        return cls(queue, losses, reach)


class Sizes(Protocol):
    """The cost of everything as levers move; `costs` are those at each level of a lever that is at this one now."""

    def costs(self, lever: Lever, level: int) -> Array: ...

    def move(self, lever: Lever, before: int, after: int) -> None: ...

    def total(self) -> float: ...


@dataclass(frozen=True)
class Point:
    """A setting of all levers: what it costs, and what is lost."""

    levels: tuple[int, ...]
    cost: float
    loss: float


def explore(levers: Sequence[Lever], sizes: Sizes) -> tuple[Point, ...]:
    """Find settings of little loss, from the whole, which comes first, to the cheapest; `sizes` start whole."""
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
