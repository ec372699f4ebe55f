"""A result's numbers -> figures in plotly's format, as plain data for the page to draw."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, TypeAlias

from basisprune.costs import LayerReport
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
_AXES = COSTS | {"latency_ms": "milliseconds for one image", "bytes": "bytes"}
_TICKS = ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,))  # in each decade
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
    """Return the colour of that name in the light theme."""
    return PALETTE[name][0]


def search_plots(summary: RunSummary) -> list[Plot]:
    """Draw the accuracy of every candidate against each measured cost, with error bars."""
    networks: list[tuple[str, str, Side | CandidateRow]] = [("unpruned", "reference", summary.reference)]
    networks += [(each.name, each.status, each) for each in summary.candidates]
    limited, bound = summary.budget.quantity, summary.budget.bound(summary.reference.accuracy)
    share, name = summary.metric_is_share, summary.metric
    limit = bound if limited == "accuracy" else None
    low, high, below = _accuracy_range(networks, limit, 0.0 if share else -math.inf)
    note = f"Not shown: {below} below {format(low, '.0%' if share else '.4g')}; the table lists all." if below else ""
    plots = []
    for cost, label in COSTS.items():
        measured = [each for each in networks if getattr(each[2], cost, None) is not None]
        if len(measured) < 2:
            continue
        drawn = [_candidates(status, measured, cost, summary) for status in _MARKERS]
        title = f"{name[:1].upper()}{name[1:]} against {label}"
        form = (".0%" if high - low > 0.05 else ".1%") if share else ".4~g"
        about = f"search-{cost}", title, f"{title} of {len(measured)} models; the table of candidates has the numbers."
        x = _logarithmic(_AXES[cost], [getattr(each[2], cost) for each in measured])
        y = {"tickformat": form, "range": [low, high]} | _titled(name)
        shapes, texts = _budget_line(bound if limited in ("accuracy", cost) else None, across=limited == "accuracy")
        plots.append(_plot(about, drawn, height=320, x=x, y=y, note=note, shapes=shapes, annotations=texts))
    return plots


def _budget_line(bound: float | None, *, across: bool) -> tuple[list[Trace], list[Trace]]:
    """Draw the budget as a dotted line with its name; positions of texts on logarithmic axes are logarithms."""
    if not bound:
        return [], []
    line: Trace = {"type": "line", "line": {"color": light("accent"), "width": 1.5, "dash": "dot"}}
    text: Trace = {"text": "budget", "showarrow": False, "font": {"color": light("accent")}}
    if across:
        line |= {"xref": "x domain", "x0": 0, "x1": 1, "yref": "y", "y0": bound, "y1": bound}
        text |= {"xref": "x domain", "x": 0, "xanchor": "left", "y": bound, "yanchor": "bottom"}
    else:
        line |= {"yref": "y domain", "y0": 0, "y1": 1, "xref": "x", "x0": bound, "x1": bound}
        text |= {"yref": "y domain", "y": 0, "yanchor": "bottom", "x": math.log10(bound), "xanchor": "left"}
    return [line], [text]


def front_plots(points: Sequence[FrontPoint], key: str = "front") -> list[Plot]:
    """Draw accuracy against parameters and milliseconds, with a line through the points that nothing beats there."""
    plots = []
    for cost, label in ((cost, _AXES[cost]) for cost in ("parameters", "latency_ms")):
        drawn = [point for point in points if getattr(point, cost) is not None]
        if len(drawn) < 2:
            continue
        groups = list(dict.fromkeys(point.group for point in drawn))
        marks = [_group(drawn, group, place, cost) for place, group in enumerate(groups)]
        about = f"Accuracy against {label}"
        plots.append(
            _plot(
                (f"{key}-{cost}", about, f"{about} of {len(drawn)} networks; the table has the numbers."),
                [_front_line(drawn, cost), *marks],
                height=360,
                legend=True,
                x=_logarithmic(label, [getattr(point, cost) for point in drawn]),
                y={"tickformat": ".1%"} | _titled("accuracy"),
            )
        )
    return plots


def layer_plot(layers: Sequence[LayerReport]) -> Plot | None:
    """Draw the shares of ranks and channels that each layer keeps, in order; None if nothing is known of either."""
    kept: dict[str, list[tuple[int, LayerReport, int, int]]] = {"ranks": [], "channels": []}
    for number, layer in enumerate(layers, 1):
        if layer.rank is not None:
            kept["ranks"].append((number, layer, layer.rank, layer.full_rank))
        if layer.channels is not None and layer.full_channels is not None:
            kept["channels"].append((number, layer, layer.channels, layer.full_channels))
    kept = {what: found for what, found in kept.items() if found}
    if not kept:
        return None
    traces: list[Trace] = []
    for what, found in kept.items():
        names = [f"<b>{escape(each.name, quote=False)}</b><br>{n} of {most} {what}" for _, each, n, most in found]
        values: Trace = {
            "name": f"{what} kept",
            "x": [number for number, *_ in found],
            "y": [some / most for *_, some, most in found],
            "hovertext": names,
            "hoverinfo": "text",
        }
        style: Trace = {"color": light("accent" if what == "ranks" else "blue"), "line": {"width": 0}}
        marks: Trace = {"type": "scatter", "mode": "markers", "marker": style | {"symbol": "diamond", "size": 7}}
        traces.append(values | ({"type": "bar", "marker": style} if what == "ranks" else marks))
    title = f"Share of {' and '.join(kept)} kept"
    alt = f"{title} by {len(layers)} layers; the table of layers has the numbers."
    x = {"showgrid": False, "dtick": _step(len(layers))} | _titled("layer, from input to output")
    y = {"tickformat": ".0%", "range": [0, 1.04], "nticks": 5} | _titled("kept")
    return _plot(("kept", title, alt), traces, height=280, x=x, y=y, bargap=0.25, hovermode="x", legend=len(kept) > 1)


def importance_plots(importance: Mapping[str, LayerImportance]) -> list[Plot]:
    """Draw scale factors and Taylor importance relative to its maximum, per layer, in singular-value order."""
    plots = []
    for number, (name, values) in enumerate(importance.items()):
        top = max((abs(value) for value in values.taylor if value is not None), default=0) or 1
        taylor = [None if value is None else value / top for value in values.taylor]
        lines = [
            _line("Taylor importance", range(1, len(taylor) + 1), taylor, "blue", width=1.3),
            _line("scale factor", range(1, len(values.scales) + 1), values.scales, "red", width=1.3),
        ]
        alt = f"Scale factors and Taylor importance of the {len(taylor)} basis vectors of {name}."
        x = {"showgrid": False, "dtick": _step(len(taylor))} | _titled("basis vector")
        y = {"rangemode": "tozero", "nticks": 5} | _titled("relative to the maximum")
        plots.append(_plot((f"importance-{number}", name, alt), lines, height=240, x=x, y=y))
    return plots


def error_plot(errors: Errors) -> Plot:
    """Draw the errors of examples after pruning against those before; below the line they became smaller."""
    most = max((*errors.before, *errors.after, 1e-12))
    marker = {"color": light("accent"), "size": 5, "opacity": 0.6}
    dots = _dots(errors.before, errors.after, marker) | {"hoverinfo": "x+y"}
    alt = f"The errors of {len(errors.before)} examples after pruning against those before."
    axes = [{"rangemode": "tozero", "nticks": 6} | _titled(f"error {when}") for when in ("before", "after")]
    lines = [_line("unchanged", [0, most], [0, most], "faint", dash="dot"), dots]
    return _plot(("errors", "Errors before and after", alt), lines, height=320, x=axes[0], y=axes[1])


def training_plots(summary: RunSummary) -> list[Plot]:
    """Draw the validation accuracy of every candidate by epoch, and the losses of the chosen one."""
    name = summary.metric
    trained = [candidate for candidate in summary.candidates if candidate.history]
    if not trained:
        return []
    chosen = next((candidate for candidate in trained if candidate.chosen), None)
    others = [each for each in trained if each is not chosen and each.history[0].validated[0] is not None]
    x = {"showgrid": False, "dtick": _step(max(len(each.history) for each in trained))} | _titled("epoch")

    def both(training: Sequence[float | None], validation: Sequence[float | None]) -> list[Trace]:
        epochs = [record.epoch for record in records]
        parts = (("training", training, 1.6, "dot"), ("validation", validation, 2.5, "solid"))
        return [
            _line(part, epochs, values, "accent", width=width, dash=dash)
            for part, values, width, dash in parts
            if any(value is not None for value in values)
        ]

    records = chosen.history if chosen else ()
    accuracies, losses = zip(*(each.validated for each in records), strict=True) if records else ((), ())
    about = f"{name[:1].upper()}{name[1:]} by epoch", f"Validation {name} by epoch of {len(trained)} candidates."
    lines = _marked(
        [*([_bundle(others)] if others else []), *both([each.train_accuracy for each in records], accuracies)]
    )
    y = {"tickformat": ".0%" if summary.metric_is_share else ".4~g"} | _titled(name)
    plots = [_plot(("training-accuracy", *about), lines, height=300, legend=True, x=x, y=y)]
    if chosen:
        about = "Loss of the chosen model", "Loss by epoch of the chosen model."
        lines = _marked(both([each.train_loss for each in records], losses))
        y = {"rangemode": "tozero"} | _titled("loss")
        plots.append(_plot(("training-loss", *about), lines, height=300, legend=True, x=x, y=y))
    return plots


def _marked(curves: Iterable[Trace]) -> list[Trace]:
    """Mark each epoch, or a curve of one would not be seen."""
    return [curve | {"mode": "lines+markers", "marker": {"size": 4}} for curve in curves]


def _candidates(
    status: str, networks: Iterable[tuple[str, str, Side | CandidateRow]], cost: str, summary: RunSummary
) -> Trace:
    """Draw the networks with that status, with confidence intervals as error bars."""
    style = _MARKERS[status]
    drawn = [(name, network) for name, each, network in networks if each == status]
    colour, form = light(str(style["color"])), ".1%" if summary.metric_is_share else ".4g"
    metric = escape(summary.metric, quote=False)
    hover = [
        f"<b>{escape(name, quote=False)}</b> ({status})<br>{metric} {each.accuracy:{form}}, {each.interval[0]:{form}} "
        f"to {each.interval[1]:{form}}<br>{COSTS[cost]} {getattr(each, cost):,}"
        for name, each in drawn
    ]
    bars = {
        "array": [each.interval[1] - each.accuracy for _, each in drawn],
        "arrayminus": [each.accuracy - each.interval[0] for _, each in drawn],
        "color": colour if status in ("chosen", "reference") else light("faint"),
        "thickness": 1,
        "width": 0,
    }
    marker = {**style, "color": colour, "line": {"width": style["line"], "color": colour}}
    dots = _dots([getattr(each, cost) for _, each in drawn], [each.accuracy for _, each in drawn], marker, hover)
    return dots | {"name": status, "error_y": bars}


def _front_line(points: Sequence[FrontPoint], cost: str) -> Trace:
    """Draw the front of accuracy against this cost alone, as steps."""
    front: list[FrontPoint] = []
    for point in sorted(points, key=lambda each: (getattr(each, cost), -each.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    x, y = [getattr(point, cost) for point in front], [point.accuracy for point in front]
    line = {"color": light("faint"), "width": 1.5, "shape": "hv"}
    return _line("front", x, y, "faint") | {"line": line, "hoverinfo": "skip"}


def _group(points: Sequence[FrontPoint], group: str, place: int, cost: str) -> Trace:
    """Draw the points of one group; those on the front are filled, and the chosen one is large."""
    drawn = [point for point in points if point.group == group]
    row, column = divmod(place, len(_FRONT_COLOURS))
    symbol = _FRONT_SYMBOLS[row % len(_FRONT_SYMBOLS)]
    marker = {
        "symbol": [symbol if point.front else f"{symbol}-open" for point in drawn],
        "size": [15 if point.chosen else 8 for point in drawn],
        "color": light(_FRONT_COLOURS[column]),
    }
    hover = [
        f"<b>{escape(point.group, quote=False)}</b>, {escape(point.name, quote=False)}<br>accuracy "
        f"{point.accuracy:.1%}, {point.parameters:,} parameters"
        + ("" if point.latency_ms is None else f", {point.latency_ms:.3g} ms")
        for point in drawn
    ]
    x, y = [getattr(point, cost) for point in drawn], [point.accuracy for point in drawn]
    return _dots(x, y, marker, hover) | {"name": escape(group, quote=False)}


def _accuracy_range(
    networks: Iterable[tuple[str, str, Side | CandidateRow]], limit: float | None, least: float
) -> tuple[float, float, int]:
    """Return the accuracy range to show, and the number of failed candidates below it.

    A hopeless candidate would otherwise compress the points that matter.
    """
    parts: dict[bool, list[Side | CandidateRow]] = {True: [], False: []}
    for _, status, network in networks:
        parts[status != "failed"].append(network)
    good, failed = parts[True], parts[False]
    if len(good) < 2 and failed:
        good.append(max(failed, key=lambda network: network.accuracy))
    ends = [end for network in good for end in (*network.interval, network.accuracy)]
    ends += [] if limit is None else [limit]
    span = max(max(ends) - min(ends), 0.01)
    lowest = min([*ends, *(network.accuracy for network in failed)])
    low = max(lowest - 0.1 * span, min(ends) - 0.4 * span, least)
    return low, max(ends) + 0.1 * span, sum(network.accuracy < low for network in failed)


def _bundle(candidates: Iterable[CandidateRow]) -> Trace:
    """Draw the validation curves of many candidates as one trace, with gaps in between."""
    epochs: list[float | None] = []
    values: list[float | None] = []
    names: list[str] = []
    for candidate in candidates:
        epochs += [*(record.epoch for record in candidate.history), None]
        values += [*(record.validated[0] for record in candidate.history), None]
        names += [*([escape(candidate.name, quote=False)] * len(candidate.history)), ""]
    return _line("others", epochs, values, "faint", width=1) | {
        "opacity": 0.7,
        "hovertext": names,
        "hoverinfo": "text+y",
    }


def _dots(x: Iterable[object], y: Iterable[object], marker: object, hover: list[str] | None = None) -> Trace:
    about = {} if hover is None else {"hovertext": hover, "hoverinfo": "text"}
    return {"type": "scatter", "mode": "markers", "x": list(x), "y": list(y), "marker": marker, **about}


def _line(
    name: str, x: Iterable[object], y: Iterable[object], colour: str, *, width: float = 1.6, dash: str = "solid"
) -> Trace:
    style = {"color": light(colour), "width": width, "dash": dash}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": style}


def _step(count: int) -> int | None:
    """Return the step between integer ticks: 1 for few, plotly's choice for many."""
    return 1 if count <= 12 else None


