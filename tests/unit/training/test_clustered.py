"""Laws of tests on images of which some belong together."""

from __future__ import annotations

import numpy as np
import pytest

from basisprune.budget import Budget
from basisprune.budget.certify import Promise
from basisprune.tasks import Predictions
from basisprune.training.metrics import MetricName, value_of


def trust(labels, answers) -> float:
    """A function that a user might pass."""
    return float(np.mean(labels == answers) ** 2)


METRICS: list[MetricName] = ["accuracy", "balanced", "macro-f1", "worst-class", trust]


def pair(kinds, labels, units=None) -> tuple[Predictions, Predictions]:
    """Both networks are right but where the first (0) or the second (1) is not."""
    ones, other = np.ones(len(labels)), (labels + 1) % 3
    before, after = (Predictions(np.where(kinds == each, other, labels), ones, labels, units) for each in (0, 1))
    return before, after


def repeated(images: int, copies: int, seed: int = 0, lost: float = 0.1, won: float = 0.05):
    random = np.random.default_rng(seed)
    kinds = np.select([(drawn := random.random(images)) < lost, drawn < lost + won], [1, 0], 2)
    every = np.repeat(np.arange(images), copies)
    return pair(kinds[every], (np.arange(images) % 3)[every], every)


@pytest.mark.parametrize("metric", METRICS)
def test_how_many_copies_an_image_has_changes_nothing(metric):
    promise = Promise(Budget(max_drop=0.2), metric=metric)
    two, many = (promise.test(1, "x", *repeated(40, copies)) for copies in (2, 30))
    assert two.p_value == pytest.approx(many.p_value, abs=1e-9)
    assert (two.before, two.after, two.bound) == pytest.approx((many.before, many.after, many.bound), abs=1e-6)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("is_drop", [True, False])
def test_copies_promise_no_more_than_the_images_without_them(metric, is_drop):
    budget = Budget(max_drop=0.05) if is_drop else Budget(min_accuracy=0.8)
    promise = Promise(budget, metric=metric)
    before, after = repeated(12, 60, lost=0.0, won=0.0)
    test = promise.test(1, "x", before, after)
    assert not test.passed
    assert not promise.reachable(after.labels, after.units)
    alone = Predictions(after.classes, after.probabilities, after.labels)
    assert promise.reachable(alone.labels)  # as 720 images that are independent


@pytest.mark.parametrize(("images", "copies"), [(40, 10), (20, 20), (10, 40)])
@pytest.mark.parametrize("metric", ["accuracy", "worst-class"])
def test_a_network_at_the_limit_passes_at_most_one_in_twenty(metric, images, copies):
    promise, draws = Promise(Budget(max_drop=0.05), metric=metric), 200
    passed = sum(promise.keeps(promise.evidence(*repeated(images, copies, seed))) for seed in range(draws))
    assert passed / draws <= 0.05 + 2 * (0.05 * 0.95 / draws) ** 0.5


def test_each_group_counts_the_same_however_many_images_it_has():
    kinds, units = np.array([1, 1, 1, 1, 1, 1, 2, 2]), np.array([0, 0, 0, 0, 0, 0, 1, 2])
    before, after = pair(kinds, np.zeros(8, dtype=np.int64), units)
    assert value_of("accuracy", after) == pytest.approx(2 / 3)
    assert value_of(trust, after) == pytest.approx(4 / 9)
    assert Promise(Budget(max_drop=0.1)).evidence(before, after).drop == pytest.approx(1 / 3)


def test_a_part_of_a_group_is_a_part_of_a_loss():
    labels, units = np.arange(400) % 3, np.arange(400) // 4
    kinds = np.where(np.arange(400) % 4 == 0, 1, 2)  # one of each four is lost
    even = Promise(Budget(max_drop=0.3)).test(1, "x", *pair(kinds, labels, units))
    assert even.after == pytest.approx(0.75)
    assert even.passed  # each group says the same
    whole = Promise(Budget(max_drop=0.3)).test(1, "x", *pair(np.where(units % 4 == 0, 1, 2), labels, units))
    assert whole.after == pytest.approx(0.75)
    assert whole.p_value > even.p_value
    assert not whole.passed


@pytest.mark.parametrize("metric", METRICS)
def test_enough_units_certify_a_network_that_loses_nothing(metric):
    promise = Promise(Budget(max_drop=0.1), metric=metric)
    test = promise.test(1, "x", *repeated(400, 3, lost=0.01, won=0.01))
    assert test.passed
    low, high = promise.evidence(*repeated(400, 3, lost=0.01, won=0.01)).interval()
    assert low <= test.before - test.after <= high <= 0.1 + 1e-9
    assert promise.chance(promise.evidence(*repeated(400, 3, lost=0.01, won=0.01)), 400, 800) > 0.5
