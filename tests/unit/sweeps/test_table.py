"""Laws of the rows of a sweep, and of their Pareto fronts."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from basisprune.results import FrontPoint
from basisprune.sweeps.table import HEADER, SweepRow, as_cells, as_csv, as_text, fronts_of, pareto_front

DONE = SweepRow(
    "resnet18", "birds", "basis", 0, "done", attempts=1, accuracy_before=0.9, accuracy=0.89, interval=(0.8, 0.95),
    parameters_before=1_000_000, parameters=250_000, macs_before=10, macs=5, ms=2.0, kept_to_budget=True,
    certified=True,
)  # fmt: skip
FAILED = SweepRow("resnet50", "birds", "basis", 0, "failed", "no memory\nat all", attempts=3)


def test_each_row_tells_what_became_of_it():
    done, failed = as_cells([DONE, FAILED])
    assert len(done) == len(failed) == len(HEADER)
    assert done[4:6] == ("90.0% > 89.0%", "1.00M > 250k")
    assert (done[-1], failed[-1]) == ("certified", "failed: no memory")
    assert "resnet50" in as_text([DONE, FAILED])


def test_a_table_of_all_values_is_read_back():
    first, second = csv.DictReader(io.StringIO(as_csv([DONE, FAILED])))
    assert (first["parameters"], first["interval"], second["error"]) == ("250000", "0.8 0.95", "no memory\\nat all")


def test_the_front_of_a_dataset_has_its_cells_that_are_done():
    other = SweepRow("resnet18", "cats", "l1", 1, "done", accuracy=0.5, parameters=5, macs=5)
    points = fronts_of([DONE, FAILED, other])
    assert {name: [point.name for point in found] for name, found in points.items()} == {
        "birds": ["basis, seed 0"],
        "cats": ["l1, seed 1"],
    }


POINTS = st.builds(
    lambda accuracy, size, ms: FrontPoint("a", "", accuracy / 10, (0.0, 1.0), size, 1, float(ms)),
    st.integers(0, 10),
    st.integers(1, 10),
    st.integers(1, 10),
)


def beats(one: FrontPoint, other: FrontPoint) -> bool:
    pairs = [(one.accuracy, other.accuracy), (other.parameters, one.parameters), (other.latency_ms, one.latency_ms)]
    return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)


@given(st.lists(POINTS, min_size=1, max_size=12))
def test_a_point_is_on_the_front_unless_another_beats_it(given_points):
    found = pareto_front(given_points)
    for point in found:
        beaten = any(beats(other, point) for other in found)
        assert not (beaten and point.front)
        same = [other for other in found if replace(other, front=point.front) == point]
        assert beaten or sum(other.front for other in same) == 1  # of equal ones, one is shown


def test_milliseconds_that_are_not_known_do_not_count():
    large = FrontPoint("a", "", 0.9, (0.0, 1.0), 100, 1, 1.0)
    fast = FrontPoint("b", "", 0.8, (0.0, 1.0), 200, 1, None)
    assert [point.front for point in pareto_front([large, fast])] == [True, False]
    assert [point.front for point in pareto_front([large, replace(fast, latency_ms=0.5)])] == [True, True]
