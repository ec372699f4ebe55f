"""Laws of successive halving."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.errors import ConfigError
from basisprune.sweeps.halving import Halving, Probed, best_of


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 4))
def test_half_goes_on_with_twice_the_epochs_until_few_are_left(backbones, keep, first):
    rungs = Halving(first, keep).rungs(backbones)
    left = backbones
    for place, (epochs, after) in enumerate(rungs):
        assert epochs == first * 2**place
        assert keep <= after < left
        assert after == max((left + 1) // 2, keep)
        left = after
    assert left <= max(keep, 1)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(1, 9))
def test_the_most_accurate_go_on_and_of_two_alike_the_smaller(values, count):
    probed = [Probed(str(index), accuracy / 10, size) for index, (accuracy, size) in enumerate(values)]
    going = best_of(probed, count)
    assert len(going) == min(count, len(probed))
    kept = [each for each in probed if each.name in going]
    dropped = [each for each in probed if each.name not in going]
    for one in kept:
        assert all((one.accuracy, -one.size) >= (other.accuracy, -other.size) for other in dropped)


def test_numbers_below_one_are_refused():
    with pytest.raises(ConfigError) as caught:
        Halving(0, -1)
    assert len(caught.value.faults) == 2
