"""From the notes of a run to groups: classes of ids, the parts that must be cut evenly, and what carries them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import nn

from basisprune.basis.layers import BasisScalingConv
from basisprune.coupling.cutting import DERIVED
from basisprune.coupling.labels import Ids, Ledger, ParameterAxis, SizeHint, Split
from basisprune.types import Axis, Coupling, Group, Size

_LAYERS = (nn.modules.conv._ConvNd, nn.Linear)
_PARTS = ("groups", "num_groups", "heads", "num_heads")
"""Attributes that number the parts which channels fall into: parts get smaller, never fewer."""


@dataclass(frozen=True)
class Solution:
    """The unit and group of every id (-1: none), its class (`label`), and the freeze that holds it (`reason`)."""

    label: Ids
    group: Ids
    unit: Ids
    parts: tuple[tuple[tuple[int, ...], ...], ...]
    reason: Ids


def solve(ledger: Ledger) -> Solution:
    """The groups of all ids that layers produce and that may be cut."""
    axis_of, _ = ledger.places()
    label = classes(ledger.count, ledger.unions)
    splits = ledger.splits
    while True:
        reason = np.full(ledger.count, -1, np.int64)
        for number in range(len(ledger.frozen) - 1, -1, -1):
            reason[label[ledger.frozen[number][0].ravel()]] = number
        reason = reason[label]
        sign = _signatures(label, axis_of, len(ledger.axes))
        partitions, broken = _examine(splits, label, sign, reason, axis_of)
        if not broken:
            return _number(ledger, label, sign, reason, partitions)
        splits = [split for split in splits if split not in broken]
        columns = [(split.rows[:-1], split.rows[1:]) for split in broken]
        label = classes(ledger.count, [*columns, (label, np.arange(ledger.count))])


def classes(count: int, pairs: Sequence[tuple[Ids, Ids]]) -> Ids:
    """The smallest id of the class of each of `count` ids, when those at equal positions of the pairs are united.

    Position by position after broadcasting; 0 is no id, and stays alone.

    >>> classes(5, [(np.array([1, 2]), np.array([2, 4])), (np.array([0]), np.array([3]))]).tolist()
    [0, 1, 1, 3, 1]
    """
    wide = [np.broadcast_arrays(one, other) for one, other in pairs]
    first, second = (np.concatenate([np.zeros(0, np.int64), *(pair[i].ravel() for pair in wide)]) for i in (0, 1))
    met = (first != 0) & (second != 0)
    graph = coo_array((np.ones(met.sum(), bool), (first[met], second[met])), shape=(count, count))
    _, number = connected_components(graph, directed=False)
    _, smallest = np.unique(number, return_index=True)
    label: Ids = smallest[number]
    return label


def _signatures(label: Ids, axis_of: Ids, axes: int) -> Ids:
    """A number per class that says along which axes it lies, and how often: equal ones form a group."""
    weights = np.random.default_rng(0).integers(1, 2**40, size=max(axes, 1))
    sums = np.zeros(len(label), np.int64)
    np.add.at(sums, label[1:], weights[axis_of[1:]])
    spread: Ids = sums[label]
    return spread


def _examine(
    splits: Sequence[Split], label: Ids, sign: Ids, reason: Ids, axis_of: Ids
) -> tuple[list[Ids], list[Split]]:
    """Return the partitions that can be kept as parts, finest first, and the splits whose columns are united."""
    partitions: list[Ids] = []
    broken: list[Split] = []
    row_of = np.full(len(label), -1, np.int64)
    found = [(split, np.unique(label[split.rows], axis=0)) for split in splits]
    for split, rows in sorted(found, key=lambda pair: -len(pair[1])):
        if len(rows) == 1 or (not split.hard and (rows == rows[:, :1]).all()) or (reason[rows] >= 0).all():
            continue
        numbers = np.arange(len(rows))[:, None]
        row_of[:] = -1
        row_of[rows] = numbers
        clean = (row_of[rows] == numbers).all() and rows.all()
        clean = clean and (sign[rows] == sign[rows[0, 0]]).all() and (reason[rows] < 0).all()
        if not clean or _interleaved(row_of, label, axis_of, rows.shape[1]):
            broken.append(split)
            continue
        nested = [(row_of[finer] == row_of[finer[:, :1]]).all() for finer in partitions if (row_of[finer] >= 0).any()]
        if not all(nested):
            broken.append(split)
        elif not nested:
            partitions.append(rows)
    return partitions, broken


def _interleaved(row_of: Ids, label: Ids, axis_of: Ids, length: int) -> bool:
    """Whether some axis holds the rows' channels mixed: then positions must agree in all rows."""
    rows = row_of[label]
    held = rows >= 0
    rows, axes = rows[held], axis_of[held]
    starts = np.flatnonzero((np.diff(rows) != 0) | (np.diff(axes) != 0)) + 1
    runs = np.diff(np.concatenate([[0], starts, [len(rows)]]))
    return bool((runs < length).any())


