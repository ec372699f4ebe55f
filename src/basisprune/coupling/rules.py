"""What a rule is: a function from one operation of a running network to the labels of its result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor

from basisprune.coupling.labels import Labels, useful
from basisprune.coupling.ledger import Ids, Ledger


@dataclass(frozen=True)
class Operation:
    """One operation while the network runs: its arguments, its result, and where it happened.

    `name` is that of the aten operation without the underscore of the in-place form.
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    module: str
    ledger: Ledger
    labels_of: Callable[[Tensor], Labels]

    def get(self, place: int, name: str, default: Any = None) -> Any:
        """The argument at that place or of that name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    @property
    def source(self) -> Tensor:
        """The first argument."""
        tensor: Tensor = self.args[0]
        return tensor

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


def all_dims(dims: Any, ndim: int) -> list[int]:
    """The axes that an argument names, counted from the front; none named means all."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(ndim))
    return [dim % ndim for dim in ([dims] if isinstance(dims, int) else dims)]
