"""A result's numbers -> plotly figures, as plain data for the page to draw."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

from basisprune.costs import LayerReport
from basisprune.errors import MissingExtraError
from basisprune.results import CandidateRow, Errors, FrontPoint, LayerImportance, RunSummary, Side

Trace: TypeAlias = dict[str, object]
"""A trace in plotly's format."""

# Each colour in the light and in the dark theme. Figures contain the light ones; the dark page swaps them.
PALETTE: dict[str, tuple[str, str]] = {
    "paper": ("#faf9f6", "#131416"),
    "card": ("#ffffff", "#1b1c1f"),
    "ink": ("#1f1e1b", "#e9e7e2"),
    "muted": ("#6a675f", "#a19e97"),
    "faint": ("#b9b5ab", "#5d5c60"),
    "line": ("#e6e2d9", "#2e2f33"),
    "accent": ("#0d7a70", "#4ccdbb"),
    "soft": ("#dcecea", "#173f3b"),
    "red": ("#c4453c", "#f0857c"),
    "blue": ("#2f6db3", "#78b0ea"),
}
FONT = "Inter, ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
COSTS = {"parameters": "parameters", "macs": "multiply-adds", "latency_ms": "latency", "bytes": "file size"}
_FRONT_AXES = {"parameters": "parameters", "latency_ms": "milliseconds for one image"}
_FRONT_COLOURS = ("accent", "blue", "red", "ink", "muted")
_FRONT_SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross")
_MARKERS = {
    "failed": {"symbol": "x-thin", "size": 7, "color": "faint", "line": 1.5},
    "undecided": {"symbol": "circle-open", "size": 9, "color": "muted", "line": 1.5},
    "passed": {"symbol": "circle", "size": 8, "color": "muted", "line": 0},
    "reference": {"symbol": "diamond", "size": 11, "color": "ink", "line": 0},
    "chosen": {"symbol": "circle", "size": 14, "color": "accent", "line": 0},
}


@dataclass(frozen=True)
class Plot:
    """One figure of a page; `alt` describes it in words, `note` says what it does not show."""

    key: str
    title: str
    alt: str
    figure: dict[str, Any]
    note: str = ""

    @property
    def height(self) -> int:
        """Its height in pixels."""
        return int(self.figure["layout"]["height"])


def light(name: str) -> str:
    """The colour of that name in the light theme.

    >>> light("card")
    '#ffffff'
    """
    return PALETTE[name][0]


@dataclass(frozen=True)
class Point:
    """A network in a plot of accuracy against costs."""

    name: str
    status: str
    network: Side | CandidateRow

    def cost(self, name: str) -> float | None:
        """What it costs, or None if that was not measured."""
        value: float | None = getattr(self.network, name, None)
        return value


def search_plots(summary: RunSummary) -> list[Plot]:
    """Accuracy of every candidate against each measured cost, with error bars."""
    points = [Point("unpruned", "reference", summary.reference)]
    points += [Point(candidate.name, candidate.status, candidate) for candidate in summary.candidates]
    limited, bound = summary.budget.quantity, summary.budget.bound(summary.reference.accuracy)
    least = 0.0 if summary.metric_is_share else -math.inf
    low, high, below = _accuracy_range(points, bound if limited == "accuracy" else None, least)
    share, name = summary.metric_is_share, summary.metric
    note = f"Not shown: {below} below {format(low, '.0%' if share else '.4g')}; the table lists all." if below else ""
    plots = []
    for cost, label in COSTS.items():
        measured = [point for point in points if point.cost(cost) is not None]
        if len(measured) < 2:
            continue
        figure = _figure([_points(status, measured, cost, summary) for status in _MARKERS], height=320)
        figure.update_xaxes(
            rangemode="tozero", title_text=f"{label}{', ms' if cost == 'latency_ms' else ''}", tickformat="~s", nticks=6
        )
        shown = (".0%" if high - low > 0.05 else ".1%") if share else ".4~g"
        figure.update_yaxes(tickformat=shown, range=[low, high])
        if limited in ("accuracy", cost):
            line = figure.add_hline if limited == "accuracy" else figure.add_vline
            line(bound, line={"color": light("accent"), "width": 1, "dash": "dot"})
        title = f"{name[:1].upper()}{name[1:]} against {label}"
        alt = f"{title} of {len(measured)} models; the table of candidates has the numbers."
        plots.append(_plot(f"search-{cost}", title, alt, figure, note))
    return plots


