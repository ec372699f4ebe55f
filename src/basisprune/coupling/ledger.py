"""What is written down while a network runs: who met whom, who must stay, what splits evenly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class ParameterAxis:
    """The ids of one axis of a parameter or buffer: `start` for position 0, and so on."""

    parameter: str
    dim: int
    start: int
    size: int

    @property
    def module(self) -> str:
        return self.parameter.rpartition(".")[0]

    @property
    def ids(self) -> Ids:
        return np.arange(self.start, self.start + self.size, dtype=np.int64)


@dataclass(frozen=True)
class SizeHint:
    """A module's code may hold the length of `rows`, the ids along an axis (in each of its equal parts)."""

    module: str
    rows: Ids


@dataclass(frozen=True, eq=False)
class Split:
    """Channels that fall into parts (the rows), which must stay of one size.

    The number of rows is `hard` where a layer has it as a setting. Otherwise it comes from a view, and
    whole rows may go if the channels of a row turn out to go together (as in a pixel shuffle).
    """

    rows: Ids
    hard: bool


@dataclass
class Ledger:
    """The notes of one run. Ids are positive integers; 0 stands for a position that is not a channel.

    `given` holds the ids of parameters by `id(tensor)` where they are known before the run. `mixing` are the modules
    whose convs mix what they read even where each group reads a single channel: the second halves of pairs.
    """

    names: Mapping[int, str]
    given: Mapping[int, list[Ids]] = field(default_factory=dict)
    mixing: frozenset[str] = frozenset()
    used: dict[int, list[Ids]] = field(default_factory=dict)
    axes: list[ParameterAxis] = field(default_factory=list)
    unions: list[tuple[Ids, Ids]] = field(default_factory=list)
    frozen: list[tuple[Ids, str]] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    produced: list[Ids] = field(default_factory=list)
    hints: list[SizeHint] = field(default_factory=list)
    unknown: dict[str, None] = field(default_factory=dict)
    count: int = 1

    def parameter(self, tensor: Tensor) -> list[Ids]:
        """The ids of each axis of a parameter or buffer, as a 1-d array per axis."""
        key = id(tensor)
        if key not in self.used:
            self.used[key] = self.given[key] if key in self.given else self._new(tensor)
        return self.used[key]

    def _new(self, tensor: Tensor) -> list[Ids]:
        first = len(self.axes)
        for dim, size in enumerate(tensor.shape):
            self.axes.append(ParameterAxis(self.names[id(tensor)], dim, self.count, size))
            self.count += size
        return [axis.ids for axis in self.axes[first:]]

    def places(self) -> tuple[Ids, Ids]:
        """For every id the number of its axis and its position along it."""
        sizes = np.array([1, *(axis.size for axis in self.axes)])
        starts = np.array([0, *(axis.start for axis in self.axes)])
        axis = np.repeat(np.arange(-1, len(self.axes)), sizes)
        return axis, np.arange(self.count) - np.repeat(starts, sizes)

    def owners(self) -> tuple[list[str], Ids]:
        """The modules that hold parameters, and for every id the number of its module (-1 for id 0)."""
        modules = list(dict.fromkeys(axis.module for axis in self.axes))
        number = {name: place for place, name in enumerate(modules)}
        axis, _ = self.places()
        return modules, np.array([*(number[axis.module] for axis in self.axes), -1])[axis]

    def unite(self, first: Ids, second: Ids) -> None:
        """Note that the ids at equal positions (after broadcasting) must go together."""
        if first is not second:
            self.unions.append((first, second))

    def freeze(self, ids: Ids, reason: str) -> None:
        """Note that these ids must stay."""
        self.frozen.append((ids, reason))

    def split(self, rows: Ids, *, hard: bool = False) -> None:
        """Note that each row of a 2-d array of ids must lose equally many."""
        if rows.shape[0] > 1:
            self.splits.append(Split(rows, hard))

    def hint(self, module: str, ids: Ids, dim: int) -> None:
        """Note that a module's code may hold the length of axis `dim` of a field as a number."""
        if ids.shape[dim] > 1:
            self.hints.append(SizeHint(module, np.moveaxis(ids, dim, -1).reshape(-1, ids.shape[dim])))

    def all_hints(self) -> list[SizeHint]:
        """The hints of the run, then the lengths that modules may know from their own parameters."""
        return [*self.hints, *(SizeHint(axis.module, axis.ids[None]) for axis in self.axes)]

    def tie(self, modules: set[str]) -> None:
        """Note that axes which are equally long in one of these modules must stay so: they are cut alike."""
        first: dict[tuple[str, int], Ids] = {}
        for hint in self.all_hints():
            if hint.module in modules:
                self.unite(first.setdefault((hint.module, hint.rows.shape[1]), hint.rows[:1]), hint.rows)
