"""Laws of the tests and intervals of accuracies, of the worst class, and of what is lost of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from basisprune.budget.metrics import value_of
from basisprune.budget.proportions import Hits, Paired, WorstLoss, wilson_interval
from basisprune.tasks import Predictions

COUNTS = st.integers(1, 400).flatmap(
    lambda images: st.tuples(st.integers(0, images), st.integers(0, images), st.just(images)).filter(
        lambda pair: pair[0] + pair[1] <= pair[2]
    )
)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 500), st.data())
def test_wilsons_interval_is_scipys(count, data):
    hits = data.draw(st.integers(0, count))
    expected = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert wilson_interval(hits, count) == pytest.approx((expected.low, expected.high), abs=1e-6)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=200))
def test_the_drop_lies_in_its_interval_and_turns_round_with_the_order(pairs):
    before, after = (np.array(column) for column in zip(*pairs, strict=True))
    pair, turned = Paired.of(before, after), Paired.of(after, before)
    low, high = pair.interval()
    assert low <= pair.drop <= high
    assert pair.drop == pytest.approx(before.mean() - after.mean())
    assert turned.interval() == pytest.approx((-high, -low), abs=1e-9)
    assert turned.score(-0.1) == pytest.approx(-pair.score(0.1))


def test_no_change_at_all_is_no_certainty():
    low, high = Paired(0, 0, 50).interval()
    assert low < -0.05 < 0.05 < high


@pytest.mark.parametrize(
    ("lost", "won", "images", "confidence", "expected"),
    [  # what R's PropCIs::scoreci.mp gives, which estimates the difference the other way round
        (60, 20, 1000, 0.95, (0.0231, 0.0584)),
        (20, 60, 1000, 0.95, (-0.0584, -0.0231)),
        (28, 25, 618, 0.9, (-0.0148, 0.0247)),
        (48, 41, 549, 0.9, (-0.0157, 0.0414)),
    ],
)
def test_published_intervals_come_out(lost, won, images, confidence, expected):
    assert Paired(lost, won, images).interval(confidence) == pytest.approx(expected, abs=6e-5)


@settings(deadline=None, max_examples=40)
@given(COUNTS, st.floats(-0.9, 0.9))
def test_the_variance_is_that_of_the_most_likely_shares_under_the_hypothesis(counts, margin):
    lost, won, images = counts
    same = images - lost - won

    def unlikely(share: float) -> float:
        shares = np.array([share + margin, share, 1 - 2 * share - margin])
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.where(np.array([lost, won, same]) > 0, np.array([lost, won, same]) * np.log(shares), 0.0)
        return -float(logs.sum()) if np.isfinite(logs).all() else 1e12

    ends = max(0.0, -margin), (1 - margin) / 2
    best = optimize.minimize_scalar(unlikely, bounds=ends, method="bounded", options={"xatol": 1e-12}).x
    candidates = [best, *ends]
    likely = min(candidates, key=unlikely)
    assert Paired(lost, won, images)._won_if(margin) == pytest.approx(likely, abs=1e-4)


@settings(deadline=None, max_examples=50)
@given(COUNTS, st.floats(0.001, 0.3))
def test_more_lost_is_worse_and_more_won_is_better(counts, margin):
    lost, won, images = counts
    pair = Paired(lost, won, images)
    if lost + won < images:
        assert Paired(lost + 1, won, images).p_value(margin) >= pair.p_value(margin) - 1e-12
        assert Paired(lost, won + 1, images).p_value(margin) <= pair.p_value(margin) + 1e-12
    assert pair.p_value(margin + 0.1) <= pair.p_value(margin) + 1e-12


@settings(deadline=None, max_examples=50)
@given(COUNTS, st.floats(0.5, 0.99), st.floats(0.001, 0.5))
def test_the_bound_is_where_the_test_begins_to_pass(counts, confidence, margin):
    pair = Paired(*counts)
    bound = pair.upper(confidence)
    if abs(bound - margin) > 1e-6:
        assert (pair.p_value(margin) < 1 - confidence) == (bound < margin)


@settings(deadline=None, max_examples=50)
@given(COUNTS)
def test_at_a_margin_of_zero_it_is_mcnemars_test(counts):
    lost, won, images = counts
    if lost + won:
        assert Paired(lost, won, images).score(0.0) == pytest.approx((lost - won) / np.sqrt(lost + won))


@pytest.mark.parametrize(("images", "margin"), [(120, 0.05), (400, 0.02)])
@pytest.mark.parametrize("won", [0.0, 0.01, 0.04])
def test_a_network_at_the_limit_passes_in_one_of_twenty_cases(images, margin, won):
    """Exact: over all counts, by their probability."""
    level = 0.0
    for wins in range(int(stats.binom.ppf(1 - 1e-7, images, won)) + 1 if won else 1):
        passing = [lost for lost in range(images - wins + 1) if Paired(lost, wins, images).p_value(margin) <= 0.05]
        if passing:
            chance = stats.binom.cdf(max(passing), images - wins, (won + margin) / (1 - won))
            level += stats.binom.pmf(wins, images, won) * chance
    assert 0.005 < level < 0.065


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 300), st.data())
def test_the_test_of_an_accuracy_is_exact(count, data):
    hits, share = data.draw(st.integers(0, count)), data.draw(st.floats(0.01, 0.99))
    assert Hits(((hits, count),)).p_value(-share) == pytest.approx(stats.binom.sf(hits - 1, count, share), abs=1e-9)
    if hits:
        bound = -Hits(((hits, count),)).upper(0.9)
        assert bound == pytest.approx(stats.beta.ppf(0.1, hits, count - hits + 1), abs=1e-6)


def test_no_hit_is_no_evidence_and_certainty_needs_all():
    for hits, share, chance in ((0, 0.5, 1.0), (1, 0.0, 0.0), (10, 1.0, 1.0), (9, 0.5, 11 / 1024)):
        assert Hits(((hits, 10),)).p_value(-share) == pytest.approx(chance)


def answers(right: dict[int, int], sizes: tuple[int, ...]) -> Predictions:
    """A network that gets the first so many images of each class right."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    place = np.concatenate([np.arange(size) for size in sizes])
    hits = place < np.array([right.get(label, size) for label, size in enumerate(sizes)])[labels]
    return Predictions(np.where(hits, labels, (labels + 1) % len(sizes)), np.ones(len(labels)), labels)