def front_plots(points: Sequence[FrontPoint], key: str = "front") -> list[Plot]:
    """Accuracy against parameters and against milliseconds, with a line through the points that nothing beats there."""
    plots = []
    for cost, label in _FRONT_AXES.items():
        shown = [point for point in points if getattr(point, cost) is not None]
        if len(shown) < 2:
            continue
        groups = list(dict.fromkeys(point.group for point in shown))
        traces = [
            _front_line(shown, cost),
            *(_front_marks(shown, group, place, cost) for place, group in enumerate(groups)),
        ]
        figure = _figure(traces, height=360, legend=True)
        figure.update_xaxes(type="log", title_text=label, nticks=6)
        figure.update_yaxes(tickformat=".1%")
        alt = f"Accuracy against {label} of {len(shown)} networks; the table has the numbers."
        plots.append(_plot(f"{key}-{cost}", f"Accuracy against {label}", alt, figure))
    return plots


def rank_plot(layers: Sequence[LayerReport]) -> Plot | None:
    """The share of the full rank that each decomposed layer keeps, from input to output; None if there are none."""
    numbered = [(number, layer) for number, layer in enumerate(layers, 1) if layer.rank is not None]
    if not numbered:
        return None
    numbers = [number for number, _ in numbered]
    hover = [f"<b>{escape(each.name, quote=False)}</b><br>{each.rank} of {each.full_rank}" for _, each in numbered]
    kept = [(layer.rank or 0) / layer.full_rank for _, layer in numbered]
    bar: Trace = {"type": "bar", "x": numbers, "hovertext": hover, "hoverinfo": "text"}
    full = {
        **bar,
        "y": [1] * len(numbers),
        "marker": {"color": light("soft"), "line": {"width": 0}},
        "hoverinfo": "skip",
    }
    figure = _figure([full, {**bar, "y": kept, "marker": {"color": light("accent"), "line": {"width": 0}}}], height=260)
    figure.update_layout(barmode="overlay", bargap=0.25, hovermode="x")
    figure.update_xaxes(title_text="layer, from input to output", showgrid=False, dtick=_step(len(layers)))
    figure.update_yaxes(tickformat=".0%", range=[0, 1.02], nticks=5)
    alt = f"Share of the full rank kept by {len(numbers)} layers; the table of layers has the numbers."
    return _plot("ranks", "Share of the full rank kept", alt, figure)


def importance_plots(importance: Mapping[str, LayerImportance]) -> list[Plot]:
    """Scale factors and Taylor importance relative to its maximum, per layer, in singular-value order."""
    plots = []
    for number, (name, values) in enumerate(importance.items()):
        top = max((abs(value) for value in values.taylor if value is not None), default=0) or 1
        taylor = [None if value is None else value / top for value in values.taylor]
        figure = _figure(
            [
                _line("Taylor importance", range(1, len(taylor) + 1), taylor, "blue", width=1.3),
                _line("scale factor", range(1, len(values.scales) + 1), values.scales, "red", width=1.3),
            ],
            height=240,
        )
        figure.update_xaxes(title_text="basis vector", showgrid=False, dtick=_step(len(taylor)))
        figure.update_yaxes(rangemode="tozero", nticks=5)
        alt = f"Scale factors and Taylor importance of the {len(taylor)} basis vectors of {name}."
        plots.append(_plot(f"importance-{number}", name, alt, figure))
    return plots


def error_plot(errors: Errors) -> Plot:
    """The errors of examples after pruning against those before; below the line they became smaller."""
    most = max((*errors.before, *errors.after, 1e-12))
    dots: Trace = {
        "type": "scatter",
        "mode": "markers",
        "x": list(errors.before),
        "y": list(errors.after),
        "marker": {"color": light("accent"), "size": 5, "opacity": 0.6},
        "hoverinfo": "x+y",
    }
    figure = _figure([_line("unchanged", [0, most], [0, most], "faint", dash="dot"), dots], height=320)
    figure.update_xaxes(title_text="error before", rangemode="tozero", nticks=6)
    figure.update_yaxes(title_text="error after", rangemode="tozero", nticks=6)
    alt = f"The errors of {len(errors.before)} examples after pruning against those before."
    return _plot("errors", "Errors before and after", alt, figure)


