"""Laws of the worth of filters that others make up for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.importance.refit_worth import Reading, refit_worth


def reading(seed: int, units: int, rank: int | None = None) -> Reading:
    rng = np.random.default_rng(seed)
    factors = rng.normal(size=(units, rank or units))
    return Reading(factors @ factors.T, rng.uniform(0.1, 2.0, units))


def lost(readings: list[Reading], keep: list[int]) -> float:
    """What least squares cannot predict of the units that go from those that stay."""
    total = 0.0
    for each in readings:
        gone = [unit for unit in range(len(each.metric)) if unit not in keep]
        inner = each.covariance[np.ix_(gone, gone)]
        if keep:
            cross = each.covariance[np.ix_(gone, keep)]
            inner = inner - cross @ np.linalg.pinv(each.covariance[np.ix_(keep, keep)]) @ cross.T
        total += float(np.diag(inner) @ each.metric[gone])
    return total


@given(st.integers(0, 1000), st.integers(2, 6), st.integers(1, 3))
def test_keeping_the_worthiest_loses_at_most_what_the_others_are_worth(seed, units, layers):
    readings = [reading(seed + place, units) for place in range(layers)]
    worth = refit_worth(readings, np.zeros(units))
    order = np.argsort(-worth, kind="stable")
    for count in range(1, units):
        keep = sorted(order[:count].tolist())
        if len(set(np.round(worth, 12))) == units:
            assert lost(readings, keep) <= worth[order[count:]].sum() * (1 + 1e-6) + 1e-9


def test_units_that_have_nothing_in_common_are_worth_their_variance():
    variances, metric = np.array([3.0, 1.0, 2.0]), np.array([1.0, 2.0, 4.0])
    worth = refit_worth([Reading(np.diag(variances), metric)], np.array([0.0, 0.5, 0.0]))
    assert worth == pytest.approx(variances * metric + [0.0, 0.5, 0.0])


def test_what_others_tell_completely_is_worth_nothing():
    found = reading(0, 6, rank=2)
    worth = np.sort(refit_worth([found], np.zeros(6)))
    assert worth[:4] == pytest.approx(0.0, abs=1e-9)
    assert worth.sum() == pytest.approx(float(np.diag(found.covariance) @ found.metric))
