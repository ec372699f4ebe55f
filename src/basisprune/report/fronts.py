"""The results of a sweep -> one self-contained HTML file with their Pareto fronts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from pydantic import JsonValue

from basisprune.files import write_text
from basisprune.report import html
from basisprune.report.figures import FONT, PALETTE, front_plots, graph_objects
from basisprune.results import FrontPoint


@dataclass(frozen=True)
class Front:
    """The networks of one front, which are compared with each other, such as all those for one dataset."""

    title: str
    points: tuple[FrontPoint, ...]


@dataclass(frozen=True)
class SweepPage:
    """What is on the page of a sweep: a table, its fronts, and the same as JSON."""

    title: str
    said: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    fronts: tuple[Front, ...]
    data: Mapping[str, JsonValue]


def write_sweep_page(page: SweepPage, path: Path) -> Path:
    """The path of the page: one HTML file that needs no network. Raises MissingExtraError without plotly or jinja2."""
    graph_objects()  # fail before any work
    plots = {front.title: front_plots(front.points, f"front-{place}") for place, front in enumerate(page.fronts)}
    text: str = (
        html.environment()
        .get_template("sweep.html")
        .render(
            page=page,
            plots=plots,
            figures={plot.key: plot.figure for group in plots.values() for plot in group},
            palette=PALETTE,
            font=FONT,
            plotly=resources.files(__package__).joinpath("templates/plotly-basic.min.js").read_text(encoding="utf-8"),
        )
    )
    write_text(path, text)
    return path
