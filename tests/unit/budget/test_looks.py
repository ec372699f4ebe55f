"""A test that may end before all images are labelled keeps its error, and loses little power."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basisprune.budget.looks import LOOKS, LOST, NEITHER, UNLABELLED, WON, SequentialTest, boundaries
from basisprune.budget.proportions import Paired

MARGIN = 0.02


def drawn(images: int, lost: float, won: float, neither: float, draws: int, seed: int = 0):
    random = np.random.default_rng(seed)
    values = np.array([LOST, WON, NEITHER, NEITHER], dtype=np.int8)
    return values[random.choice(4, (draws, images), p=[lost, won, neither, 1 - lost - won - neither])]


def test_one_look_is_tangos_test():
    assert boundaries(np.array([1.0]), 0.05)[0] == pytest.approx(-1.645, abs=2e-3)


def test_the_boundaries_are_those_of_lan_and_demets():
    """Five looks at 0.025, one-sided, O'Brien and Fleming's spending: published as 4.88, 3.36, 2.68, 2.29, 2.03."""
    found = -boundaries(np.linspace(0.2, 1, 5), 0.025)
    assert found == pytest.approx([4.88, 3.36, 2.68, 2.29, 2.03], abs=0.02)


def test_the_error_is_that_of_all_looks_together():
    pairs = drawn(800, 0.05 + MARGIN / 2, 0.05 - MARGIN / 2, 0.02, draws=2000)
    test = SequentialTest(800, MARGIN)
    passed = np.mean([test.decide(each).passed is True for each in pairs])
    assert passed <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / len(pairs))


def test_a_network_that_loses_nothing_passes_early_and_nearly_as_often_as_with_all_labels():
    pairs = drawn(1600, 0.03, 0.03, 0.02, draws=500)
    test = SequentialTest(1600, MARGIN)
    found = [test.decide(each) for each in pairs]
    whole = np.mean([Paired((each == LOST).sum(), (each == WON).sum(), 1600).p_value(MARGIN) <= 0.05 for each in pairs])
    passed = [each for each in found if each.passed]
    assert len(passed) / len(pairs) >= whole - 0.05
    assert np.mean([each.seen for each in passed]) < 0.75 * 1600


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.floats(0, 1))
def test_labels_that_are_missing_count_as_lost(seed, share):
    (full,) = drawn(400, 0.05, 0.05, 0.02, draws=1, seed=seed)
    hidden = np.random.default_rng(seed).random(400) < share
    partial = np.where(hidden & (full != NEITHER), UNLABELLED, full).astype(np.int8)
    as_lost = np.where(partial == UNLABELLED, LOST, partial).astype(np.int8)
    test = SequentialTest(400, 0.05)
    assert (test.decide(partial).passed is True) == (test.decide(as_lost).passed is True)
    if test.decide(partial).passed:  # what has passed stays so, whatever the other labels are
        assert test.decide(full).passed


def test_labels_are_no_longer_asked_for_where_a_network_loses_too_much():
    (full,) = drawn(2000, 0.08, 0.01, 0.02, draws=1)
    differing = np.flatnonzero(full != NEITHER)
    partial = full.copy()
    partial[differing[len(differing) // 2 :]] = UNLABELLED
    test = SequentialTest(2000, MARGIN)
    assert test.decide(partial).passed is False
    assert test.decide(full).passed is False


def test_without_differences_half_of_the_images_decide_and_with_losses_alone_none_do():
    test = SequentialTest(1000, MARGIN)
    same = np.zeros(1000, dtype=np.int8)
    assert test.decide(same).passed
    assert test.decide(same).seen == 500
    assert test.decide(np.full(1000, LOST, dtype=np.int8)).passed is False
    assert test.decide(np.full(1000, UNLABELLED, dtype=np.int8)).passed is None


def test_the_bound_agrees_with_the_decision():
    test = SequentialTest(800, MARGIN)
    for each in drawn(800, 0.04, 0.03, 0.02, draws=20):
        assert (test.upper(each) <= MARGIN + 1e-9) == (test.decide(each).passed is True)


@pytest.mark.parametrize("images", [1, 2, 7, 40])
def test_few_images_have_fewer_looks(images):
    assert 1 <= len(SequentialTest(images, MARGIN).looks) <= min(LOOKS, images)
