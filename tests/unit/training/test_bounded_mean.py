"""Laws of the test of a bounded mean, for any number of units."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.training.bounded_mean import BoundedMean, chance_above_zero
from basisprune.training.intervals import lower_accuracy, tail


def counts(lost: int, won: int, same: int) -> BoundedMean:
    return BoundedMean(np.repeat([1.0, -1.0, 0.0], [lost, won, same]), 1, -1)


@given(st.integers(0, 60), st.integers(1, 60), st.floats(0.01, 0.99))
def test_of_two_values_it_is_the_exact_binomial_test(hits, others, accuracy):
    found = BoundedMean(np.repeat([-1.0, 0.0], [hits, others]), 0, -1)
    assert found.p_value(-accuracy) == pytest.approx(tail(hits, hits + others, accuracy), rel=1e-6, abs=1e-12)
    assert -found.upper(0.95) == pytest.approx(lower_accuracy(hits, hits + others), abs=1e-6)


def test_small_chances_have_all_their_digits():
    assert counts(0, 0, 1000).p_value(0.1) == pytest.approx(0.9**1000, rel=1e-9)


@given(st.integers(0, 1000))
def test_it_is_the_chance_that_units_weighted_at_random_lose_as_much(seed):
    random = np.random.default_rng(seed)
    terms = random.normal(-0.3, 1, random.integers(2, 30))
    drawn = random.exponential(size=(4000, len(terms))) @ terms
    assert chance_above_zero(terms, np.ones(len(terms))) == pytest.approx((drawn >= 0).mean(), abs=0.04)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.floats(0.01, 0.5))
def test_the_bound_and_the_test_agree_and_a_larger_margin_is_less_likely(values, step):
    found = BoundedMean(np.array(values), 1, -1)
    bound = found.upper(0.95)
    low, high = found.interval()
    assert low - 1e-9 <= found.drop <= high + 1e-9
    assert found.drop <= bound + 1e-9 <= 1 + 2e-9
    assert found.p_value(min(bound + 1e-6, 1)) <= 0.0501
    assert found.p_value(found.drop + step) <= found.p_value(found.drop) + 1e-9


def test_on_as_many_units_the_expected_score_is_that_of_the_test():
    found = counts(5, 3, 92)
    more = counts(20, 12, 368)
    assert found.expected_score(0.05, 4) == pytest.approx(more.expected_score(0.05, 1))


@pytest.mark.parametrize("units", [5, 10, 20, 40])
@pytest.mark.parametrize("margin", [0.05, 0.2, 0.5])
def test_at_the_limit_it_passes_at_most_one_in_twenty_whatever_the_number_of_units(units, margin):
    """Computed exactly, for all shares of units that are won."""
    ways = [(lost, won) for lost in range(units + 1) for won in range(units + 1 - lost)]
    passing = [(lost, won) for lost, won in ways if counts(lost, won, units - lost - won).p_value(margin) <= 0.05]
    logs = np.cumsum(np.log(np.arange(1, units + 1)))
    logs = np.append(0.0, logs)
    for share in np.linspace(1e-9, (1 - margin) / 2 - 1e-9, 25):
        chances = [
            np.exp(
                logs[units]
                - logs[lost]
                - logs[won]
                - logs[units - lost - won]
                + lost * np.log(share + margin)
                + won * np.log(share)
                + (units - lost - won) * np.log(max(1 - margin - 2 * share, 1e-300))
            )
            for lost, won in passing
        ]
        assert sum(chances) <= 0.05 + 1e-9


def test_at_the_limit_it_passes_at_most_one_in_twenty_of_skewed_numbers():
    random, passed = np.random.default_rng(0), []
    for _ in range(400):
        values = (random.random(60) < 0.1) * random.beta(0.5, 0.5, 60) - 0.01 * random.random(60)
        passed.append(BoundedMean(values, 1, -1).p_value(0.045) <= 0.05)
    assert np.mean(passed) <= 0.05 + 2 * (0.05 * 0.95 / 400) ** 0.5
