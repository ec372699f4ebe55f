"""Laws of the page of a sweep, and of plots of fronts."""

from __future__ import annotations

import json
import re

from basisprune.report.figures import front_plots
from basisprune.report.html import SweepPage, write_sweep_page
from basisprune.results import FrontPoint


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


def test_the_page_holds_all_and_names_do_no_harm(tmp_path):
    rows = (("<script>alert(1)</script>", "done"),)
    content = {"cells": [1, "</script>"]}
    page = SweepPage("sweep", "1 of 1 cells are done.", ("model", "outcome"), rows, {"cifar10": POINTS}, content)
    text = write_sweep_page(page, tmp_path / "sweep.html").read_text()
    assert "<script>alert" not in text
    assert "front-0-parameters" in text
    assert "front-0-latency_ms" in text
    found = re.search(r'id="result">(.*?)</script>', text, re.DOTALL)
    assert json.loads(found[1]) == {"cells": [1, "</script>"]}
