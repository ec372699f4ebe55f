"""Laws of what a run aims at."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.budget import Budget, Ratios
from basisprune.errors import ConfigError

fractions = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(
    ("given", "kind", "value", "about_accuracy"),
    [
        ({"max_drop": 0.0}, "max_drop", 0.0, True),
        ({"min_accuracy": 0.9}, "min_accuracy", 0.9, True),
        ({"target_params": 10}, "target_params", 10.0, False),
        ({"target_macs": 10}, "target_macs", 10.0, False),
        ({"target_latency": 0.5}, "target_latency", 0.5, False),
    ],
)
def test_a_budget_is_one_limit(given, kind, value, about_accuracy):
    budget = Budget(**given)
    assert (budget.kind, budget.value, budget.is_about_accuracy) == (kind, value, about_accuracy)


@given(fractions, fractions)
def test_the_least_accuracy_is_that_of_the_reference_without_the_drop_or_the_one_asked_for(limit, reference):
    assert Budget(max_drop=limit).least_accuracy(reference) == reference - limit
    assert Budget(min_accuracy=limit).least_accuracy(reference) == limit


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(1, 10**9))
def test_a_size_is_small_enough_up_to_the_target_whatever_the_other_sizes(target, size, other):
    assert Budget(target_params=target).allows(size, other, None) == (size <= target)
    assert Budget(target_macs=target).allows(other, size, None) == (size <= target)
    assert Budget(target_latency=float(target)).allows(other, other, float(size)) == (size <= target)


def test_a_latency_that_was_not_measured_is_not_small_enough():
    assert not Budget(target_latency=1e9).allows(1, 1, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "0 of max_drop, .* given; exactly one is needed"),
        ({"max_drop": 0.01, "target_params": 5}, "2 of max_drop, .* given; exactly one is needed"),
        ({"max_drop": 1.0}, r"max_drop: 1\.0 given; it is a fraction, .*--max-drop 1%"),
        ({"max_drop": math.nan}, "max_drop: nan given"),
        ({"min_accuracy": -0.1}, r"min_accuracy: -0\.1 given; it is a fraction, .*--min-accuracy 95%"),
        ({"target_params": 0}, "target_params: 0 given; at least 1"),
        ({"target_macs": -3}, "target_macs: -3 given; at least 1"),
        ({"target_latency": 0.0}, r"target_latency: 0\.0 given.*above 0"),
        ({"target_latency": math.inf}, "target_latency: inf given"),
        ({"max_drop": 2.0, "target_macs": 0}, r"(?s)3 faults.*exactly one.*max_drop: 2\.0.*target_macs: 0"),
    ],
)
def test_what_is_no_budget_is_refused_with_all_faults(given, said):
    with pytest.raises(ConfigError, match=said):
        Budget(**given)


@given(fractions, fractions)
def test_each_axis_has_its_ratio(basis, filters):
    ratios = Ratios(basis, filters)
    assert (ratios.of("basis"), ratios.of("filters")) == (basis, filters)


def test_ratios_that_leave_nothing_or_add_something_are_refused_together():
    with pytest.raises(ConfigError, match=r"(?s)basis_ratio: 1\.0 given.*filter_ratio: -0\.1 given"):
        Ratios(1.0, -0.1)
    with pytest.raises(ConfigError, match="filter_ratio: nan given"):
        Ratios(filters=math.nan)
