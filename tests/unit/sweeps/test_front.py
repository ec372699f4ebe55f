"""Laws of fronts: what nothing beats is on them, and nothing else."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from basisprune.results import FrontPoint
from basisprune.sweeps.front import with_front

points = st.builds(
    lambda accuracy, size, ms: FrontPoint("a", "", accuracy / 10, (0.0, 1.0), size, 1, float(ms)),
    st.integers(0, 10),
    st.integers(1, 10),
    st.integers(1, 10),
)


def beats(one: FrontPoint, other: FrontPoint) -> bool:
    pairs = [(one.accuracy, other.accuracy), (other.parameters, one.parameters), (other.latency_ms, one.latency_ms)]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


@given(st.lists(points, min_size=1, max_size=12))
def test_a_point_is_on_the_front_unless_another_beats_it(given_points):
    found = with_front(given_points)
    for point in found:
        beaten = any(beats(other, point) for other in found)
        assert not (beaten and point.front)
        same = [other for other in found if replace(other, front=point.front) == point]
        assert beaten or sum(other.front for other in same) == 1  # of equal ones, one is shown


def test_milliseconds_that_are_not_known_do_not_count():
    large = FrontPoint("a", "", 0.9, (0.0, 1.0), 100, 1, 1.0)
    fast = FrontPoint("b", "", 0.8, (0.0, 1.0), 200, 1, None)
    assert [point.front for point in with_front([large, fast])] == [True, False]
    assert [point.front for point in with_front([large, replace(fast, latency_ms=0.5)])] == [True, True]