def _number(ledger: Ledger, label: Ids, sign: Ids, reason: Ids, partitions: list[Ids]) -> Solution:
    produced = np.zeros(ledger.count, bool)
    for ids in ledger.produced:
        produced[label[ids.ravel()]] = True
    produced[0] = False
    key = sign.copy()
    for place, rows in enumerate(partitions):
        key[rows] += place + 1
    units = np.flatnonzero(produced & (reason < 0))  # classes are named by their smallest id
    _, first, inverse = np.unique(key[units], return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))  # groups in the order in which the network reached them
    number: Ids = rank[inverse]
    group, unit = np.full(ledger.count, -1, np.int64), np.full(ledger.count, -1, np.int64)
    group[units] = number
    order = np.argsort(number, kind="stable")
    starts = np.searchsorted(number[order], np.arange(len(first)))
    unit[units[order]] = np.arange(len(units)) - starts[number[order]]
    parts = [(tuple(range(size)),) for size in np.bincount(number, minlength=len(first)).tolist()]
    for rows in partitions:
        if group[rows[0, 0]] >= 0:
            parts[group[rows[0, 0]]] = tuple(tuple(np.unique(unit[row]).tolist()) for row in rows)
    return Solution(label, group[label], unit[label], tuple(parts), reason)


def build(model: nn.Module, ledger: Ledger, solution: Solution) -> tuple[Coupling, list[int]]:
    """The coupling of a network, and the number in the solution of each of its groups."""
    axes, sizes, filters = _axes(ledger, solution), _sizes(model, ledger, solution), _filters(model, ledger, solution)
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
        groups.append(Group(name, size, counts, tuple(axes[number]), parts, tuple(sizes[number])))
        numbers.append(number)
    frozen = _frozen(model, ledger, solution, {layer for group in groups for layer in group.layers})
    return Coupling(tuple(groups), frozen, tuple(ledger.unknown)), numbers


def _axes(ledger: Ledger, solution: Solution) -> list[list[Axis]]:
    found: list[list[Axis]] = [[] for _ in solution.parts]
    ids = np.flatnonzero(solution.group >= 0)
    axis_of, place = ledger.places()
    ids = ids[np.lexsort((place[ids], solution.unit[ids], axis_of[ids], solution.group[ids]))]
    borders = np.flatnonzero(np.diff(axis_of[ids]) | np.diff(solution.group[ids])) + 1
    for run in np.split(ids, borders) if len(ids) else ():
        axis = ledger.axes[axis_of[run[0]]]
        found[solution.group[run[0]]].append(Axis(axis.parameter, axis.dim, tuple(place[run].tolist())))
    return found


def _filters(model: nn.Module, ledger: Ledger, solution: Solution) -> list[dict[str, int]]:
    """Return the layers that produce each group, with their filters in it; a fixed blur counts for none."""
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
    leaf = axis.parameter.rpartition(".")[2]
    return isinstance(layer, (*_LAYERS, BasisScalingConv)) and leaf == "weight" and axis.dim == place


def _frozen(model: nn.Module, ledger: Ledger, solution: Solution, free: set[str]) -> dict[str, str]:
    """Each conv or linear layer that belongs to no group, with the reason."""
    modules, owner = ledger.owners()
    axis_of, _ = ledger.places()
    reasons: dict[str, str] = {}
    for ids in ledger.produced:
        one = int(ids.ravel()[0])
        if one and modules[owner[one]] not in free:
            number, axis = int(solution.reason[one]), ledger.axes[axis_of[one]]
            if number >= 0:
                reason = ledger.frozen[number][1]
            elif _holds_filters(model, axis):
                reason = "its channels can only be cut all at once"
            else:
                leaf = axis.parameter.rpartition(".")[2]
                reason = f"its filters lie in {leaf!r}, a tensor of its own that no score knows"
            reasons.setdefault(modules[owner[one]], reason)
    for name, module in model.named_modules():
        if isinstance(module, _LAYERS) and name not in free and name not in reasons:
            if id(module.weight) not in ledger.used:
                reasons[name] = "the forward pass does not reach it"
            elif len(module.weight) == 1:
                reasons[name] = "it has a single filter"
            else:
                reasons[name] = "it works on parameters, not on the network's data"
    return reasons


def _numbers(module: nn.Module) -> dict[int, list[tuple[str, int | None]]]:
    """Where a module keeps whole numbers as attributes: their names and places by their value."""
    found: dict[int, list[tuple[str, int | None]]] = defaultdict(list)
    derived = next((names for kinds, names in DERIVED if isinstance(module, kinds)), ())
    for name, value in vars(module).items():
        if name in derived or name in _PARTS or name.startswith("_"):
            continue
        if type(value) is int:
            found[value].append((name, None))
        for place, item in enumerate(value if isinstance(value, tuple | list) else ()):
            if type(item) is int:
                found[item].append((name, place))
    return found


def _sizes(model: nn.Module, ledger: Ledger, solution: Solution) -> list[list[Size]]:
    found: list[list[Size]] = [[] for _ in solution.parts]
    modules = dict(model.named_modules())
    numbers: dict[str, dict[int, list[tuple[str, int | None]]]] = {}
    for hint in ledger.all_hints():
        if hint.module not in numbers:
            numbers[hint.module] = _numbers(modules.get(hint.module, model))
        places = numbers[hint.module].get(hint.rows.shape[1])
        if places and (shares := _shares(hint, solution)):
            del numbers[hint.module][hint.rows.shape[1]]  # each attribute follows the first hint that explains it
            for attribute, item in places:
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
