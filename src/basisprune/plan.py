"""Scores + ratio -> BasisPlan: data only, no tensor of the model is touched (the paper's Section 3.5)."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from basisprune.errors import ConfigError, PlanError
from basisprune.types import BasisPlan, LayerPlan, LayerScores, Scores

Normalisation: TypeAlias = Literal["max", "mean", "median", "none"]
Array: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PlanConfig:
    """How scores of different layers are made comparable, and what every layer keeps.

    `normalise` divides each layer's scores by their maximum (the paper), mean or median. `min_rank` and
    `min_share` are the least number and the least fraction of its basis vectors that a layer keeps.
    """

    normalise: Normalisation = "mean"
    min_rank: int = 1
    min_share: float = 0.05

    def __post_init__(self) -> None:
        faults = []
        if self.normalise not in get_args(Normalisation):
            faults.append(f"normalise: {self.normalise!r} given; allowed are {get_args(Normalisation)}")
        if self.min_rank < 1:
            faults.append(f"min_rank: {self.min_rank} given; at least 1 is needed, or a layer would be empty")
        if not 0 <= self.min_share <= 1:
            faults.append(f"min_share: {self.min_share} given; allowed is 0 to 1")
        if faults:
            raise ConfigError.of("PlanConfig", faults)


def plan_basis(scores: Scores, pruning_ratio: float, config: PlanConfig | None = None) -> BasisPlan:
    """The plan that removes the fraction `pruning_ratio` of all basis vectors, the least important first.

    One threshold serves the whole network. The number removed is `round(pruning_ratio * total)`, exactly,
    with ties broken by the order of layers and vectors; grouped convs give up one vector in each group at
    a time, so with them it may fall short by less than the groups of one layer. Raises PlanError when the
    minimum of each layer leaves too little to remove, and says which ratio is possible.

    >>> scores = Scores("taylor", {"a": LayerScores((4.0, 1.0)), "b": LayerScores((9.0, 3.0, 1.0))})
    >>> {name: layer.keep for name, layer in plan_basis(scores, 0.4).layers.items()}
    {'a': (0,), 'b': (0, 1)}
    """
    config = config or PlanConfig()
    if not 0 <= pruning_ratio < 1:
        raise PlanError(f"pruning_ratio: {pruning_ratio} given; it is the fraction removed, 0 <= ratio < 1")
    slots = {name: _slots(name, layer, config) for name, layer in scores.layers.items()}
    total = sum(len(layer.values) for layer in scores.layers.values())
    goal = round(pruning_ratio * total)
    lost = _lost_slots(slots, scores, goal, total, pruning_ratio)
    layers = {
        name: LayerPlan(_keep(slots[name].order, lost[name]), len(layer.values), layer.means)
        for name, layer in scores.layers.items()
    }
    return BasisPlan(layers, pruning_ratio, {"scores": scores.method, **asdict(config)})


@dataclass(frozen=True)
class _Slots:
    """A layer's slots, best first: slot j is the j-th best vector of every group, and goes as a whole."""

    values: Array
    order: npt.NDArray[np.int64]
    protected: int


def _slots(name: str, layer: LayerScores, config: PlanConfig) -> _Slots:
    values = np.asarray(layer.values, dtype=np.float64)
    if values.size == 0 or not np.isfinite(values).all() or (values < 0).any():
        raise PlanError(f"{name}: scores must be finite and not negative; {_odd(values)} given")
    if values.size % layer.groups:
        raise PlanError(f"{name}: {values.size} scores cannot be shared evenly by {layer.groups} groups")
    grouped = _normalised(values, config.normalise).reshape(layer.groups, -1)
    order = np.argsort(-grouped, axis=1, kind="stable")
    slot_values = np.take_along_axis(grouped, order, axis=1).mean(axis=0)
    width = grouped.shape[1]
    protected = min(width, max(config.min_rank, math.ceil(config.min_share * width)))
    return _Slots(slot_values, order, protected)


def _odd(values: Array) -> str:
    return "none" if values.size == 0 else str(values[~np.isfinite(values) | (values < 0)][0])


def _normalised(values: Array, normalise: Normalisation) -> Array:
    sizes = {"max": values.max(), "mean": values.mean(), "median": np.median(values), "none": 1.0}
    size = float(sizes[normalise])
    # A layer whose scores are all (or mostly) zero has nothing to be compared by: it comes last.
    return values / size if size > 0 else values


def _lost_slots(
    slots: dict[str, _Slots], scores: Scores, goal: int, total: int, pruning_ratio: float
) -> dict[str, int]:
    """How many of its worst slots each layer loses, `goal` vectors in all."""
    candidates = [
        (layer.values[slot], index, -slot, name)
        for index, (name, layer) in enumerate(slots.items())
        for slot in range(layer.protected, len(layer.values))
    ]
    most = sum(scores.layers[name].groups for *_, name in candidates)
    if goal > most:
        raise PlanError(
            f"pruning_ratio: {pruning_ratio} would remove {goal} of {total} basis vectors, but the least that "
            f"each layer keeps leaves {most}; pass at most {math.floor(1000 * most / total) / 1000}, "
            "or lower min_rank and min_share"
        )
    lost = dict.fromkeys(slots, 0)
    full: set[str] = set()
    for *_, name in sorted(candidates):
        groups = scores.layers[name].groups
        if name in full or groups > goal:
            full.add(name)
            continue
        lost[name] += 1
        goal -= groups
    return lost


def _keep(order: npt.NDArray[np.int64], lost: int) -> tuple[int, ...]:
    groups, width = order.shape
    kept = np.sort(order[:, : width - lost], axis=1) + width * np.arange(groups)[:, None]
    return tuple(int(index) for index in kept.ravel())
