"""Laws of the bootstrap of a loss."""

from __future__ import annotations

import numpy as np
import pytest

from basisprune.tasks import Predictions
from basisprune.training.bootstrap import resample
from basisprune.training.intervals import Paired
from basisprune.training.metrics import value_of

SIZES = (120, 120, 12)


def drawn(seed: int, lost: float, won: float, sizes=SIZES) -> tuple[Predictions, Predictions]:
    """Two networks that are right nine times out of ten; the second loses and wins so many of each class."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(sizes)), sizes)
    kinds = random.random(len(labels))
    other = (labels + 1) % len(sizes)
    before = np.where(kinds < lost, labels, np.where(kinds < lost + won, other, np.where(kinds < 0.9, labels, other)))
    after = np.where(kinds < lost, other, np.where(kinds < lost + won, labels, np.where(kinds < 0.9, labels, other)))
    ones = np.ones(len(labels))
    return Predictions(before, ones, labels), Predictions(after, ones, labels)


def test_for_accuracy_it_agrees_with_the_score_test():
    before, after = drawn(0, 0.06, 0.02, (500, 500))
    bound, score = resample("accuracy", before, after).upper(0.95), Paired.of(before.hits, after.hits).upper(0.95)
    assert bound == pytest.approx(score, rel=0.1)


@pytest.mark.parametrize("metric", ["balanced", "macro-f1", "worst-class"])
def test_few_images_of_a_class_without_a_change_are_no_proof(metric):
    before, _ = drawn(0, 0.0, 0.0)
    found = resample(metric, before, before)
    assert found.drop == 0
    assert found.p_value(0.01) > 0.05
    assert found.upper(0.95) > 0.01
    low, high = found.interval()
    assert low < 0 < high


@pytest.mark.parametrize("metric", ["balanced", "macro-f1"])
def test_a_network_at_the_limit_passes_in_about_one_of_twenty_cases(metric):
    exact = drawn(1, 0.06, 0.03, tuple(500 * size for size in SIZES))
    limit = value_of(metric, exact[0]) - value_of(metric, exact[1])
    passed = [resample(metric, *drawn(seed, 0.06, 0.03)).p_value(limit) <= 0.05 for seed in range(2, 102)]
    assert np.mean(passed) <= 0.09  # 5 of 100 are expected at most; 10 or more would come once in 35


@pytest.mark.parametrize("metric", ["balanced", "macro-f1"])
def test_the_p_value_falls_with_the_margin_and_is_the_level_at_the_bound(metric):
    found = resample(metric, *drawn(0, 0.06, 0.03))
    values = [found.p_value(margin) for margin in (-0.1, found.drop, 0.05, 0.1, 0.3)]
    assert values == sorted(values, reverse=True)
    assert found.p_value(found.upper(0.95)) == pytest.approx(0.05, abs=0.01)
    low, high = found.interval()
    assert low < found.drop < high
    assert found.expected_score(0.1, 4.0) == pytest.approx(2 * found.expected_score(0.1, 1.0))


def test_a_function_goes_the_same_way_as_a_name():
    before, after = drawn(0, 0.1, 0.02, (60, 60))

    def accuracy(labels, answers) -> float:
        return float(np.mean(labels == answers))

    named, called = resample("accuracy", before, after), resample(accuracy, before, after)
    assert called.drop == pytest.approx(named.drop)
    assert called.upper(0.95) == pytest.approx(named.upper(0.95), abs=0.015)


def test_without_a_reference_it_is_the_metric_itself():
    _, after = drawn(0, 0.05, 0.0)
    found = resample("balanced", None, after)
    assert found.drop == pytest.approx(-value_of("balanced", after))
    assert -found.upper(0.95) < value_of("balanced", after)


def test_the_same_images_give_the_same_bound():
    pair = drawn(0, 0.05, 0.02)
    assert resample("macro-f1", *pair).upper(0.95) == resample("macro-f1", *pair).upper(0.95)
