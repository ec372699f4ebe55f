"""A result's numbers -> plotly figures, as plain data that a page draws."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import import_module
from types import ModuleType
from typing import Any

from basisprune.errors import MissingExtraError

# Each colour in the light and in the dark theme. Figures hold the light ones; a page in the dark swaps them.
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
_TARGETS = {"target_params": "parameters", "target_macs": "macs", "target_latency": "latency_ms"}
_MARKERS = {
    "failed": {"symbol": "x-thin", "size": 7, "color": "faint", "line": 1.5},
    "undecided": {"symbol": "circle-open", "size": 9, "color": "muted", "line": 1.5},
    "passed": {"symbol": "circle", "size": 8, "color": "muted", "line": 0},
    "reference": {"symbol": "diamond", "size": 11, "color": "ink", "line": 0},
    "chosen": {"symbol": "circle", "size": 14, "color": "accent", "line": 0},
}


@dataclass(frozen=True)
class Plot:
    """One figure of a page; `alt` says in words what it shows, `note` what is not seen in it."""

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


def status_of(candidate: Mapping[str, Any]) -> str:
    """What became of a candidate, in one word.

    >>> status_of({"chosen": False, "undecided": False, "passed": True})
    'passed'
    """
    return next((word for word in ("chosen", "undecided", "passed") if candidate[word]), "failed")


def target_of(budget: Mapping[str, Any], reference: Mapping[str, Any]) -> tuple[str, float] | None:
    """The quantity that the budget limits and its limit; None for fixed ratios.

    A target of 1 or less for parameters or multiply-adds is a share of the reference.

    >>> target_of({"kind": "target_params", "value": 0.25}, {"parameters": 400})
    ('parameters', 100.0)
    """
    kind, value = budget["kind"], budget["value"]
    if kind == "max_drop":
        return "accuracy", reference["accuracy"] - value
    if kind == "min_accuracy":
        return "accuracy", value
    if kind not in _TARGETS:
        return None
    cost = _TARGETS[kind]
    share = cost != "latency_ms" and value <= 1
    return cost, value * reference[cost] if share else value


def search_plots(result: Mapping[str, Any]) -> list[Plot]:
    """Accuracy of every candidate against each cost that was measured, with error bars."""
    points = [{**result["reference"], "name": "unpruned", "status": "reference"}]
    points += [{**candidate, "status": status_of(candidate)} for candidate in result["candidates"]]
    target = target_of(result["budget"], result["reference"])
    low, high, below = _accuracy_range(points, target)
    note = f"Not shown: {below} with less than {low:.0%}; the table has them all." if below else ""
    plots = []
    for cost, label in COSTS.items():
        measured = [point for point in points if point.get(cost) is not None]
        if len(measured) < 2:
            continue
        figure = _figure([_points(status, measured, cost) for status in _MARKERS], height=320)
        figure.update_xaxes(
            rangemode="tozero", title_text=f"{label}{', ms' if cost == 'latency_ms' else ''}", tickformat="~s", nticks=6
        )
        figure.update_yaxes(tickformat=".0%" if high - low > 0.05 else ".1%", range=[low, high])
        if target and target[0] in ("accuracy", cost):
            line = figure.add_hline if target[0] == "accuracy" else figure.add_vline
            line(target[1], line={"color": light("accent"), "width": 1, "dash": "dot"})
        alt = f"Accuracy against {label} of {len(measured)} models; the table of candidates has the numbers."
        plots.append(_plot(f"search-{cost}", f"Accuracy against {label}", alt, figure, note))
    return plots


def rank_plot(layers: Sequence[Mapping[str, Any]]) -> Plot | None:
    """The share of the full rank that each decomposed layer keeps, from input to output; None without such."""
    numbered = [(number, layer) for number, layer in enumerate(layers, 1) if layer["rank"] is not None]
    if not numbered:
        return None
    numbers = [number for number, _ in numbered]
    hover = [
        f"<b>{escape(each['name'], quote=False)}</b><br>{each['rank']} of {each['full_rank']}" for _, each in numbered
    ]
    kept = [layer["rank"] / layer["full_rank"] for _, layer in numbered]
    bar: dict[str, Any] = {"type": "bar", "x": numbers, "hovertext": hover, "hoverinfo": "text"}
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
    return _plot("ranks", "Rank kept of the full rank", alt, figure)


def importance_plots(importance: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Plot]:
    """Scale factors against Taylor importance by its maximum, per layer, in the order of the singular values."""
    plots = []
    for number, (name, values) in enumerate(importance.items()):
        top = max((abs(value) for value in values["taylor"] if value is not None), default=0) or 1
        taylor = [None if value is None else value / top for value in values["taylor"]]
        figure = _figure(
            [
                _line("Taylor importance", range(1, len(taylor) + 1), taylor, "blue", width=1.3),
                _line("scale factor", range(1, len(values["scales"]) + 1), values["scales"], "red", width=1.3),
            ],
            height=240,
        )
        figure.update_xaxes(title_text="singular value", showgrid=False, dtick=_step(len(taylor)))
        figure.update_yaxes(rangemode="tozero", nticks=5)
        alt = f"Scale factors and Taylor importance of the {len(taylor)} basis vectors of {name}."
        plots.append(_plot(f"importance-{number}", name, alt, figure))
    return plots


def training_plots(candidates: Sequence[Mapping[str, Any]]) -> list[Plot]:
    """Validation accuracy of every candidate by epoch, and the losses of the chosen one; empty without histories."""
    trained = [candidate for candidate in candidates if candidate.get("history")]
    if not trained:
        return []
    chosen = next((candidate for candidate in trained if candidate["chosen"]), None)
    others = [candidate for candidate in trained if candidate is not chosen]
    lines = [_bundle(others)] if others else []
    if chosen:
        epochs = [record["epoch"] for record in chosen["history"]]
        curve = {key: [record.get(key) for record in chosen["history"]] for key in chosen["history"][0]}
        lines.append(_line("training", epochs, curve["train_accuracy"], "accent", dash="dot"))
        lines.append(_line("validation", epochs, curve["val_accuracy"], "accent", width=2.5))
    accuracy = _figure(lines, height=300, legend=True)
    accuracy.update_yaxes(tickformat=".0%")
    alt = f"Validation accuracy by epoch of {len(trained)} candidates."
    plots = [_plot("training-accuracy", "Accuracy by epoch", alt, accuracy)]
    if chosen:
        pair = [
            _line("training", epochs, curve["train_loss"], "accent", dash="dot"),
            _line("validation", epochs, curve["val_loss"], "accent", width=2.5),
        ]
        loss = _figure(pair, height=300, legend=True)
        loss.update_yaxes(rangemode="tozero")
        plots.append(_plot("training-loss", "Loss of the chosen model", "Loss by epoch of the chosen model.", loss))
    longest = max(len(candidate["history"]) for candidate in trained)
    for figure in (plot.figure for plot in plots):
        figure["layout"]["xaxis"].update(title={"text": "epoch"}, showgrid=False, dtick=_step(longest))
    return plots


def _points(status: str, models: Iterable[Mapping[str, Any]], cost: str) -> dict[str, Any]:
    """One trace: the models of that status, with the intervals of their accuracy as error bars."""
    style = _MARKERS[status]
    shown = [model for model in models if model["status"] == status]
    colour = light(str(style["color"]))
    intervals = [f"{model['interval'][0]:.1%} to {model['interval'][1]:.1%}" for model in shown]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": status,
        "x": [model[cost] for model in shown],
        "y": [model["accuracy"] for model in shown],
        "error_y": {
            "array": [model["interval"][1] - model["accuracy"] for model in shown],
            "arrayminus": [model["accuracy"] - model["interval"][0] for model in shown],
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
            f"<b>{escape(model['name'], quote=False)}</b> ({status})<br>accuracy {model['accuracy']:.1%}, {interval}"
            f"<br>{COSTS[cost]} {model[cost]:,}"
            for model, interval in zip(shown, intervals, strict=True)
        ],
        "hoverinfo": "text",
    }


def _accuracy_range(points: Sequence[Mapping[str, Any]], target: tuple[str, float] | None) -> tuple[float, float, int]:
    """The range of accuracy worth seeing, and how many failed candidates lie below it.

    A hopeless candidate would squeeze the few points that matter into a line.
    """
    good = [point for point in points if point["status"] != "failed"]
    failed = [point for point in points if point["status"] == "failed"]
    if len(good) < 2 and failed:
        good.append(max(failed, key=lambda point: float(point["accuracy"])))
    ends = [end for point in good for end in (*point["interval"], point["accuracy"])]
    if target and target[0] == "accuracy":
        ends.append(target[1])
    span = max(max(ends) - min(ends), 0.01)
    lowest = min([*ends, *(point["accuracy"] for point in failed)])
    low = max(lowest - 0.1 * span, min(ends) - 0.4 * span, 0)
    return low, max(ends) + 0.1 * span, sum(point["accuracy"] < low for point in failed)


def _bundle(candidates: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The validation curves of many candidates as one trace, with a gap between two of them."""

    def rows() -> Iterator[tuple[int | None, float | None, str]]:
        for candidate in candidates:
            for record in candidate["history"]:
                yield record["epoch"], record.get("val_accuracy"), escape(candidate["name"], quote=False)
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
) -> dict[str, Any]:
    style = {"color": light(colour), "width": width, "dash": dash}
    return {"type": "scatter", "mode": "lines", "name": name, "x": list(x), "y": list(y), "line": style}


def _step(count: int) -> int | None:
    """The step between ticks that number things: no halves between few, plotly's own choice for many."""
    return 1 if count <= 12 else None


def _figure(traces: Sequence[Mapping[str, Any]], *, height: int, legend: bool = False) -> Any:
    """A plotly figure in the style of the house: no frame, thin grid, nothing that takes a finger's scroll."""
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
