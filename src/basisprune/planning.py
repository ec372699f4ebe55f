"""Scores + ratio -> plan: data only, no tensor of the model is touched (the paper's Section 3.5)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from basisprune.basis.layers import BasisPair, BasisScalingConv, half_name
from basisprune.coupling import trace_coupling, unit_outputs
from basisprune.errors import ConfigError, PlanError, TooMuchError
from basisprune.torchkit.surgery import TORCH_CONVS, Layer, find_layers, named_tensors, output_channels
from basisprune.transfer.model import known_spec
from basisprune.types import (
    OUTPUT,
    BasisPlan,
    Coupling,
    FilterPlan,
    Group,
    GroupPlan,
    LayerPlan,
    LayerScores,
    Option,
    Scores,
)

Normalisation: TypeAlias = Literal["max", "mean", "median", "none"]
Reduction: TypeAlias = Literal["mean", "sum", "max", "min"]
Per: TypeAlias = Literal["vector", "parameter", "mac", "latency"]
Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PlanConfig:
    """How scores of different layers are made comparable, and what every layer keeps.

    `normalise` divides each layer's scores by their maximum (the paper), mean or median, or takes them as they
    are: Taylor scores estimate a change of the one loss, so they can be compared across layers, and pruned
    networks keep far more of their accuracy that way (docs/measured.md). `min_keep` and
    `min_share` are the least number and the least fraction of its basis vectors or filters that a layer
    keeps. With `round_to`, the number kept is a multiple of it, or all. `reduce` makes one score of those of
    filters that are coupled. `per` divides the scores by what one basis vector of the layer costs, in
    parameters or in multiply-adds, so that layers whose vectors are expensive give up more of them. "latency" is for
    `plan_together`, which knows the times of whole layers: there a vector alone costs nothing that could be told.
    """

    normalise: Normalisation = "none"
    min_keep: int = 1
    min_share: float = 0.05
    round_to: int | None = None
    reduce: Reduction = "mean"
    per: Per = "vector"

    def __post_init__(self) -> None:
        options = {"normalise": Normalisation, "reduce": Reduction, "per": Per}
        faults = [
            f"{name}: {getattr(self, name)!r} given; allowed are {get_args(allowed)}"
            for name, allowed in options.items()
            if getattr(self, name) not in get_args(allowed)
        ]
        if self.min_keep < 1:
            faults.append(f"min_keep: {self.min_keep} given; at least 1 is needed, or a layer would be empty")
        if self.round_to is not None and self.round_to < 1:
            faults.append(f"round_to: {self.round_to} given; at least 1 is needed, or None")
        if not 0 <= self.min_share <= 1:
            faults.append(f"min_share: {self.min_share} given; allowed is 0 to 1")
        if faults:
            raise ConfigError.of("PlanConfig", faults)


def plan_basis(scores: Scores, pruning_ratio: float, config: PlanConfig | None = None) -> BasisPlan:
    """Plan to remove the fraction `pruning_ratio` of all basis vectors, the least important first.

    One threshold serves the whole network. The number removed is `round(pruning_ratio * total)`, exactly,
    with ties broken by the order of layers and vectors; grouped convs give up one vector in each group at
    a time, and `round_to` a block of them, so with those it may fall short by less than that. Raises
    PlanError when the minimum of each layer leaves too little to remove, and says which ratio is possible, and
    when `config.per` asks for costs that the scores do not know.

    >>> scores = Scores("taylor", {"a": LayerScores((4.0, 1.0)), "b": LayerScores((9.0, 3.0, 1.0))})
    >>> {name: layer.keep for name, layer in plan_basis(scores, 0.4).layers.items()}
    {'a': (0,), 'b': (0, 1)}
    """
    config = config or PlanConfig()
    queues = {}
    for name, layer in scores.layers.items():
        values = _normalised(checked_values(name, layer), config.normalise) / _cost(name, layer, config.per)
        queues[name] = Queue.of(values, group_parts(name, layer), 1.0, config)
    total = sum(len(layer.values) for layer in scores.layers.values())
    kept = _select(queues, pruning_ratio, total, "basis vectors")
    layers = {name: LayerPlan(kept[name], len(layer.values), layer.means) for name, layer in scores.layers.items()}
    return BasisPlan(layers, pruning_ratio, {"scores": scores.method, **asdict(config)})


def group_parts(name: str, layer: LayerScores) -> npt.NDArray[np.int64]:
    """The places (groups, width) of the vectors of each group, which lose equally many."""
    if len(layer.values) % layer.groups:
        raise PlanError(f"{name}: {len(layer.values)} scores cannot be shared evenly by {layer.groups} groups")
    return np.arange(len(layer.values)).reshape(layer.groups, -1)


def plan_filters(
    model: nn.Module,
    scores: Scores,
    pruning_ratio: float,
    config: PlanConfig | None = None,
    *,
    coupling: Coupling | None = None,
) -> FilterPlan:
    """Plan to remove the fraction `pruning_ratio` of all filters, the least important first.

    `scores` are from `score_filters`, `coupling` from `trace_coupling`; by default a transfer model is traced
    here. Filters that are coupled go together: the scores of each layer are normalised, then `config.reduce`
    makes one of those that meet in a unit. All filters count, those of frozen layers too, but for the classes;
    with coupled filters or `round_to` the number removed falls short of `round(pruning_ratio * total)` by less
    than what goes at once. Raises PlanError when there is not that much to remove, and says which ratio is possible.
    """
    # Scores in units of the loss compare as they are; norms and ranks have other ranges in each layer.
    config = config or PlanConfig(normalise="none" if scores.method == "loss" else "max")
    if config.per != "vector":
        raise PlanError(f"per: {config.per!r} given; filters are compared as they are, pass per='vector'")
    coupling = coupling or traced(model)
    missing = [name for group in coupling.groups for name in group.layers if name not in scores.layers]
    if missing:
        raise PlanError(f"{missing[0]}: has no scores; score every layer that the coupling's groups name")
    queues = {}
    for group in coupling.groups:
        values = unit_scores(model, group, scores, config)
        parts = np.asarray(group.parts, dtype=np.int64)
        queues[group.name] = Queue.of(values, parts, sum(group.filters.values()) / group.size, config)
    kept = _select(queues, pruning_ratio, count_filters(model, coupling), "filters")
    return filter_plan(model, coupling, kept, pruning_ratio, {"scores": scores.method, **asdict(config)})


def largest_ratio(ratio: float, plan: Callable[[float], object]) -> float:
    """The ratio if `plan` can remove so much, otherwise the largest that it can, to about a hundredth."""
    possible, step, low = ratio, ratio / 2, 0.0
    while low < ratio:
        with suppress(TooMuchError):
            plan(possible)
            low = possible
        if step < 0.005:
            break
        possible, step = round(low + step, 4), step / 2
    return low


def filter_plan(
    model: nn.Module,
    coupling: Coupling,
    kept: Mapping[str, tuple[int, ...]],
    pruning_ratio: float,
    options: Mapping[str, Option],
) -> FilterPlan:
    """The plan that keeps these units of each group, for a network of the shapes that the model has."""
    groups = {group.name: GroupPlan(kept[group.name], group.size) for group in coupling.groups}
    tensors = dict(named_tensors(model))
    names = dict.fromkeys(axis.parameter for group in coupling.groups for axis in group.axes)
    shapes = {name: tuple(tensors[name].shape) for name in names}
    return FilterPlan(groups, coupling, shapes, count_filters(model, coupling), pruning_ratio, options)


def traced(model: nn.Module) -> Coupling:
    """The coupling of a model that says what its input is."""
    spec = known_spec(model)
    if spec is None:
        raise PlanError(f"{type(model).__name__} does not say what its input is; pass coupling=trace_coupling(...)")
    return trace_coupling(model, torch.zeros(2, *spec.shape, device=next(model.parameters()).device))


def count_filters(model: nn.Module, coupling: Coupling) -> int:
    """The number of filters of all convs and linear layers that the coupling knows, but for the classes."""
    skipped = {name for name, reason in coupling.frozen.items() if reason == OUTPUT}
    skipped |= {half_name(name, "basis") for name, _ in find_layers(model, BasisPair)}
    names = {name for group in coupling.groups for name in group.layers} | coupling.frozen.keys()
    kinds: tuple[type[Layer | BasisScalingConv], ...] = (*TORCH_CONVS, nn.Linear, BasisScalingConv)
    modules = [model.get_submodule(name) for name in sorted(names - skipped)]
    return sum(
        len(module.weight) if isinstance(module, BasisScalingConv) else output_channels(module)
        for module in modules
        if isinstance(module, kinds)
    )


@dataclass(frozen=True)
class Queue:
    """What one layer or group can give up, block by block, the worst last.

    `order` (parts, width) lists each part's units, best first; a slot is one column, and goes as a whole.
    `starts` are the numbers of slots that may be kept, ascending; `values` and `costs` are those of the
    block of slots between one such number and the next.
    """

    order: npt.NDArray[np.int64]
    starts: list[int]
    values: list[float]
    costs: list[float]

    @classmethod
    def of(cls, values: Array, parts: npt.NDArray[np.int64], cost: float, config: PlanConfig) -> Queue:
        count, width = parts.shape
        inner = np.argsort(-values[parts], axis=1, kind="stable")
        order = np.take_along_axis(parts, inner, axis=1)
        slots = values[order].mean(axis=0)
        share = math.ceil(config.min_share * width - 1e-9)  # 0.07 * 100 is a little more than 7
        least = min(width, max(math.ceil(config.min_keep / count), share))
        step = 1 if config.round_to is None else config.round_to // math.gcd(config.round_to, count)
        starts = [keep for keep in range(least, width) if keep % step == 0] + [width]
        lengths = np.diff(starts).astype(np.float64)
        means = np.add.reduceat(slots, starts[:-1]) / lengths if lengths.size else lengths
        return cls(order, starts, means.tolist(), (cost * count * lengths).tolist())

    def keep(self, lost_blocks: int) -> tuple[int, ...]:
        return tuple(sorted(self.order[:, : self.starts[len(self.starts) - 1 - lost_blocks]].ravel().tolist()))


def _select(queues: Mapping[str, Queue], pruning_ratio: float, total: int, what: str) -> dict[str, tuple[int, ...]]:
    """What each queue keeps when the worst blocks of all go, as many as the ratio of the total asks for."""
    if not 0 <= pruning_ratio < 1:
        raise PlanError(f"pruning_ratio: {pruning_ratio} given; it is the fraction removed, 0 <= ratio < 1")
    goal = round(pruning_ratio * total)
    most = round(sum(sum(queue.costs) for queue in queues.values()))
    if goal > most:
        raise TooMuchError(
            f"pruning_ratio: {pruning_ratio} would remove {goal} of {total} {what}, but what can go is {most}; "
            f"pass at most {math.floor(1000 * most / total) / 1000}, or lower min_keep and min_share"
        )
    blocks = sorted(
        (value, index, -block, name)
        for index, (name, queue) in enumerate(queues.items())
        for block, value in enumerate(queue.values)
    )
    left, lost, done = float(goal), dict.fromkeys(queues, 0), set()
    for *_, block, name in blocks:
        cost = queues[name].costs[-block]
        if name in done or cost > left + 1e-6:
            done.add(name)  # what comes next in this queue matters more than what must stay
            continue
        lost[name] += 1
        left -= cost
    return {name: queue.keep(lost[name]) for name, queue in queues.items()}


def checked_values(name: str, layer: LayerScores) -> Array:
    """The scores of the layer; raises PlanError for what cannot be one."""
    values = np.asarray(layer.values, dtype=np.float64)
    odd = values[~np.isfinite(values) | (values < 0)]
    if values.size == 0 or odd.size:
        raise PlanError(f"{name}: scores must be finite and not negative; {odd[0] if odd.size else 'none'} given")
    return values


def _normalised(values: Array, normalise: Normalisation) -> Array:
    sizes = {"max": values.max(), "mean": values.mean(), "median": np.median(values), "none": 1.0}
    size = float(sizes[normalise])
    # A layer whose scores are all (or mostly) zero has nothing to be compared by: it comes last.
    with np.errstate(over="ignore"):
        return values / size if size > 0 else values


def _cost(name: str, layer: LayerScores, per: Per) -> int:
    """What the scores of the layer are divided by; 1 where its vectors cost nothing."""
    if per == "vector":
        return 1
    if per == "latency":
        raise PlanError("per: 'latency' given; the time of a layer depends on all its channels, use plan_together")
    cost = layer.parameters if per == "parameter" else layer.macs
    if cost is None:
        raise PlanError(f"{name}: per={per!r} needs the cost of a vector, which taylor_scores tells; None given")
    if cost < 0:
        raise PlanError(f"{name}: a vector cannot cost {cost}; 0 or more is allowed")
    return max(cost, 1)


def unit_scores(model: nn.Module, group: Group, scores: Scores, config: PlanConfig) -> Array:
    """One score for each unit of the group, from the normalised scores of all its filters."""
    rows = []
    for name in group.layers:
        values = _normalised(checked_values(name, scores.layers[name]), config.normalise)
        channels = unit_outputs(model, group, name)
        if channels.max() >= values.size:
            raise PlanError(f"{name}: {values.size} scores given, filter {channels.max()} is asked for")
        rows.append(values[channels])
    table = np.concatenate(rows, axis=1)
    result: Array = getattr(table, config.reduce)(axis=1)
    return result
