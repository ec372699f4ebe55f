"""Labels on tensors that say which channels they hold, and the notes that a run makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch._ops import OpOverload

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


Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Labels:
    """The fields of a tensor, and whether it depends on the network's input (or only on parameters)."""

    fields: tuple[Ids, ...]
    active: bool


CONSTANT = Labels((), active=False)
_MARK = "_basisprune_labels"


def attach(tensor: Tensor, labels: Labels) -> None:
    """Give a tensor its labels."""
    setattr(tensor, _MARK, labels)


def attached(tensor: Tensor) -> Labels | None:
    """The labels that were given to a tensor, if any."""
    found: Labels | None = getattr(tensor, _MARK, None)
    return found


@dataclass(frozen=True)
class Operation:
    """One operation while the network runs; `name` is that of the aten operation, not in place."""

    name: str
    func: OpOverload[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    out: object
    module: str
    ledger: Ledger
    labels_of: Callable[[Tensor], Labels]

    def get(self, place: int, name: str, default: object = None) -> object:
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def tensor(self, place: int) -> Tensor:
        return _checked(self.args[place], Tensor)

    def number(self, place: int) -> int:
        return _checked(self.args[place], int)

    def axis(self, place: int, name: str, default: int) -> int:
        """The axis of the first argument that is named there, counted from the front."""
        return _checked(self.get(place, name, default), int) % self.source.ndim

    @property
    def source(self) -> Tensor:
        return self.tensor(0)

    @property
    def results(self) -> list[Tensor]:
        return [_checked(item, Tensor) for item in listed(self.out)]

    @property
    def result(self) -> Tensor:
        return _checked(listed(self.out)[0], Tensor)

    @property
    def labels(self) -> Labels:
        return self.labels_of(self.source)

    def operand(self, tensor: Tensor) -> tuple[Labels, tuple[int, ...]]:
        """Its labels and shape, as `join` takes them."""
        return self.labels_of(tensor), tuple(tensor.shape)

    def each(self, change: Callable[[Ids], Ids]) -> Labels:
        """Labels with every field of the first argument changed alike."""
        labels = self.labels
        return useful(self.ledger, [change(ids) for ids in labels.fields], labels.active)

    def keep(self, fits: Callable[[Ids], bool], reason: str) -> Labels:
        """The labels of the first argument with those fields that fit; the others are frozen."""
        for ids in self.labels.fields:
            if not fits(ids):
                self.ledger.freeze(ids, reason)
        return Labels(tuple(filter(fits, self.labels.fields)), self.labels.active)


Rule: TypeAlias = Callable[[Operation], Labels | list[Labels]]
AnyRule = TypeVar("AnyRule", bound=Rule)


class RuleTable(dict[str, Rule]):
    """Rules by the name of the aten operation, without the underscore of its in-place form."""

    def rule(self, *names: str) -> Callable[[AnyRule], AnyRule]:
        def enter(function: AnyRule) -> AnyRule:
            self.update(dict.fromkeys(names, function))
            return function

        return enter


def all_dims(dims: object, ndim: int) -> list[int]:
    """The axes that an argument names, counted from the front; none named means all."""
    named = [] if dims is None else listed(dims)
    return [_checked(dim, int) % ndim for dim in named] if named else list(range(ndim))


def listed(value: object) -> Sequence[object]:
    """The items of a list or tuple; anything else is the only one."""
    return value if isinstance(value, (list, tuple)) else [value]


def _checked(value: object, kind: type[Kind]) -> Kind:
    if not isinstance(value, kind):
        raise TypeError(f"{kind.__name__} expected, {type(value).__name__} found")
    return value


def support(ids: Ids) -> tuple[int, ...]:
    """The axes that a field depends on."""
    return tuple(dim for dim, size in enumerate(ids.shape) if size > 1)


def vector(ids: Ids, dim: int, ndim: int) -> Ids:
    """A 1-d array of ids as a field along axis `dim` of a tensor with `ndim` axes."""
    return ids.reshape([-1 if axis == dim else 1 for axis in range(ndim)])


def part(ids: Ids, dim: int, places: slice | int) -> Ids:
    """The field at these places of an axis; all of it where it does not depend on the axis."""
    if ids.shape[dim] == 1:
        places = slice(None) if isinstance(places, slice) else 0
    taken: Ids = ids[(slice(None),) * dim + (places,)]
    return taken


def _first_along(ids: Ids, dims: Sequence[int]) -> Ids:
    return ids[tuple(slice(0, 1) if dim in dims else slice(None) for dim in range(ids.ndim))]


def squash(ledger: Ledger, ids: Ids, keep: Sequence[int]) -> Ids:
    """The field with all but the axes `keep` reduced to one position, whose ids are united over them."""
    base = _first_along(ids, [dim for dim in range(ids.ndim) if dim not in keep])
    if base.shape != ids.shape:
        ledger.unite(base, ids)
    return base


def narrow(ids: Ids) -> Ids:
    """The field with every axis that it does not depend on reduced to length one."""
    for dim in support(ids):
        base = _first_along(ids, (dim,))
        if (ids == base).all():
            ids = base
    return ids


def useful(ledger: Ledger, fields: Sequence[Ids], active: bool) -> Labels:
    """Labels of those fields that name channels; a channel that stands alone can never be cut."""
    kept = []
    for ids in fields:
        if not ids.any():
            continue
        if ids.size > 1:
            kept.append(ids)
        else:
            ledger.freeze(ids, "one of its channels is used on its own")
    return Labels(tuple(kept), active)


def join(ledger: Ledger, operands: Sequence[tuple[Labels, tuple[int, ...]]], ndim: int) -> Labels:
    """Labels of an element-wise result; fields that meet are united.

    An axis of a parameter that meets unlabelled data of its own length is fixed by the data.
    """
    active = any(labels.active for labels, _ in operands)
    found: list[Ids] = []
    for labels, _ in sorted(operands, key=lambda operand: not operand[0].active):
        fresh = []  # fields of one tensor do not meet each other
        for ids in labels.fields:
            wide = ids.reshape((1,) * (ndim - ids.ndim) + ids.shape)
            if not _meet_all(ledger, found, wide):
                if active and not labels.active and _is_fixed(wide, operands, ndim):
                    ledger.freeze(ids, "it meets data that is not a channel")
                else:
                    fresh.append(wide)
        found.extend(fresh)
    return Labels(tuple(found), active)


def _meet_all(ledger: Ledger, found: list[Ids], ids: Ids) -> bool:
    """Whether the field met one of those found before; these are updated."""
    met = False
    for place, other in enumerate(found):
        mine, theirs = support(ids), support(other)
        if not mine or not theirs:
            continue
        inside, outside = mine[-1] in theirs, theirs[-1] in mine
        met = met or inside or outside
        if inside and outside:
            ledger.unite(ids, other)
            if ids is not other:
                bigger, smaller = (ids, other) if len(mine) > len(theirs) else (other, ids)
                found[place] = bigger if bigger.all() else np.where(bigger == 0, smaller, bigger)
        elif inside:
            ledger.freeze(ids, "it belongs to a fixed number of parts")
        elif outside:
            ledger.freeze(other, "it belongs to a fixed number of parts")
            found[place] = ids
    return met


def _is_fixed(ids: Ids, operands: Sequence[tuple[Labels, tuple[int, ...]]], ndim: int) -> bool:
    inner = support(ids)[-1:]
    return any(
        labels.active and ndim - len(shape) <= dim and shape[dim - ndim + len(shape)] > 1
        for labels, shape in operands
        for dim in inner
    )


def reduce(ledger: Ledger, ids: Ids, dims: Sequence[int]) -> Ids | None:
    """The field after a sum over `dims` (kept with length one), or None if its channels are summed up."""
    mine = support(ids)
    if not set(mine) & set(dims):
        return ids
    if mine[-1] in dims:
        return None
    return squash(ledger, ids, [dim for dim in range(ids.ndim) if dim not in dims])


def blocks(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """The smallest runs of axes `source[a:b]` and `target[c:d]` with equal numbers of elements.

    >>> list(blocks((2, 6, 5), (2, 3, 2, 5)))
    [(0, 1, 0, 1), (1, 2, 1, 3), (2, 3, 3, 4)]
    """
    i = j = 0
    while i < len(source) or j < len(target):
        a, c = i, j
        left = source[i] if i < len(source) else 1
        right = target[j] if j < len(target) else 1
        i, j = min(i + 1, len(source)), min(j + 1, len(target))
        while left != right:
            if left < right:
                left *= source[i]
                i += 1
            else:
                right *= target[j]
                j += 1
        yield a, i, c, j


def reshape(ids: Ids, source: Sequence[int], target: Sequence[int]) -> Ids:
    """The field of a tensor of shape `source` after it was viewed as `target`."""
    wide, short = list(ids.shape), [1] * len(target)
    mixed = False
    for a, b, c, d in blocks(source, target):
        if any(ids.shape[dim] > 1 for dim in range(a, b)):
            wide[a:b] = source[a:b]
            short[c:d] = target[c:d]
            mixed = mixed or b - a > 1 or d - c > 1
    shaped = np.broadcast_to(ids, wide).reshape(short)
    return narrow(shaped) if mixed else shaped
