"""What a rule is: a function from one operation of a running network to the labels of its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from torch import Tensor
from torch._ops import OpOverload

from basisprune.coupling.labels import Labels, useful
from basisprune.coupling.ledger import Ids, Ledger

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Operation:
    """One operation while the network runs: its arguments, its result, and where it happened.

    `name` is that of the aten operation without the underscore of the in-place form.
    """

    name: str
    func: OpOverload[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]
    out: object
    module: str
    ledger: Ledger
    labels_of: Callable[[Tensor], Labels]

    def get(self, place: int, name: str, default: object = None) -> object:
        """The argument at that place or of that name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def tensor(self, place: int) -> Tensor:
        """The tensor at that place."""
        return _checked(self.args[place], Tensor)

    def number(self, place: int) -> int:
        """The whole number at that place."""
        return _checked(self.args[place], int)

    def axis(self, place: int, name: str, default: int) -> int:
        """The axis of the first argument that is named there, counted from the front."""
        return _checked(self.get(place, name, default), int) % self.source.ndim

    def tensors(self, place: int) -> list[Tensor]:
        """The tensors in the list at that place."""
        return [_checked(item, Tensor) for item in listed(self.args[place])]

    @property
    def source(self) -> Tensor:
        """The first argument."""
        return self.tensor(0)

    @property
    def result(self) -> Tensor:
        """What comes out, the first if there are several."""
        return _checked(listed(self.out)[0], Tensor)

    @property
    def results(self) -> list[Tensor]:
        """All that comes out."""
        return [_checked(item, Tensor) for item in listed(self.out)]

    @property
    def labels(self) -> Labels:
        """The labels of the first argument."""
        return self.labels_of(self.source)

    def each(self, change: Callable[[Ids], Ids]) -> Labels:
        """Labels with every field of the first argument changed alike."""
        labels = self.labels
        return useful(self.ledger, [change(ids) for ids in labels.fields], labels.active)


Rule: TypeAlias = Callable[[Operation], Labels | list[Labels]]
AnyRule = TypeVar("AnyRule", bound=Rule)


class RuleTable(dict[str, Rule]):
    """Rules by the name of the aten operation, without the underscore of its in-place form."""

    def rule(self, *names: str) -> Callable[[AnyRule], AnyRule]:
        """A decorator that enters a rule for the operations of these names."""

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
