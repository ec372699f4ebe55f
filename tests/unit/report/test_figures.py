"""Laws of the figures: what they draw, in which colours, and what they leave out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from plotly import graph_objects
from summaries import sample, summary

from basisprune.report.figures import (
    PALETTE,
    error_plot,
    front_plots,
    importance_plots,
    layer_plot,
    search_plots,
    training_plots,
)
from basisprune.results import Errors, FrontPoint, LayerImportance


def test_plotly_knows_every_property_of_the_figures():
    result = summary()
    plots = [*search_plots(result), *training_plots(result), *importance_plots(result.importance)]
    for plot in [*plots, layer_plot(result.layers), error_plot(Errors("test", (1.0, 2.0), (0.5, 3.0)))]:
        assert graph_objects.Figure(plot.figure).to_plotly_json()["data"]


@pytest.mark.parametrize(
    ("kind", "value", "drawn"),
    [
        ("max_drop", 0.02, {"parameters": 0.958, "macs": 0.958, "latency_ms": 0.958}),
        ("min_accuracy", 0.95, {"parameters": 0.95, "macs": 0.95, "latency_ms": 0.95}),
        ("target_params", 2e6, {"parameters": 2e6}),
        ("target_macs", 1e9, {"macs": 1e9}),
        ("target_latency", 0.8, {"latency_ms": 0.8}),
        ("fixed", None, {}),
    ],
)
def test_every_budget_is_drawn_where_it_limits(kind, value, drawn):
    end = "y0" if kind in ("max_drop", "min_accuracy") else "x0"
    plots = search_plots(summary(budget={"kind": kind, "value": value}))
    lines = {
        plot.key.removeprefix("search-"): line[end]
        for plot in plots
        for line in plot.figure["layout"].get("shapes", [])
    }
    assert lines == pytest.approx(drawn)
    assert len(plots) == 3
    for plot in plots:
        layout = plot.figure["layout"]
        assert layout["xaxis"]["type"] == "log"
        assert layout["xaxis"]["title"]["text"]
        assert layout["yaxis"]["title"]["text"] == "accuracy"
        places = [note["x"] if end == "x0" else note["y"] for note in layout.get("annotations", [])]
        lined = [line[end] for line in layout.get("shapes", [])]
        assert places == pytest.approx([math.log10(each) if end == "x0" else each for each in lined])


def test_curves_of_one_epoch_are_seen():
    rows = [replace(each, history=each.history[:1]) for each in summary().candidates]
    for plot in training_plots(replace(summary(), candidates=tuple(rows))):
        assert {trace["mode"] for trace in plot.figure["data"]} == {"lines+markers"}


def test_layers_show_the_ranks_and_channels_they_keep():
    ranks, channels = layer_plot(summary().layers).figure["data"]
    assert (ranks["name"], channels["name"]) == ("ranks kept", "channels kept")
    assert len(channels["x"]) == 8
    assert channels["y"] == [0.5] * 8
    assert len(ranks["x"]) == 7  # one is not split
    unknown = [replace(each, channels=None) for each in summary().layers]
    assert layer_plot(unknown).title == "Share of ranks kept"


def test_a_hopeless_candidate_does_not_squeeze_the_others():
    result = sample()
    result["candidates"][-1].update(accuracy=0.11, interval=[0.09, 0.13])
    plot = search_plots(summary(candidates=result["candidates"]))[0]
    assert plot.figure["layout"]["yaxis"]["range"][0] > 0.9
    assert plot.note.startswith("Not shown: 1 ")


def test_each_colour_of_the_light_theme_has_one_counterpart():
    lights = [pair[0] for pair in PALETTE.values()]
    assert len(set(lights)) == len(lights)


def test_what_was_not_measured_is_not_drawn():
    keys = [plot.key for plot in search_plots(summary())]
    assert keys == ["search-parameters", "search-macs", "search-latency_ms"]  # no candidate has a file
    assert layer_plot([]) is None
    assert importance_plots({}) == []
    untrained = tuple(replace(each, history=()) for each in summary().candidates)
    assert training_plots(replace(summary(), candidates=untrained)) == []


def test_importance_is_drawn_by_its_maximum_whatever_its_sign_and_gaps_stay_gaps():
    values = {
        "conv": LayerImportance(scales=(1.0, None), taylor=(-4.0, 1.0, None)),
        "dead": LayerImportance(scales=(0.0,), taylor=(0.0,)),
    }
    drawn = [[trace["y"] for trace in plot.figure["data"]] for plot in importance_plots(values)]
    assert drawn == [[[-1.0, 0.25, None], [1.0, None]], [[0.0], [0.0]]]


def point(group: str, accuracy: float, parameters: int, ms: float | None = 1.0, **more: bool) -> FrontPoint:
    return FrontPoint(group, "50% of the filters", accuracy, (0.0, 1.0), parameters, 1000, ms, **more)


POINTS = (
    point("a", 0.9, 100, 2.0, front=True, chosen=True),
    point("a", 0.7, 120, 3.0),
    point("<b>", 0.8, 10, 1.0, front=True),
)


def test_every_network_is_a_mark_of_its_group_and_the_line_goes_through_the_best():
    by_size, by_time = front_plots(POINTS)
    line, first, second = by_size.figure["data"]
    assert (line["x"], line["y"]) == ([10, 100], [0.8, 0.9])
    assert [first["name"], second["name"]] == ["a", "&lt;b&gt;"]  # plotly reads names as HTML
    assert first["marker"]["symbol"] == ["circle", "circle-open"]
    assert first["marker"]["size"][0] > first["marker"]["size"][1]
    assert by_time.figure["data"][1]["x"] == [2.0, 3.0]


def test_without_milliseconds_there_is_no_plot_of_them():
    assert len(front_plots([point("a", 0.9, 100, None), point("b", 0.8, 10, None)])) == 1
    assert front_plots(POINTS[:1]) == []
