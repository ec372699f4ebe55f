"""Laws of the figures: what they draw, in which colours, and what they leave out."""

from __future__ import annotations

import pytest
from summaries import sample

from basisprune.report.figures import PALETTE, search_plots, target_of


@pytest.mark.parametrize(
    ("kind", "value", "target"),
    [
        ("max_drop", 0.02, ("accuracy", 0.958)),
        ("min_accuracy", 0.95, ("accuracy", 0.95)),
        ("target_params", 0.5, ("parameters", 5_585_000)),
        ("target_params", 2e6, ("parameters", 2e6)),
        ("target_macs", 1e9, ("macs", 1e9)),
        ("target_latency", 0.8, ("latency_ms", 0.8)),
        ("fixed", 0.5, None),
    ],
)
def test_every_budget_is_drawn(kind, value, target):
    result = {**sample(), "budget": {"kind": kind, "value": value}}
    assert target_of(result["budget"], result["reference"]) == (target and (target[0], pytest.approx(target[1])))
    lines = sum(len(plot.figure["layout"].get("shapes", [])) for plot in search_plots(result))
    assert lines == (0 if target is None else 3 if target[0] == "accuracy" else 1)


def test_a_hopeless_candidate_does_not_squeeze_the_others():
    result = sample()
    result["candidates"][-1].update(accuracy=0.11, interval=[0.09, 0.13])
    plot = search_plots(result)[0]
    assert plot.figure["layout"]["yaxis"]["range"][0] > 0.9
    assert plot.note.startswith("Not shown: 1 ")


def test_each_colour_of_the_light_theme_has_one_counterpart():
    lights = [pair[0] for pair in PALETTE.values()]
    assert len(set(lights)) == len(lights)
