"""Laws of what a search tries next, on networks whose accuracy is a function of the share kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.errors import ConfigError
from basisprune.method.scoring import Outlook
from basisprune.search import SearchConfig
from basisprune.search.stepping import Attempt, Stepping

ALLOWED = 0.01
HALVING = Stepping(allowed=ALLOWED, step=0.5, tolerance=0.1, smallest=0.02)
limits = st.floats(0.03, 0.95)


def search(stepping: Stepping, drop: Callable[[float], float]) -> list[Attempt]:
    """All attempts of a search on networks that lose `drop(share)`."""
    attempts: list[Attempt] = []
    while (share := stepping.next_share(attempts)) is not None:
        attempts.append(Attempt(share, drop(share), passed=drop(share) <= ALLOWED))
        assert len(attempts) < 50
    return attempts


def smallest(attempts: list[Attempt]) -> float:
    return min((attempt.share for attempt in attempts if attempt.passed), default=1.0)


def foreseeing(limit: float, steepness: float, expected: float) -> Stepping:
    """A search whose scores expect so much of the limit, and whose losses rise with that power of the share."""
    outlook = Outlook.of(lambda share: expected * (limit / share) ** steepness, HALVING.smallest)
    return replace(HALVING, outlook=outlook)


@given(limits, st.floats(2, 8), st.floats(0.005, 0.5), st.floats(0.5, 2))
def test_the_smallest_share_is_found_with_few_attempts_where_the_loss_is_foreseen(limit, steepness, expected, power):
    stepping = foreseeing(limit, steepness, expected)
    attempts = search(stepping, lambda share: ALLOWED * (limit / share) ** (steepness * power))
    assert limit * 0.999 <= smallest(attempts) <= limit / 0.9 * 1.25
    assert len(attempts) <= 8


def test_it_takes_half_as_many_attempts_as_halving():
    counts = {True: 0, False: 0}
    for limit in (0.05, 0.1, 0.2, 0.3, 0.5):
        for expected in (0.02, 0.06, 0.2):
            stepping = foreseeing(limit, 4, expected)

            def drop(share: float, limit: float = limit) -> float:
                return ALLOWED * (limit / share) ** 4

            counts[True] += len(search(stepping, drop))
            counts[False] += len(search(HALVING, drop))
    assert counts[True] <= 0.5 * counts[False]


@given(limits)
def test_both_ways_find_a_cliff(limit):
    def cliff(share: float) -> float:
        return 0.0 if share >= limit else 0.5

    for stepping in (HALVING, foreseeing(limit, 4, 0.06)):
        assert limit <= smallest(search(stepping, cliff)) <= limit / 0.9 * 1.001


RISING = replace(HALVING, outlook=Outlook((1.0, 0.5, 0.25, 0.1), (0.0, 0.1, 0.2, 0.4)))


def test_between_two_attempts_the_loss_grows_with_the_square_of_the_expected_rise():
    passed, failed = Attempt(0.5, -0.01, passed=True), Attempt(0.1, 0.05, passed=False)
    part = (ALLOWED + 0.01) / (0.05 + 0.01)
    rise = (0.1**2 + part * (0.4**2 - 0.1**2)) ** 0.5  # 0.245
    assert RISING.next_share([passed, failed]) == pytest.approx(RISING.outlook.share(rise))


def test_after_a_first_failure_the_expected_rise_is_the_root_of_what_is_too_much():
    failed = Attempt(0.25, 4 * ALLOWED, passed=False)
    assert RISING.next_share([failed]) == pytest.approx(RISING.outlook.share(0.2 / 2))


@pytest.mark.parametrize(
    ("share", "drop", "ends"),
    [(0.3, 0.0101, True), (0.2, 0.0101, False), (0.3, 0.09, False), (0.3, float("inf"), False)],
)
def test_a_search_ends_where_hardly_more_can_go_unless_what_failed_is_far_or_fell_off_a_cliff(share, drop, ends):
    steep = replace(HALVING, tolerance=0.2, outlook=Outlook((1.0, 0.4, 0.39, 0.1), (0.0, 0.1, 0.3, 0.31)))
    attempts = [Attempt(0.4, 0.0099, passed=True), Attempt(share, drop, passed=False)]
    assert (steep.next_share(attempts) is None) == ends


@pytest.mark.parametrize(
    ("sizes", "ends"), [((100, 81), True), ((100, 79), False), ((100, 101), False), ((100, None), False)]
)
def test_a_search_ends_where_what_failed_is_hardly_smaller_although_it_keeps_far_less(sizes, ends):
    passed, failed = Attempt(0.5, 0.0, True, sizes[0]), Attempt(0.1, 0.05, False, sizes[1])
    stepping = replace(RISING, tolerance=0.2)
    assert (stepping.next_share([passed, failed]) is None) == ends


def test_between_what_passed_and_a_cliff_the_middle_is_tried():
    for drop in (0.5, float("inf")):
        attempts = [Attempt(0.4, 0.0, passed=True), Attempt(0.1, drop, passed=False)]
        assert RISING.next_share(attempts) == pytest.approx(0.2)


@given(limits, st.integers(1, 3))
def test_where_several_axes_shrink_together_their_product_is_within_the_tolerance(limit, axes):
    attempts = search(replace(HALVING, axes=axes), lambda share: 0.0 if share >= limit else 0.5)
    assert (limit / smallest(attempts)) ** axes >= 0.9 * 0.999


def test_beyond_what_the_outlook_knows_shares_are_halved():
    short = replace(HALVING, outlook=Outlook((1.0, 0.3), (0.0, 0.01)))
    attempts = search(short, lambda share: 0.0)
    assert [attempt.share for attempt in attempts] == pytest.approx([0.3, 0.15, 0.075, 0.0375, 0.02])


def test_where_all_pass_the_smallest_is_tried_and_where_none_does_the_search_ends():
    for stepping in (HALVING, foreseeing(0.5, 4, 0.06)):
        assert smallest(search(stepping, lambda share: 0.0)) == pytest.approx(stepping.smallest)
        assert smallest(search(stepping, lambda share: 1.0)) == 1.0


@given(st.lists(st.builds(Attempt, st.floats(0.03, 0.99), st.floats(-0.1, 1), st.booleans()), max_size=6), limits)
def test_every_share_is_inside_of_what_is_known(attempts, limit):
    for stepping in (HALVING, foreseeing(limit, 4, 0.06), replace(HALVING, outlook=Outlook((1.0,), (0.0,)))):
        share = stepping.next_share(attempts)
        passed = smallest(attempts)
        failed = max((one.share for one in attempts if not one.passed and one.share < passed), default=0.0)
        assert share is None or max(failed, stepping.smallest * 0.999) <= share <= passed


def test_nothing_is_not_a_way_to_start():
    with pytest.raises(ConfigError, match="warm_start: None given, allowed are True and False"):
        SearchConfig(warm_start=None)


def test_faults_are_listed_all_at_once():
    with pytest.raises(ConfigError, match="5 faults"):
        SearchConfig(framework="tailor", step=1, tolerance=0, smallest=1, give_up_margin=0)