def _titled(text: str) -> dict[str, object]:
    return {"title": {"text": text, "standoff": 8}}


def _logarithmic(title: str, values: Sequence[float]) -> dict[str, object]:
    """Return an axis of logarithms with at most six round numbers on it, and room at both ends.

    >>> _logarithmic("parameters", [90_000, 3_400_000])["tickvals"]
    [100000, 200000, 500000, 1000000, 2000000]
    """
    low, high = 0.8 * max(min(values), 1e-9), 1.25 * max(*values, 1e-9)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    rounds = ([float(f"{part}e{decade}") for decade in decades for part in parts] for parts in _TICKS)
    fitting = ([value for value in each if low <= value <= high] for each in rounds)
    ticks = next((each for each in fitting if len(each) <= 6), None)
    more = (
        {}
        if ticks is None
        else {"tickvals": [int(value) if value >= 1 and value % 1 == 0 else value for value in ticks]}
    )
    return {"type": "log", "tickformat": "~s", "range": [math.log10(low), math.log10(high)]} | _titled(title) | more


def _plot(
    about: tuple[str, str, str],
    traces: Sequence[Trace],
    *,
    height: int,
    x: Mapping[str, object],
    y: Mapping[str, object],
    legend: bool = False,
    note: str = "",
    **layout: object,
) -> Plot:
    """Make a figure in our style: no frame, a thin grid, nothing that captures touch scrolling."""
    axis = {"gridcolor": light("line"), "linecolor": light("line"), "zeroline": False, "fixedrange": True}
    text = {"family": FONT, "size": 12, "color": light("muted")}
    label = {"bgcolor": light("card"), "bordercolor": light("faint"), "font": {**text, "color": light("ink")}}
    figure = {
        "data": list(traces),
        "layout": {
            "height": height,
            "margin": {"l": 40, "r": 12, "t": 34 if legend else 10, "b": 46},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": text,
            "showlegend": legend,
            "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
            "hovermode": "closest",
            "dragmode": False,
            "hoverlabel": label,
            "xaxis": {**axis, **x},
            "yaxis": {**axis, "automargin": True, **y},
            **layout,
        },
    }
    # Numbers that are not finite are null in JSON.
    return Plot(*about, json.loads(json.dumps(figure), parse_constant=lambda _: None), note)
