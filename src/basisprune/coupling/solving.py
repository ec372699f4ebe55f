"""From the notes of a run to groups: classes of ids, and the parts that must be cut evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from basisprune.coupling.ledger import Ids, Ledger, Split, components, flat


@dataclass(frozen=True)
class Solution:
    """Which unit of which group every id belongs to (-1: of none), and the parts of each group.

    `label` is the class of every id, `reason` the index of the freeze that holds the class (-1: free).
    """

    label: Ids
    group: Ids
    unit: Ids
    parts: tuple[tuple[tuple[int, ...], ...], ...]
    reason: Ids


def solve(ledger: Ledger) -> Solution:
    """The groups of all ids that layers produce and that may be cut."""
    axis_of, _ = ledger.places()
    label = components(ledger.count, *flat(ledger.unions))
    splits = ledger.splits
    while True:
        reason = _reasons(ledger, label)
        sign = _signatures(label, axis_of, len(ledger.axes))
        partitions, broken = _examine(splits, label, sign, reason, axis_of)
        if not broken:
            return _number(ledger, label, sign, reason, partitions)
        splits = [split for split in splits if split not in broken]
        first, second = flat([(split.rows[:-1], split.rows[1:]) for split in broken])
        label = components(ledger.count, label[first], label[second])[label]


def _reasons(ledger: Ledger, label: Ids) -> Ids:
    found = np.full(ledger.count, -1, np.int64)
    for number in range(len(ledger.frozen) - 1, -1, -1):
        found[label[ledger.frozen[number][0].ravel()]] = number
    spread: Ids = found[label]
    return spread


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
    """The partitions that can be kept as parts, finest first, and the splits that cannot.

    The latter are cut at the same positions in every row: their columns are united.
    """
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
    sizes = np.bincount(number, minlength=len(first))
    parts = [(tuple(range(int(size))),) for size in sizes]
    for rows in partitions:
        if group[rows[0, 0]] >= 0:
            parts[group[rows[0, 0]]] = tuple(tuple(np.unique(unit[row]).tolist()) for row in rows)
    return Solution(label, group[label], unit[label], tuple(parts), reason)
