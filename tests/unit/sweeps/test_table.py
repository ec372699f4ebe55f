"""Laws of the rows of a sweep."""

from __future__ import annotations

import csv
import io

from basisprune.sweeps.table import HEADER, SweepRow, as_cells, as_csv, as_text, points_of

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
    points = points_of([DONE, FAILED, other])
    assert {name: [point.name for point in found] for name, found in points.items()} == {
        "birds": ["basis, seed 0"],
        "cats": ["l1, seed 1"],
    }