def training_plots(summary: RunSummary) -> list[Plot]:
    """Validation accuracy of every candidate by epoch, and the losses of the chosen one; empty without training."""
    name = summary.metric
    trained = [candidate for candidate in summary.candidates if candidate.history]
    if not trained:
        return []
    chosen = next((candidate for candidate in trained if candidate.chosen), None)
    others = [candidate for candidate in trained if candidate is not chosen]
    lines = [_bundle(others)] if others else []
    if chosen:
        epochs = [record.epoch for record in chosen.history]
        training = [record.train_accuracy for record in chosen.history]
        lines.append(_line("training", epochs, training, "accent", dash="dot"))
        lines.append(
            _line("validation", epochs, [record.val_accuracy for record in chosen.history], "accent", width=2.5)
        )
    accuracy = _figure(lines, height=300, legend=True)
    accuracy.update_yaxes(tickformat=".0%" if summary.metric_is_share else ".4~g")
    alt = f"Validation {name} by epoch of {len(trained)} candidates."
    plots = [_plot("training-accuracy", f"{name[:1].upper()}{name[1:]} by epoch", alt, accuracy)]
    if chosen:
        pair = [
            _line("training", epochs, [record.train_loss for record in chosen.history], "accent", dash="dot"),
            _line("validation", epochs, [record.val_loss for record in chosen.history], "accent", width=2.5),
        ]
        loss = _figure(pair, height=300, legend=True)
        loss.update_yaxes(rangemode="tozero")
        plots.append(_plot("training-loss", "Loss of the chosen model", "Loss by epoch of the chosen model.", loss))
    longest = max(len(candidate.history) for candidate in trained)
    for figure in (plot.figure for plot in plots):
        figure["layout"]["xaxis"].update(title={"text": "epoch"}, showgrid=False, dtick=_step(longest))
    return plots


def _points(status: str, points: Iterable[Point], cost: str, summary: RunSummary) -> Trace:
    """One trace: the networks with that status, with confidence intervals as error bars."""
    style = _MARKERS[status]
    shown = [point for point in points if point.status == status]
    networks = [point.network for point in shown]
    colour, form = light(str(style["color"])), ".1%" if summary.metric_is_share else ".4g"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": status,
        "x": [point.cost(cost) for point in shown],
        "y": [network.accuracy for network in networks],
        "error_y": {
            "array": [network.interval[1] - network.accuracy for network in networks],
            "arrayminus": [network.accuracy - network.interval[0] for network in networks],
            "color": colour if status in ("chosen", "reference") else light("faint"),
            "thickness": 1,
            "width": 0,
        },
        "marker": {
            "symbol": style["symbol"],
            "size": style["size"],
            "color": colour,
            "line": {"width": style["line"], "color": colour},
        },
        "hovertext": [
            f"<b>{escape(point.name, quote=False)}</b> ({status})<br>{escape(summary.metric, quote=False)} "
            f"{point.network.accuracy:{form}}, {point.network.interval[0]:{form}} to {point.network.interval[1]:{form}}"
            f"<br>{COSTS[cost]} {point.cost(cost):,}"
            for point in shown
        ],
        "hoverinfo": "text",
    }


def _front_line(points: Sequence[FrontPoint], cost: str) -> Trace:
    """The front of accuracy against this cost alone, as steps."""
    best, front = -1.0, []
    for point in sorted(points, key=lambda each: (getattr(each, cost), -each.accuracy)):
        if point.accuracy > best:
            front.append(point)
            best = point.accuracy
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "front",
        "x": [getattr(point, cost) for point in front],
        "y": [point.accuracy for point in front],
        "line": {"color": light("faint"), "width": 1.5, "shape": "hv"},
        "hoverinfo": "skip",
    }


