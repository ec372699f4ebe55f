"""Laws of labels: ids go where the values go."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from basisprune.coupling.labels import blocks, narrow, reduce, reshape, squash, support, vector
from basisprune.coupling.ledger import Ledger, components

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
    assert components(7, met[0].ravel(), met[1].ravel()).tolist() == [0, 1, 2, 3, 1, 2, 3]


def test_a_sum_over_channels_ends_them_and_any_other_keeps_them():
    ids = vector(np.arange(1, 5), 1, 3)
    assert support(ids) == (1,)
    assert reduce(Ledger({}), ids, [1]) is None
    assert reduce(Ledger({}), ids, [2]) is ids
