"""Groups with their names, layers, axes and sizes, from a solved run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
from torch import Tensor, nn

from basisprune.basis.layers import BasisScalingConv
from basisprune.coupling.cutting import DERIVED
from basisprune.coupling.ledger import Ledger, ParameterAxis, SizeHint
from basisprune.coupling.solving import Solution
from basisprune.types import Axis, Coupling, Group, Size

_LAYERS = (nn.modules.conv._ConvNd, nn.Linear)
_PARTS = ("groups", "num_groups", "heads", "num_heads")
"""Attributes that number the parts which channels fall into: parts get smaller, never fewer."""


def build(model: nn.Module, ledger: Ledger, solution: Solution) -> tuple[Coupling, list[int]]:
    """The coupling of a network, and the number in the solution of each of its groups."""
    axes = _axes(ledger, solution)
    sizes = _sizes(model, ledger, solution)
    filters = _filters(model, ledger, solution)
    groups: list[Group] = []
    numbers: list[int] = []
    taken: dict[str, int] = defaultdict(int)
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    for number, parts in enumerate(solution.parts):
        layers = sorted(filters[number], key=lambda name: order.get(name, len(order)))
        if not layers or min(map(len, parts)) < 2:
            continue
        taken[layers[0]] += 1
        name = layers[0] if taken[layers[0]] == 1 else f"{layers[0]}#{taken[layers[0]]}"
        counts = {layer: filters[number][layer] for layer in layers}
        size = sum(map(len, parts))
        groups.append(Group(name, size, counts, axes[number], parts, tuple(sizes[number])))
        numbers.append(number)
    frozen = _frozen(model, ledger, solution, {layer for group in groups for layer in group.layers})
    return Coupling(tuple(groups), frozen, tuple(ledger.unknown)), numbers


def _axes(ledger: Ledger, solution: Solution) -> list[tuple[Axis, ...]]:
    """For each group the axes that carry it, positions sorted by unit."""
    found: list[list[Axis]] = [[] for _ in solution.parts]
    ids = np.flatnonzero(solution.group >= 0)
    axis_of, place = ledger.places()
    order = np.lexsort((place[ids], solution.unit[ids], axis_of[ids], solution.group[ids]))
    ids = ids[order]
    borders = np.flatnonzero(np.diff(axis_of[ids]) | np.diff(solution.group[ids])) + 1
    for run in np.split(ids, borders):
        if len(run):
            axis = ledger.axes[axis_of[run[0]]]
            index = tuple(place[run].tolist())
            found[solution.group[run[0]]].append(Axis(axis.parameter, axis.dim, index))
    return [tuple(axes) for axes in found]


def _filters(model: nn.Module, ledger: Ledger, solution: Solution) -> list[dict[str, int]]:
    """For each group the layers that produce it and how many of their filters belong to it.

    What convolves with a parameter or buffer of another kind, such as a fixed blur, follows its group uncounted.
    """
    modules, owner = ledger.owners()
    axis_of, _ = ledger.places()
    is_filter = np.array([*(_holds_filters(model, axis) for axis in ledger.axes), False])[axis_of]
    found: list[dict[str, int]] = [{} for _ in solution.parts]
    for ids in ledger.produced:
        flat = ids.ravel()
        flat = flat[(solution.group[flat] >= 0) & is_filter[flat]]
        pairs, counts = np.unique(solution.group[flat] * len(modules) + owner[flat], return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            number, place = divmod(pair, len(modules))
            found[number][modules[place]] = max(count, found[number].get(modules[place], 0))
    return found


def _holds_filters(model: nn.Module, axis: ParameterAxis) -> bool:
    """Whether the axis numbers the filters of a conv, a linear layer or the second half of one."""
    layer = model.get_submodule(axis.module)
    place = 1 if getattr(layer, "transposed", False) else 0
    return isinstance(layer, (*_LAYERS, BasisScalingConv)) and axis.leaf == "weight" and axis.dim == place


def _frozen(model: nn.Module, ledger: Ledger, solution: Solution, free: set[str]) -> dict[str, str]:
    """Each conv or linear layer that belongs to no group, with the reason."""
    modules, owner = ledger.owners()
    axis_of, _ = ledger.places()
    reasons: dict[str, str] = {}
    for ids in ledger.produced:
        one = int(ids.ravel()[0])
        if one and modules[owner[one]] not in free:
            number = int(solution.reason[one])
            reason = ledger.frozen[number][1] if number >= 0 else _whole(model, ledger.axes[axis_of[one]])
            reasons.setdefault(modules[owner[one]], reason)
    for name, module in model.named_modules():
        if isinstance(module, _LAYERS) and name not in free and name not in reasons:
            reasons[name] = _idle(module.weight, ledger)
    return reasons


def _whole(model: nn.Module, axis: ParameterAxis) -> str:
    """Why channels that nothing holds back are in no group."""
    if _holds_filters(model, axis):
        return "its channels can only be cut all at once"
    return f"its filters lie in {axis.leaf!r}, a tensor of its own that no score knows"


def _idle(weight: Tensor, ledger: Ledger) -> str:
    """Why a layer makes no channels that could be cut."""
    if id(weight) not in ledger.used:
        return "the forward pass does not reach it"
    return "it has a single filter" if len(weight) == 1 else "it works on parameters, not on the network's data"


def _numbers(module: nn.Module) -> Iterator[tuple[int, str, int | None]]:
    """Every whole number that a module keeps as an attribute: its value, name and place."""
    derived = next((names for kinds, names in DERIVED if isinstance(module, kinds)), ())
    for name, value in vars(module).items():
        if name in derived or name in _PARTS or name.startswith("_"):
            continue
        if type(value) is int:
            yield value, name, None
        elif isinstance(value, (tuple, list)):
            yield from ((item, name, place) for place, item in enumerate(value) if type(item) is int)


def _sizes(model: nn.Module, ledger: Ledger, solution: Solution) -> list[list[Size]]:
    """For each group the attributes of modules that shrink with it."""
    found: list[list[Size]] = [[] for _ in solution.parts]
    modules = dict(model.named_modules())
    numbers: dict[str, dict[int, list[tuple[str, int | None]]]] = {}
    settled: set[tuple[str, str, int | None]] = set()
    for hint in (*ledger.hints, *ledger.own_hints()):
        if hint.module not in numbers:
            by_value: dict[int, list[tuple[str, int | None]]] = defaultdict(list)
            for value, attribute, item in _numbers(modules.get(hint.module, model)):
                by_value[value].append((attribute, item))
            numbers[hint.module] = by_value
        open_places = [
            place for place in numbers[hint.module].get(hint.rows.shape[1], ()) if (hint.module, *place) not in settled
        ]
        shares = _shares(hint, solution) if open_places else []
        for attribute, item in open_places if shares else ():
            settled.add((hint.module, attribute, item))
            for number, count in shares:
                found[number].append(Size(hint.module, attribute, item, count, len(hint.rows)))
    return found


def _shares(hint: SizeHint, solution: Solution) -> list[tuple[int, int]]:
    """How many positions each unit of each group has in a hint; none if units of a group differ."""
    ids = hint.rows.ravel()
    held = solution.group[ids]
    shares: list[tuple[int, int]] = []
    for number in np.unique(held[held >= 0]).tolist():
        size = sum(map(len, solution.parts[number]))
        counts = np.bincount(solution.unit[ids[held == number]], minlength=size)
        if (counts != counts[0]).any():
            return []
        shares.append((number, int(counts[0])))
    return shares