def _front_marks(points: Sequence[FrontPoint], group: str, place: int, cost: str) -> Trace:
    """The points of one group; those on the front are filled, and the chosen one is large."""
    shown = [point for point in points if point.group == group]
    colour, symbol = (
        light(_FRONT_COLOURS[place % len(_FRONT_COLOURS)]),
        _FRONT_SYMBOLS[place // len(_FRONT_COLOURS) % len(_FRONT_SYMBOLS)],
    )
    return {
        "type": "scatter",
        "mode": "markers",
        "name": group,
        "x": [getattr(point, cost) for point in shown],
        "y": [point.accuracy for point in shown],
        "marker": {
            "symbol": [symbol if point.front else f"{symbol}-open" for point in shown],
            "size": [15 if point.chosen else 8 for point in shown],
            "color": colour,
        },
        "hovertext": [
            f"<b>{escape(point.group, quote=False)}</b>, {escape(point.name, quote=False)}<br>accuracy "
            f"{point.accuracy:.1%}, {point.parameters:,} parameters"
            + ("" if point.latency_ms is None else f", {point.latency_ms:.3g} ms")
            for point in shown
        ],
        "hoverinfo": "text",
    }


def _accuracy_range(points: Sequence[Point], limit: float | None, least: float = 0.0) -> tuple[float, float, int]:
    """The accuracy range to show, and the number of failed candidates below it.

    A hopeless candidate would otherwise compress the points that matter.
    """
    good = [point.network for point in points if point.status != "failed"]
    failed = [point.network for point in points if point.status == "failed"]
    if len(good) < 2 and failed:
        good.append(max(failed, key=lambda network: network.accuracy))
    ends = [end for network in good for end in (*network.interval, network.accuracy)]
    if limit is not None:
        ends.append(limit)
    span = max(max(ends) - min(ends), 0.01)
    lowest = min([*ends, *(network.accuracy for network in failed)])
    low = max(lowest - 0.1 * span, min(ends) - 0.4 * span, least)
    return low, max(ends) + 0.1 * span, sum(network.accuracy < low for network in failed)


def _bundle(candidates: Iterable[CandidateRow]) -> Trace:
    """The validation curves of many candidates as one trace, with gaps in between."""

    def rows() -> Iterator[tuple[int | None, float | None, str]]:
        for candidate in candidates:
            for record in candidate.history:
                yield record.epoch, record.val_accuracy, escape(candidate.name, quote=False)
            yield None, None, ""

    epochs, values, names = zip(*rows(), strict=True)
    line = _line("others", epochs, values, "faint", width=1)
    return {**line, "opacity": 0.7, "hovertext": list(names), "hoverinfo": "text+y"}


def _line(
    name: str,
    x: Iterable[float | None],
    y: Iterable[float | None],
    colour: str,
    *,
    width: float = 1.6,
    dash: str = "solid",
) -> Trace:
    style = {"color": light(colour), "width": width, "dash": dash}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": style}


def _step(count: int) -> int | None:
    """The step between integer ticks: 1 for few, plotly's choice for many."""
    return 1 if count <= 12 else None


def _figure(traces: Sequence[Trace], *, height: int, legend: bool = False) -> Any:
    """A plotly figure in our style: no frame, a thin grid, nothing that captures touch scrolling."""
    axis = {"gridcolor": light("line"), "linecolor": light("line"), "zeroline": False, "fixedrange": True}
    text = {"family": FONT, "size": 12, "color": light("muted")}
    return graph_objects().Figure(
        data=[dict(trace) for trace in traces],
        layout={
            "template": None,
            "height": height,
            "margin": {"l": 52, "r": 12, "t": 34 if legend else 10, "b": 46},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": text,
            "showlegend": legend,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
            "hovermode": "closest",
            "dragmode": False,
            "hoverlabel": {
                "bgcolor": light("card"),
                "bordercolor": light("faint"),
                "font": {**text, "color": light("ink")},
            },
            "xaxis": axis,
            "yaxis": axis,
        },
    )


def _plot(key: str, title: str, alt: str, figure: Any, note: str = "") -> Plot:
    return Plot(key, title, alt, json.loads(figure.to_json()), note)


def graph_objects() -> ModuleType:
    """The module plotly.graph_objects; raises MissingExtraError without plotly."""
    try:
        return import_module("plotly.graph_objects")
    except ModuleNotFoundError as error:
        raise MissingExtraError("plotly", extra="report") from error
