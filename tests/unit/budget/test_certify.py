"""Laws of the promise: what is tested, in which order, and each way in which that ends."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from basisprune.budget import Budget
from basisprune.budget.certify import (
    LIKELY,
    AcceptanceRule,
    Entry,
    Guarantee,
    Test,
    certifiable,
    certify,
    images_needed,
    in_order,
)
from basisprune.budget.proportions import Paired
from basisprune.errors import ConfigError
from basisprune.tasks import Predictions

IMAGES = 1000
DROP = Guarantee(Budget(max_drop=0.01))


def answers(right: int, images: int = IMAGES, labels=None) -> Predictions:
    """A network that gets the first so many images right."""
    labels = np.zeros(images, dtype=np.int64) if labels is None else labels
    hits = np.arange(len(labels)) < right
    return Predictions(np.where(hits, labels, labels + 1), np.ones(len(labels)), labels)


def certificate_of(promise: Guarantee, before: int, rights: dict[int, int]):
    """The certificate of candidates with so many images right, and which of them were asked for their answers."""
    asked: list[int] = []

    def said(index: int) -> Predictions:
        asked.append(index)
        return answers(rights[index])

    def test(index: int) -> Test:
        return promise.test(index, f"rung {index}", answers(before), said(index))

    return certify(promise, IMAGES, list(rights), test), asked


def test_all_may_pass_and_the_last_is_delivered():
    certificate, asked = certificate_of(DROP, 900, {4: 900, 2: 899, 7: 898})
    assert (certificate.status, certificate.delivered.index, asked) == ("certified", 7, [4, 2, 7])
    assert [test.passed for test in certificate.tests] == [True] * 3
    assert (certificate.images, certificate.confidence, certificate.metric) == (IMAGES, 0.95, "accuracy")
    assert (certificate.tests[1].lost, certificate.tests[1].won, certificate.tests[1].name) == (1, 0, "rung 2")


def test_the_first_failure_ends_it_and_the_last_that_passed_is_delivered():
    certificate, asked = certificate_of(DROP, 900, {1: 900, 2: 850, 3: 900})
    assert (certificate.delivered.index, asked) == (1, [1, 2])
    assert [test.passed for test in certificate.tests] == [True, False]
    assert certificate.certified


def test_where_the_first_fails_nothing_is_certified_and_the_reason_is_told():
    certificate, asked = certificate_of(DROP, 900, {1: 880, 2: 900})
    assert (certificate.status, certificate.delivered, asked) == ("estimated", None, [1])
    assert "loses 2.0 points of accuracy, and the true loss may be up to 2.9" in certificate.reason


def test_nothing_to_test_is_nothing_certified():
    certificate, _ = certificate_of(DROP, 900, {})
    assert (certificate.status, certificate.tests) == ("estimated", ())
    assert certificate.reason


def test_a_least_accuracy_is_certified_by_the_exact_test():
    promise = Guarantee(Budget(min_accuracy=0.9))
    certificate, _ = certificate_of(promise, 1000, {1: 960, 2: 921, 3: 910})
    assert [test.passed for test in certificate.tests] == [True, True, False]
    assert certificate.tests[1].bound == pytest.approx(0.9055, abs=1e-3)
    certificate, _ = certificate_of(promise, 1000, {1: 910})
    assert "its accuracy is 91.0%, and the true one may be as low as" in certificate.reason


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 60), st.integers(0, 60), st.floats(0.5, 0.99), st.floats(0.001, 0.1))
def test_a_test_passes_where_its_bound_is_within_the_budget(lost, won, confidence, drop):
    promise, pair = Guarantee(Budget(max_drop=drop), confidence), Paired(lost, won, 800)
    bound = pair.upper(confidence)
    if abs(bound - drop) > 1e-9:
        assert promise.keeps(pair) == (bound <= drop)


def test_a_rare_class_that_is_never_named_breaks_what_is_counted_by_class():
    labels = np.array([0] * 950 + [1] * 50)
    perfect, blind = answers(1000, labels=labels), answers(950, labels=labels)
    budget = Budget(max_drop=0.07)
    assert Guarantee(budget).keeps(Guarantee(budget).evidence(perfect, blind))
    for metric in ("balanced", "macro-f1", "worst-class"):
        promise = Guarantee(budget, metric=metric)
        test = promise.test(1, "blind", perfect, blind)
        assert not test.passed
        assert (test.lost, test.won) == (50, 0)
        assert test.before - test.after > 0.4


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), max_size=12))
def test_the_order_is_from_large_to_small_and_from_likely_to_unlikely(given_entries):
    entries = [Entry(index, size, chance) for index, (size, chance) in enumerate(given_entries)]
    order = [entries[index] for index in in_order(entries)]
    for larger, smaller in pairwise(order):
        assert larger.size > smaller.size
        assert larger.chance > smaller.chance
    left_out = [entry for entry in entries if entry not in order]
    for entry in left_out:
        assert any(o.size <= entry.size and o.chance >= entry.chance for o in order)


def test_the_chance_is_one_half_where_the_bound_on_as_many_images_is_the_budget():
    pair = Paired(10, 6, 1000)
    promise = Guarantee(Budget(max_drop=pair.upper(0.95)))
    assert promise.chance(pair, 1000, 1000) == pytest.approx(0.5, abs=1e-6)
    assert promise.chance(pair, 1000, 4000) > 0.5 > promise.chance(pair, 1000, 300)


def test_the_chance_is_what_happens():
    """Searches and tests of networks of which the true loss is known."""
    random = np.random.default_rng(0)
    chances, passed = [], []
    for _ in range(2000):
        share = random.uniform(0.0, 0.02)
        seen, other = (random.multinomial(1000, [0.01 + share, 0.01, 0.98 - share]) for _ in range(2))
        pair = Paired(int(seen[0]), int(seen[1]), 1000)
        chances.append(DROP.chance(pair, 1000, 1000))
        passed.append(DROP.keeps(Paired(int(other[0]), int(other[1]), 1000)))
    assert np.mean(chances) == pytest.approx(np.mean(passed), abs=0.07)


def test_the_search_asks_for_a_margin_where_images_confirm_and_for_the_estimate_where_none_do():
    before, close = answers(900), answers(892)
    assert AcceptanceRule(DROP).passes(before, close)
    assert AcceptanceRule(DROP).chance(before, close) is None
    assert not AcceptanceRule(DROP, 1000).passes(before, close)
    assert AcceptanceRule(DROP, 1000).within(before, close)
    assert AcceptanceRule(DROP, 1000).passes(before, answers(899))
    assert AcceptanceRule(DROP, 1000).chance(before, answers(899)) > LIKELY


@pytest.mark.parametrize(
    ("promise", "images", "reachable"),
    [
        (DROP, 267, False),
        (DROP, 269, True),
        (Guarantee(Budget(max_drop=0.01), 0.8), 100, True),
        (Guarantee(Budget(max_drop=0.0)), 100_000, False),
        (Guarantee(Budget(min_accuracy=0.99)), 200, False),
        (Guarantee(Budget(min_accuracy=0.99)), 400, True),
        (Guarantee(Budget(max_drop=0.05), metric="balanced"), 20, False),
        (Guarantee(Budget(max_drop=0.05), metric="balanced"), 600, True),
    ],
)
def test_too_few_images_are_too_few_for_any_network(promise, images, reachable):
    assert promise.reachable(np.arange(images) % 2) == reachable


def test_a_function_that_is_not_made_for_perfect_answers_does_not_stand_in_the_way():
    promise = Guarantee(Budget(max_drop=0.05), metric=lambda labels, answers: math.nan)
    assert promise.reachable(np.arange(10) % 2)


@given(st.integers(50, 5000), st.floats(0.0, 0.2))
def test_more_images_certify_less_loss(images, differing):
    assert certifiable(2 * images, differing) <= certifiable(images, differing) + 1e-12
    assert certifiable(images, differing, 0.8) < certifiable(images, differing)


@settings(deadline=None, max_examples=20)
@given(st.floats(0.003, 0.1), st.floats(0.0, 0.2))
def test_the_images_needed_certify_the_loss(drop, differing):
    needed = images_needed(drop, differing)
    assert certifiable(needed, differing) < drop
    half = images_needed(drop, differing, power=0.5)
    assert certifiable(half, differing) <= drop < certifiable(half - 1, differing) or half == 1


def test_faults_are_listed_all_at_once():
    with pytest.raises(ConfigError, match="2 faults"):
        Guarantee(Budget(max_drop=0.01), confidence=0.2, metric="f1")
