"""Basis vectors and filters in one plan, by the loss that each parameter or multiply-add brings (not in the paper).

A plan is sought that minimises loss + price * cost, and the price that meets the budget. The loss is the sum of the
scores of all that goes, halved; the cost of a weight depends on how many vectors and filters stay at either
side of it, so each layer's rank and each group's width is chosen for the best given all others, in turns, until
none changes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import numpy as np
from torch import nn

from basisprune.basis.layers import BasisPair, basis_pairs, half_name
from basisprune.errors import PlanError, TooMuchError
from basisprune.plan import Array, PlanConfig, Queue, checked_values, filter_plan, group_parts, traced, unit_scores
from basisprune.torchkit.surgery import is_transposed
from basisprune.types import BasisPlan, Coupling, Group, JointPlan, LayerPlan, Scores

Place: TypeAlias = tuple[str, int]
"""An axis of a parameter: its name and the dimension."""

_TURNS = 30
_HALVINGS = 60


def plan_together(
    model: nn.Module,
    basis: Scores,
    filters: Scores,
    pruning_ratio: float,
    config: PlanConfig | None = None,
    *,
    coupling: Coupling | None = None,
    uses: Mapping[str, int] | None = None,
) -> JointPlan:
    """The plan that removes at least the fraction `pruning_ratio` of all parameters, or multiply-adds, at least loss.

    `basis` and `filters` are scores in units of the loss, as `joint_loss` gives them; either may have no layers, and
    what has no scores is left alone. With `config.per="parameter"` (the default) all parameters count, but for the
    scales, which merge into the weights; "mac" counts multiply-adds and needs `uses`, what `weight_uses(model)` tells.
    A pair costs what the one conv costs that it stands for, where that is less, as `fold` makes it. `config` has the
    least that each layer and group keeps, and blocks. Raises PlanError when scores or settings do not fit, and when
    there is not that much to remove. The model is only counted.
    """
    config = config or PlanConfig(per="parameter")
    _check(basis, filters, pruning_ratio, config, uses)
    coupling = coupling or traced(model)
    pairs = basis_pairs(model) if basis.layers else {}
    sizes = _Sizes(model, pairs, uses if config.per == "mac" else None)
    levers = {("basis", name): _rank_lever(name, pairs.get(name), basis, config) for name in basis.layers}
    for group in _scored(coupling, filters):
        levers["filters", group.name] = _width_lever(model, group, filters, config)
    levels, cost, left = _search(list(levers.values()), sizes, pruning_ratio)
    chosen = zip(levers.items(), levels, strict=True)
    kept = {key: lever.queue.keep(len(lever.losses) - 1 - level) for (key, lever), level in chosen}
    lost = sum(float(lever.losses[level]) for lever, level in zip(levers.values(), levels, strict=True))
    options = {"scores": "loss", **asdict(config)}
    layers = {
        name: LayerPlan(kept["basis", name], len(layer.values), layer.means) for name, layer in basis.layers.items()
    }
    widths = {group.name: kept.get(("filters", group.name), tuple(range(group.size))) for group in coupling.groups}
    return JointPlan(
        BasisPlan(layers, pruning_ratio, options),
        filter_plan(model, coupling, widths, pruning_ratio, options),
        pruning_ratio,
        cost,
        left,
        lost / 2,
    )


def _check(
    basis: Scores, filters: Scores, pruning_ratio: float, config: PlanConfig, uses: Mapping[str, int] | None
) -> None:
    faults = []
    if not 0 <= pruning_ratio < 1:
        faults.append(f"pruning_ratio: {pruning_ratio} given; it is the fraction removed, 0 <= ratio < 1")
    for name, scores in (("basis", basis), ("filters", filters)):
        if scores.layers and scores.method != "loss":
            faults.append(f"{name}: scores by {scores.method!r} given; only those in units of the loss compare")
    if config.per == "vector" or config.normalise != "none":
        faults.append(f"config: per={config.per!r}, normalise={config.normalise!r}; per cost and as they are is needed")
    if config.per == "mac" and uses is None:
        faults.append("uses: None given; per='mac' needs weight_uses(model)")
    if faults:
        raise PlanError.of("plan_together", faults)


def _scored(coupling: Coupling, filters: Scores) -> list[Group]:
    return [group for group in coupling.groups if all(name in filters.layers for name in group.layers)]


@dataclass(frozen=True)
class _Lever:
    """One rank or width: `losses[level]` is what goes with all but `queue.starts[level]` slots.

    `reach` says by how much one slot shortens which axes.
    """

    queue: Queue
    losses: Array
    reach: Mapping[Place, float]

    @classmethod
    def of(cls, queue: Queue, reach: Mapping[Place, float]) -> _Lever:
        count, lengths = len(queue.order), np.diff(queue.starts)
        blocks = np.asarray(queue.values) * lengths * count
        losses = np.concatenate([np.cumsum(blocks[::-1])[::-1], [0.0]])
        return cls(queue, losses, reach)


def _rank_lever(name: str, pair: BasisPair | None, basis: Scores, config: PlanConfig) -> _Lever:
    layer = basis.layers[name]
    if pair is None or pair.rank != len(layer.values):
        held = "no pair" if pair is None else f"rank {pair.rank}"
        raise PlanError(f"{name}: {len(layer.values)} scores given, the model has {held} there")
    queue = Queue.of(checked_values(name, layer), group_parts(name, layer), 1.0, config)
    first, second = f"{half_name(name, 'basis')}.weight", f"{half_name(name, 'scaling')}.weight"
    # In a transposed conv one column stands for a vector of every group.
    made: Place = (first, 1) if is_transposed(pair.basis) else (first, 0)
    return _Lever.of(queue, {made: 1 if made[1] else layer.groups, (second, 1): 1})


def _width_lever(model: nn.Module, group: Group, filters: Scores, config: PlanConfig) -> _Lever:
    parts = np.asarray(group.parts, dtype=np.int64)
    queue = Queue.of(unit_scores(model, group, filters, config), parts, 1.0, config)
    reach: dict[Place, float] = {}
    for axis in group.axes:
        place = (axis.parameter, axis.dim)
        reach[place] = reach.get(place, 0) + len(parts) * len(axis.index) / group.size
    return _Lever.of(queue, reach)


@dataclass(frozen=True)
class _Pair:
    """The weights of a pair, and where the first has the channels that the one conv would output."""

    first: str
    second: str
    dim: int
    groups: int


class _Sizes:
    """The sizes of all parameters as levers move, and what they cost."""

    def __init__(self, model: nn.Module, pairs: Mapping[str, BasisPair], uses: Mapping[str, int] | None) -> None:
        self._shapes: dict[str, list[Array]] = {}
        self._prices: dict[str, float] = {}
        free = {f"{half_name(name, 'scaling')}.scale" for name in pairs}
        for name, value in model.named_parameters():
            price = 1 if uses is None else uses.get(name, 0)
            if price and name not in free:
                self._shapes[name] = [np.asarray(float(size)) for size in value.shape]
                self._prices[name] = float(price)
        self._pairs: dict[str, _Pair] = {}
        for name, pair in pairs.items():
            first, second = (f"{half_name(name, half)}.weight" for half in ("basis", "scaling"))
            transposed = is_transposed(pair.basis)
            parts = _Pair(first, second, int(transposed), pair.scaling.groups if transposed else 1)
            if first in self._shapes and second in self._shapes:
                self._pairs |= {first: parts, second: parts}

    def costs(self, lever: _Lever, level: int) -> Array:
        """What all that the lever reaches costs at each of its levels, if it is at this one now."""
        kept = np.asarray(lever.queue.starts, dtype=np.float64)
        moved = {
            (name, dim): self._shapes[name][dim] + (kept - kept[level]) * each
            for (name, dim), each in lever.reach.items()
            if name in self._shapes
        }
        terms = dict.fromkeys(self._pairs[name].first if name in self._pairs else name for name, _ in moved)
        return sum((self._term(name, moved) for name in terms), np.zeros(len(kept)))

    def move(self, lever: _Lever, before: int, after: int) -> None:
        """Moves the lever from one level to another."""
        slots = lever.queue.starts[after] - lever.queue.starts[before]
        for (name, dim), each in lever.reach.items():
            if name in self._shapes:
                self._shapes[name][dim] = self._shapes[name][dim] + slots * each

    def total(self) -> float:
        """What all parameters cost now."""
        own = [name for name in self._shapes if name not in self._pairs or self._pairs[name].first == name]
        return float(sum(float(self._term(name, {})) for name in own))

    def _term(self, name: str, moved: Mapping[Place, Array]) -> Array:
        pair = self._pairs.get(name)
        first = self._shape(name, moved)
        cost = self._prices[name] * _product(first)
        if pair is None:
            return cost
        second = self._shape(pair.second, moved)
        dense = [*first[: pair.dim], second[0] / pair.groups, *first[pair.dim + 1 :]]
        both: Array = cost + self._prices[pair.second] * _product(second)
        return np.minimum(both, self._prices[name] * _product(dense))

    def _shape(self, name: str, moved: Mapping[Place, Array]) -> list[Array]:
        return [moved.get((name, dim), size) for dim, size in enumerate(self._shapes[name])]


def _product(sizes: Sequence[Array]) -> Array:
    return functools.reduce(np.multiply, sizes, np.asarray(1.0))


def _search(levers: Sequence[_Lever], sizes: _Sizes, pruning_ratio: float) -> tuple[list[int], float, float]:
    """The level of each lever at the lowest price that meets the budget; the cost before and after."""
    whole = [len(lever.losses) - 1 for lever in levers]
    levels, cost = list(whole), sizes.total()
    goal = (1 - pruning_ratio) * cost
    if pruning_ratio == 0:
        return levels, cost, cost
    _settle(levers, levels, sizes, math.inf)
    least, left = list(levels), sizes.total()
    if left > goal:
        raise TooMuchError(
            f"pruning_ratio: {pruning_ratio} would leave {goal:.0f} of {cost:.0f}, but {left:.0f} must stay; "
            f"pass at most {math.floor(1000 * (1 - left / cost)) / 1000}, or lower min_keep and min_share"
        )
    scale = sum(float(lever.losses[0]) for lever in levers) / cost or 1.0
    low, high = math.log(scale) - 40, math.log(scale) + 40
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        _move_all(levers, levels, whole, sizes)
        _settle(levers, levels, sizes, math.exp(middle))
        if sizes.total() <= goal:
            high, least, left = middle, list(levels), sizes.total()
        else:
            low = middle
    return least, cost, left


def _settle(levers: Sequence[_Lever], levels: list[int], sizes: _Sizes, price: float) -> None:
    """Moves each lever to where loss + price * cost is lowest given all others, in turns, until none moves."""
    for _ in range(_TURNS):
        before = list(levels)
        for place, lever in enumerate(levers):
            costs = sizes.costs(lever, levels[place])
            worth = costs if math.isinf(price) else lever.losses + price * costs
            best = int(np.argmin(worth))
            sizes.move(lever, levels[place], best)
            levels[place] = best
        if levels == before:
            return


def _move_all(levers: Sequence[_Lever], levels: list[int], goal: Sequence[int], sizes: _Sizes) -> None:
    for place, lever in enumerate(levers):
        sizes.move(lever, levels[place], goal[place])
        levels[place] = goal[place]
