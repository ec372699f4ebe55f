"""Laws of the test of a bounded mean, for any number of units, and of the paired test for any task."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import r2_score

from basisprune.budget import Budget, MetricBudget
from basisprune.budget.certify import AcceptanceRule, Guarantee, interval_of, loss_of
from basisprune.budget.means import BoundedMean, PairedValues, chance_above_zero
from basisprune.budget.proportions import Hits
from basisprune.errors import ConfigError
from basisprune.tasks import Outcomes, Task, regression, segmentation


def counts(lost: int, won: int, same: int) -> BoundedMean:
    return BoundedMean(np.repeat([1.0, -1.0, 0.0], [lost, won, same]), 1, -1)


@given(st.integers(0, 60), st.integers(1, 60), st.floats(0.01, 0.99))
def test_of_two_values_it_is_the_exact_binomial_test(hits, others, accuracy):
    found = BoundedMean(np.repeat([-1.0, 0.0], [hits, others]), 0, -1)
    exact = Hits(((hits, hits + others),))
    assert found.p_value(-accuracy) == pytest.approx(exact.p_value(-accuracy), rel=1e-6, abs=1e-12)
    assert found.upper(0.95) == pytest.approx(exact.upper(0.95), abs=1e-6)


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


MEAN = Task("means", lambda a, b: a, lambda a, b: a, metric_name="Dice", is_share=True)


def means(values) -> Outcomes:
    return Outcomes(MEAN, np.asarray(values, dtype=np.float64)[:, None])


def pixels(seed: int, count: int = 60, lost: float = 0.0) -> Outcomes:
    random = np.random.default_rng(seed)
    are = random.integers(20, 200, (count, 3)).astype(np.float64)
    both = are * np.clip(random.beta(9, 1, (count, 3)) - lost, 0, 1)
    said = both + random.integers(0, 20, (count, 3))
    return Outcomes(segmentation(), np.concatenate([both, said, are], axis=1))


def test_of_a_mean_each_example_says_its_own_number():
    assert means([0.1, 0.5]).each.tolist() == [0.1, 0.5]


def test_the_jackknife_values_of_a_mean_are_its_numbers():
    random = np.random.default_rng(0)
    by_metric = Task("means", MEAN.loss, MEAN.outcome, lambda rows: float(rows.mean()))
    rows = random.random((50, 1))
    assert Outcomes(by_metric, rows).each == pytest.approx(rows[:, 0])
    many = Outcomes(by_metric, random.random((1000, 1)))
    assert len(many.each) == 200  # in blocks, or it would take long
    assert many.each.mean() == pytest.approx(many.value)


@given(st.integers(0, 1000))
def test_the_order_of_examples_changes_nothing(seed):
    before, after = pixels(seed), pixels(seed, lost=0.02)
    mixed = np.random.default_rng(seed).permutation(len(before))
    one = PairedValues.of(before, after)
    two = PairedValues.of(Outcomes(before.task, before.rows[mixed]), Outcomes(after.task, after.rows[mixed]))
    assert one.drop == pytest.approx(two.drop)
    assert one.spread == pytest.approx(two.spread)


def test_the_bound_and_the_test_agree():
    pair = PairedValues.of(pixels(0), pixels(0, lost=0.03))  # as for a metric without limits
    assert pair.p_value(pair.upper(0.95)) == pytest.approx(0.05)
    low, high = pair.interval()
    assert low < pair.drop < high
    assert pair.expected_score(0.1, 4) == pytest.approx(2 * pair.expected_score(0.1, 1))


def test_a_few_examples_without_a_change_prove_little():
    same = means(np.linspace(0.5, 1, 30))
    assert loss_of(same, same).upper(0.95) > 0.02
    assert loss_of(same, same).p_value(0.01) > 0.05
    many = means(np.linspace(0.5, 1, 3000))
    assert loss_of(many, many).p_value(0.01) < 0.05


def test_of_equal_networks_the_p_values_are_uniform():
    random = np.random.default_rng(0)
    found = []
    for _ in range(400):
        base = random.beta(9, 1, 2000)
        one, two = (means(base + random.normal(0, 0.05, 2000)) for _ in range(2))
        found.append(PairedValues.of(one, two).p_value(0.0))
        assert loss_of(one, two).p_value(0.0) > found[-1] - 0.02  # which allows for losses that were not seen
    shares = [np.mean(np.array(found) <= level) for level in (0.1, 0.25, 0.5, 0.75, 0.9)]
    assert shares == pytest.approx([0.1, 0.25, 0.5, 0.75, 0.9], abs=0.07)


def test_of_networks_at_the_limit_the_test_passes_at_most_one_in_twenty_or_so():
    random, passed = np.random.default_rng(1), 0
    promise = Guarantee(Budget(max_drop=0.02), metric=MEAN)
    for _ in range(400):
        before = random.beta(20, 2, 150)
        hurt = (random.random(150) < 0.1) * random.uniform(0, 0.4, 150)  # 2 points in the mean
        passed += promise.keeps(promise.evidence(means(before), means(before - hurt)))
    assert passed / 400 <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)


def test_the_value_of_one_network_has_an_interval():
    random = np.random.default_rng(0)
    are = random.normal(size=(200, 1))
    rows = np.concatenate([are + random.normal(0, 0.3, (200, 1)), are], axis=1)
    found = Outcomes(regression(), rows)
    low, high = interval_of(found)
    assert found.value == pytest.approx(r2_score(rows[:, 1], rows[:, 0]))
    assert low < found.value < high < 1


def test_a_promise_of_a_task_is_in_units_of_its_metric():
    with pytest.raises(ConfigError, match="max_drop"):
        Budget(max_drop=2.5)
    with pytest.raises(ConfigError, match="max_drop: -1 given; it is a loss in units of the metric"):
        MetricBudget(max_drop=-1)
    task = regression("mae")
    before = Outcomes(task, -np.abs(np.random.default_rng(0).normal(10, 1, (300, 1))))
    after = Outcomes(task, before.rows - 0.5)
    loose, tight = (AcceptanceRule(Guarantee(MetricBudget(max_drop=drop), metric=task)) for drop in (2.5, 0.1))
    assert loose.passes(before, after)
    assert not tight.passes(before, after)
    test = loose.promise.test(1, "half", before, after)
    assert (test.passed, test.lost, test.won) == (True, 300, 0)
    assert test.bound == pytest.approx(0.5, abs=0.1)
    least = Guarantee(MetricBudget(min_accuracy=-11.0), metric=task)
    assert least.test(1, "half", before, after).passed


def test_losses_that_are_too_rare_to_be_seen_are_not_ruled_out():
    """Of 1 in 100 examples that lose everything, 100 examples show none in a third of all cases."""
    task = Task("means", lambda output, _: output.mean(), lambda scores, _: scores, metric_name="Dice", is_share=True)
    for count, kept in ((100, False), (299, True)):
        same = Outcomes(task, np.full((count, 1), 0.9))
        found = loss_of(same, same)
        assert (found.p_value(0.01) <= 0.05) is kept
        assert (found.upper(0.95) <= 0.01) is kept


def rare(task: Task, seed: int, count: int = 200) -> tuple[Outcomes, Outcomes]:
    """One example in a hundred loses all of 50, of numbers from 0 to 100: half a point in the mean."""
    random = np.random.default_rng(seed)
    are, lost = random.uniform(0, 100, (count, 1)), 50.0 * (random.random((count, 1)) < 0.01)
    if task.metric is None:
        return Outcomes(task, np.zeros((count, 1))), Outcomes(task, -lost)
    said = np.where(are < 50, are + lost, are - lost)
    return Outcomes(task, np.hstack([are, are])), Outcomes(task, np.hstack([said, are]))


@pytest.mark.parametrize(("metric", "drop"), [("mae", 0.5), ("r2", 0.03)])
def test_rare_and_large_losses_do_not_pass_more_often_than_promised(metric, drop):
    promise = Guarantee(MetricBudget(max_drop=drop), metric=regression(metric, limits=(0, 100)))
    passed = sum(promise.keeps(promise.evidence(*rare(promise.metric, seed))) for seed in range(200))
    assert passed / 200 <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 200)
    enough = Guarantee(MetricBudget(max_drop=5.0 if metric == "mae" else 0.3), metric=promise.metric)
    assert enough.test(1, "x", *rare(promise.metric, 0)).passed


@pytest.mark.parametrize("metric", ["mae", "mse", "r2"])
def test_without_limits_nothing_can_be_certified(metric):
    labels = np.zeros(10_000, dtype=np.int64)
    assert not Guarantee(MetricBudget(max_drop=0.5), metric=regression(metric)).reachable(labels)
    assert Guarantee(MetricBudget(max_drop=0.5), metric=regression(metric, limits=(0, 10))).reachable(labels)
    assert not Guarantee(MetricBudget(max_drop=0.5), metric=regression("mae", limits=(0, 1e9))).reachable(labels)


def test_copies_of_examples_change_nothing():
    for task in (MEAN, segmentation()):
        one, two = (
            (pixels(0), pixels(0, lost=0.02))
            if task.metric
            else (means(np.linspace(0, 1, 60)), means(np.linspace(0, 0.9, 60)))
        )
        wanted = loss_of(one, two)
        units = np.repeat(np.arange(60), 20)
        before, after = (Outcomes(each.task, each.rows[units], units) for each in (one, two))
        found = loss_of(before, after)
        assert found.drop == pytest.approx(wanted.drop)
        assert found.p_value(0.05) == pytest.approx(wanted.p_value(0.05))
        assert (len(before), before.value) == (60, pytest.approx(one.value))


def test_each_group_counts_the_same_whatever_the_metric():
    rows, units = np.array([[0.0]] * 9 + [[1.0]]), np.array([7] * 9 + [3])
    by_metric = Task("means", MEAN.loss, MEAN.outcome, lambda rows: float(rows.mean()), is_share=True)
    assert Outcomes(MEAN, rows, units).value == Outcomes(by_metric, rows, units).value == 0.5
    assert Outcomes(by_metric, rows, units).each.tolist() == pytest.approx([1.0, 0.0])
