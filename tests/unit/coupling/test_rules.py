"""What rules read of an operation: arguments by place or name, of the kind that they need."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from basisprune.coupling.labels import Labels
from basisprune.coupling.ledger import Ledger
from basisprune.coupling.rules import Operation, RuleTable, all_dims, listed

X = torch.zeros(2, 3, 4)


def operation(*args, out=X, **kwargs) -> Operation:
    labels = Labels((np.arange(1, 4).reshape(1, 3, 1),), active=True)
    return Operation("sum", torch.ops.aten.sum.dim_IntList, args, kwargs, out, "", Ledger({}), lambda _: labels)


def test_arguments_are_found_by_place_or_name():
    assert operation(X, 1).get(1, "dim") == operation(X, dim=1).get(1, "dim") == 1
    assert operation(X).get(1, "dim", 7) == 7
    assert (operation(X, -1).axis(1, "dim", 0), operation(X).axis(1, "dim", 0)) == (2, 0)
    assert operation([X, X]).tensors(0) == [X, X]
    assert (operation(X, 5).number(1), operation(X).source) == (5, X)


def test_results_are_one_or_several():
    assert operation(X).results == [X]
    assert operation(X, out=(X, None)).result is X


def test_an_argument_of_another_kind_is_refused():
    with pytest.raises(TypeError, match="Tensor expected, int found"):
        operation(3).tensor(0)
    with pytest.raises(TypeError, match="int expected, str found"):
        operation(X, "mean").number(1)


def test_every_field_is_changed_alike():
    assert operation(X).each(lambda ids: ids[:, ::-1]).fields[0].ravel().tolist() == [3, 2, 1]


@pytest.mark.parametrize(("dims", "expected"), [(None, [0, 1, 2]), ([], [0, 1, 2]), (-1, [2]), ((0, -2), [0, 1])])
def test_axes_are_counted_from_the_front_and_none_means_all(dims, expected):
    assert all_dims(dims, 3) == expected


def test_one_thing_is_a_list_of_one():
    assert (listed((1, 2)), listed(3)) == ((1, 2), [3])


def test_a_rule_serves_all_its_names():
    table = RuleTable()

    @table.rule("one", "two")
    def rule(call: Operation) -> Labels:
        return call.labels

    assert table == {"one": rule, "two": rule}
