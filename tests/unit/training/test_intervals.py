"""Laws of the 95 % intervals of accuracies and of their drops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from basisprune.training.intervals import paired_drop, wilson_interval


def test_an_undecided_candidate_says_so():
    before = np.ones(50, dtype=bool)
    after = before.copy()
    after[0] = False
    drop, (low, high) = paired_drop(before, after)
    assert drop == 0.02
    assert low < 0.01 < high


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 500), st.data())
def test_wilsons_interval_is_scipys(count, data):
    hits = data.draw(st.integers(0, count))
    expected = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(hits, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200))
def test_the_drop_lies_in_its_interval_and_turns_round_with_the_order(pairs):
    before, after = (np.array(column) for column in zip(*pairs, strict=True))
    drop, (low, high) = paired_drop(before, after)
    assert low < drop < high
    assert drop == pytest.approx(before.mean() - after.mean())
    assert paired_drop(after, before)[0] == pytest.approx(-drop)
