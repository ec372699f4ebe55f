"""What planning by time gains at the same accuracy, from made-up networks."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from frontier import gain  # a benchmark


def network(accuracy: float, speedup: float) -> dict[str, float]:
    return {"accuracy": accuracy, "speedup": speedup}


@pytest.mark.parametrize(
    ("accuracy", "speedup", "expected"),
    [(0.85, 1.5, 1.0), (0.9, 1.0, 1.0), (0.825, 1.0, 1.75), (0.8, 1.0, 2.0)],
)
def test_a_gain_is_interpolated_between_networks_that_no_other_beats(accuracy, speedup, expected):
    front = [network(0.9, 1.0), network(0.8, 2.0), network(0.79, 1.9)]
    assert gain(network(accuracy, speedup), front) == pytest.approx(expected)


@pytest.mark.parametrize("accuracy", [0.1, 0.75, 0.91])
def test_there_is_no_gain_for_guesses_nor_beyond_what_was_measured(accuracy):
    assert gain(network(accuracy, 1.0), [network(0.9, 1.0), network(0.8, 2.0)]) is None
