"""Laws of labels: ids go where the values go."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from basisprune.coupling.combining import COMBINING, PRODUCTS
from basisprune.coupling.find_groups import RULES
from basisprune.coupling.labels import (
    Labels,
    Ledger,
    Operation,
    RuleTable,
    all_dims,
    blocks,
    listed,
    narrow,
    reduce,
    reshape,
    squash,
    support,
    vector,
)
from basisprune.coupling.rearranging import REARRANGING
from basisprune.coupling.solving import classes

sides = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


@st.composite
def fields(draw):
    """The shape of a tensor and a field of it, which depends on some of its axes."""
    shape = draw(sides)
    kept = draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape)))
    own = tuple(side if keep else 1 for side, keep in zip(shape, kept, strict=True))
    ids = draw(st.lists(st.integers(0, 5), min_size=math.prod(own), max_size=math.prod(own)))
    return shape, np.array(ids, dtype=np.int64).reshape(own)


@st.composite
def views(draw):
    shape, ids = draw(fields())
    left, target = math.prod(shape), []
    while left > 1 and len(target) < 4:
        target.append(draw(st.sampled_from([side for side in range(1, left + 1) if left % side == 0])))
        left //= target[-1]
    return shape, ids, (*target, left)


@settings(deadline=None)
@given(views())
def test_ids_are_viewed_like_the_values(case):
    shape, ids, target = case
    expected = np.broadcast_to(ids, shape).reshape(target)
    assert np.array_equal(np.broadcast_to(reshape(ids, shape, target), target), expected)


@given(fields())
def test_a_narrow_field_says_the_same(case):
    shape, ids = case
    assert np.array_equal(np.broadcast_to(narrow(np.broadcast_to(ids, shape)), shape), np.broadcast_to(ids, shape))


@given(views())
def test_blocks_cover_both_shapes_with_equal_counts(case):
    source, _, target = case
    runs = list(blocks(source, target))
    assert [axis for a, b, _, _ in runs for axis in range(a, b)] == list(range(len(source)))
    assert [axis for _, _, c, d in runs for axis in range(c, d)] == list(range(len(target)))
    assert all(math.prod(source[a:b]) == math.prod(target[c:d]) for a, b, c, d in runs)


def test_what_is_squashed_goes_together():
    ledger = Ledger({})
    base = squash(ledger, np.arange(1, 7).reshape(2, 3), (1,))
    assert base.tolist() == [[1, 2, 3]]
    ((one, other),) = ledger.unions
    met = np.broadcast_arrays(one, other)
    assert classes(7, [met]).tolist() == [0, 1, 2, 3, 1, 2, 3]


def test_a_sum_over_channels_ends_them_and_any_other_keeps_them():
    ids = vector(np.arange(1, 5), 1, 3)
    assert support(ids) == (1,)
    assert reduce(Ledger({}), ids, [1]) is None
    assert reduce(Ledger({}), ids, [2]) is ids


X = torch.zeros(2, 3, 4)


def operation(*args, out=X, **kwargs) -> Operation:
    labels = Labels((np.arange(1, 4).reshape(1, 3, 1),), active=True)
    return Operation("sum", torch.ops.aten.sum.dim_IntList, args, kwargs, out, "", Ledger({}), lambda _: labels)


def test_arguments_are_found_by_place_or_name():
    assert operation(X, 1).get(1, "dim") == operation(X, dim=1).get(1, "dim") == 1
    assert operation(X).get(1, "dim", 7) == 7
    assert (operation(X, -1).axis(1, "dim", 0), operation(X).axis(1, "dim", 0)) == (2, 0)
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


def test_every_rule_is_known_and_no_operation_has_two():
    assert len(RULES) == len(COMBINING) + len(REARRANGING) + len(PRODUCTS)
    assert {"add", "relu"}.isdisjoint(RULES)  # element-wise by torch's own tags
    assert {"view", "cat", "convolution", "mean"} <= RULES.keys()
