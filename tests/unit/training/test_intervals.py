"""Laws of the intervals and tests of accuracies and of what is lost of them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from basisprune.training.intervals import Paired, lower_accuracy, tail, wilson_interval

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
    assert tail(hits, count, share) == pytest.approx(stats.binom.sf(hits - 1, count, share), abs=1e-9)
    if hits:
        bound = lower_accuracy(hits, count, 0.9)
        assert bound == pytest.approx(stats.beta.ppf(0.1, hits, count - hits + 1), abs=1e-6)


def test_no_hit_is_no_evidence_and_certainty_needs_all():
    assert tail(0, 10, 0.5) == 1.0
    assert tail(1, 10, 0.0) == 0.0
    assert tail(10, 10, 1.0) == 1.0
