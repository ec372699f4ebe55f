"""Laws of successive halving; tests/pipeline/test_portfolio.py runs whole portfolios."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.errors import ConfigError
from basisprune.sweeps.portfolio import PortfolioConfig, best_first
from basisprune.sweeps.running import Backbone
from basisprune.sweeps.stages import Trained


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4))
def test_half_is_kept_for_twice_the_epochs_until_few_are_left(backbones, keep, first):
    left = backbones
    for place, (epochs, after) in enumerate(PortfolioConfig(keep, first).rounds(backbones)):
        assert epochs == first * 2**place
        assert keep <= after < left
        assert after == max((left + 1) // 2, keep)
        left = after
    assert left <= max(keep, 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=9))
def test_the_most_accurate_come_first_and_of_two_alike_the_smaller(values):
    trained = {
        Backbone(str(index)): Trained(0.0, value / 10, 0, float(size), "") for index, (value, size) in enumerate(values)
    }
    ranked = [(trained[each].value, -trained[each].size) for each in best_first(trained)]
    assert ranked == sorted(ranked, reverse=True)
    assert len(ranked) == len(values)


def test_numbers_below_one_are_refused():
    with pytest.raises(ConfigError) as caught:
        PortfolioConfig(-1, 0)
    assert len(caught.value.faults) == 2