def test_the_loss_is_that_of_the_metric_whichever_class_is_the_worst():
    before, after = answers({0: 60}, (100, 100)), answers({0: 60, 1: 50}, (100, 100))
    assert WorstLoss.of(before, after).drop == pytest.approx(0.1)
    assert Hits.of(after, by_class=True).drop == pytest.approx(-0.5)
    assert WorstLoss.of(before, after).drop == pytest.approx(value_of("worst-class", before) - 0.5)


def test_of_one_class_it_is_its_own_loss():
    before, after = answers({0: 95}, (100,)), answers({0: 92}, (100,))
    own = Paired.of(before.hits, after.hits)
    assert WorstLoss.of(before, after).p_value(0.1) == pytest.approx(own.p_value(0.1) / 0.9)


def test_a_class_that_is_clearly_better_than_the_worst_was_may_lose_more():
    sizes = (300, 300)
    before = answers({0: 150}, sizes)
    assert WorstLoss.of(before, answers({0: 150, 1: 240}, sizes)).p_value(0.05) < 0.05
    assert WorstLoss.of(before, answers({0: 150, 1: 150}, sizes)).p_value(0.05) > 0.05
    assert WorstLoss.of(before, answers({0: 120}, sizes)).p_value(0.05) > 0.9


def test_a_class_of_few_images_is_no_proof():
    before = answers({}, (500, 12))
    found = WorstLoss.of(before, before)
    assert found.p_value(0.05) > 0.05
    low, high = found.interval()
    assert low < 0 < high
    assert found.upper(0.95) > 0.1


def test_more_images_are_expected_to_show_more():
    before, after = answers({0: 80}, (100, 100)), answers({0: 79}, (100, 100))
    found = WorstLoss.of(before, after)
    assert found.expected_score(0.05, 4.0) < found.expected_score(0.05, 1.0) < 0
    least = Hits.of(after, by_class=True)
    assert least.expected_score(-0.7, 4.0) < least.expected_score(-0.7, 1.0) < 0


def test_a_least_accuracy_is_that_of_every_class():
    found = Hits.of(answers({0: 95, 1: 19}, (100, 20)), by_class=True)
    assert found.upper(0.95) == pytest.approx(Hits(((19, 20),)).upper(0.95))
    assert found.p_value(found.upper(0.95)) == pytest.approx(0.05)
    low, high = found.interval()
    assert low < found.drop < high


@pytest.mark.parametrize(
    ("sizes", "lost"), [((100, 100, 100, 100), (0.1, 0, 0, 0)), ((100, 100, 25), (0, 0, 0.2)), ((60, 60), (0.1, 0.1))]
)
def test_a_network_at_the_limit_passes_in_at_most_one_of_twenty_cases(sizes, lost):
    """All classes are equally good before, so that the worst of the images is an unlucky one."""
    random, passed = np.random.default_rng(0), []
    labels = np.repeat(np.arange(len(sizes)), sizes)
    for _ in range(600):
        kinds = random.random(len(labels))
        one, two = kinds < 0.9, (kinds < 0.9) & (kinds >= np.array(lost)[labels])
        before, after = (
            Predictions(np.where(hits, labels, (labels + 1) % len(sizes)), np.ones(len(labels)), labels)
            for hits in (one, two)
        )
        passed.append(WorstLoss.of(before, after).p_value(max(lost)) <= 0.05)
    assert np.mean(passed) <= 0.075  # 30 of 600 are expected at most; 46 or more would come once in 300


def exact_level(images: int, lost: float, won: float) -> float:
    """How often the test passes a network that loses exactly the budget, summed over all outcomes."""
    total = 0.0
    for losses in np.arange(images + 1)[stats.binom.pmf(np.arange(images + 1), images, lost) > 1e-9]:
        wins = 0
        while wins <= images - losses and Paired(losses, wins, images).p_value(lost - won) > 0.05:
            wins += 1
        passes = stats.binom.sf(wins - 1, images - losses, won / (1 - lost))
        total += stats.binom.pmf(losses, images, lost) * passes
    return float(total)


@pytest.mark.parametrize(
    ("images", "lost", "won", "expected"),
    [(252, 0.03, 0.0, 0.0543), (200, 0.03, 0.0, 0.0593), (252, 0.06, 0.03, 0.0498), (100, 0.05, 0.02, 0.0408)],
)
def test_how_often_tangos_score_passes_at_the_limit(images, lost, won, expected):
    assert exact_level(images, lost, won) == pytest.approx(expected, abs=5e-4)
