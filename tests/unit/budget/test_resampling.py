"""Laws of the bootstrap of a loss, and of tests on images of which some belong together."""

from __future__ import annotations

import numpy as np
import pytest

from basisprune.budget import Budget
from basisprune.budget.certify import Guarantee
from basisprune.budget.metrics import MetricName, value_of
from basisprune.budget.proportions import Paired
from basisprune.budget.resampling import resample
from basisprune.tasks import Predictions

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
    promise = Guarantee(Budget(max_drop=0.2), metric=metric)
    two, many = (promise.test(1, "x", *repeated(40, copies)) for copies in (2, 30))
    assert two.p_value == pytest.approx(many.p_value, abs=1e-9)
    assert (two.before, two.after, two.bound) == pytest.approx((many.before, many.after, many.bound), abs=1e-6)


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("is_drop", [True, False])
def test_copies_promise_no_more_than_the_images_without_them(metric, is_drop):
    budget = Budget(max_drop=0.05) if is_drop else Budget(min_accuracy=0.8)
    promise = Guarantee(budget, metric=metric)
    before, after = repeated(12, 60, lost=0.0, won=0.0)
    test = promise.test(1, "x", before, after)
    assert not test.passed
    assert not promise.reachable(after.labels, after.units)
    alone = Predictions(after.classes, after.probabilities, after.labels)
    assert promise.reachable(alone.labels)  # as 720 images that are independent


@pytest.mark.parametrize(("images", "copies"), [(40, 10), (20, 20), (10, 40)])
@pytest.mark.parametrize("metric", ["accuracy", "worst-class"])
def test_a_network_at_the_limit_passes_at_most_one_in_twenty(metric, images, copies):
    promise, draws = Guarantee(Budget(max_drop=0.05), metric=metric), 200
    passed = sum(promise.keeps(promise.evidence(*repeated(images, copies, seed))) for seed in range(draws))
    assert passed / draws <= 0.05 + 2 * (0.05 * 0.95 / draws) ** 0.5


def test_each_group_counts_the_same_however_many_images_it_has():
    kinds, units = np.array([1, 1, 1, 1, 1, 1, 2, 2]), np.array([0, 0, 0, 0, 0, 0, 1, 2])
    before, after = pair(kinds, np.zeros(8, dtype=np.int64), units)
    assert value_of("accuracy", after) == pytest.approx(2 / 3)
    assert value_of(trust, after) == pytest.approx(4 / 9)
    assert Guarantee(Budget(max_drop=0.1)).evidence(before, after).drop == pytest.approx(1 / 3)


def test_a_part_of_a_group_is_a_part_of_a_loss():
    labels, units = np.arange(400) % 3, np.arange(400) // 4
    kinds = np.where(np.arange(400) % 4 == 0, 1, 2)  # one of each four is lost
    even = Guarantee(Budget(max_drop=0.3)).test(1, "x", *pair(kinds, labels, units))
    assert even.after == pytest.approx(0.75)
    assert even.passed  # each group says the same
    whole = Guarantee(Budget(max_drop=0.3)).test(1, "x", *pair(np.where(units % 4 == 0, 1, 2), labels, units))
    assert whole.after == pytest.approx(0.75)
    assert whole.p_value > even.p_value
    assert not whole.passed


@pytest.mark.parametrize("metric", METRICS)
def test_enough_units_certify_a_network_that_loses_nothing(metric):
    promise = Guarantee(Budget(max_drop=0.1), metric=metric)
    test = promise.test(1, "x", *repeated(400, 3, lost=0.01, won=0.01))
    assert test.passed
    low, high = promise.evidence(*repeated(400, 3, lost=0.01, won=0.01)).interval()
    assert low <= test.before - test.after <= high <= 0.1 + 1e-9
    assert promise.chance(promise.evidence(*repeated(400, 3, lost=0.01, won=0.01)), 400, 800) > 0.5
