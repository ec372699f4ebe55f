"""Cells -> SVG figures: what each candidate kept and lost, and Figure 2.

Colours are of medium brightness and there is no background, so that figures are readable on light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from cells import DATASETS, MODELS, PAPER, Cell, label, mean, pick
from sections import NONE, table

GREY = "#7b8794"
COLOURS = {
    "l1": "#8d99ae",
    "taylor": "#3b82f6",
    "hrank": "#06a3b7",
    "basis": "#f59e0b",
    "basis+taylor": "#ef4444",
    "basis+hrank": "#d946ef",
    "torch-pruning magnitude": "#22a355",
    "torch-pruning taylor": "#84cc16",
    "truncated svd": "#a3764f",
    "l1 inside blocks": "#4b5563",
    "taylor inside blocks": "#1e3a8a",
    "hrank inside blocks": "#155e75",
}
DATASET_COLOURS = dict(zip(DATASETS, ("#3b82f6", "#22a355", "#ef4444"), strict=True))
STYLE = f"<style>text{{font:12px sans-serif;fill:{GREY}}}.small{{font-size:10px}}</style>"


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` onto pixels from `start` to `end`; values outside are clamped."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value.

        >>> Axis(0.01, 1, 0, 100, log=True)(0.1)
        50.0
        """
        low, high, value = ((math.log(max(each, 1e-30)) if self.log else each) for each in (self.low, self.high, value))
        share = min(max((value - low) / (high - low), 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 1)


def svg(width: int, height: int, marks: Iterable[str]) -> str:
    body = "\n".join(marks)
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{STYLE}\n{body}\n</svg>\n'


def text(x: float, y: float, words: str, anchor: str = "start", extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{extra}>{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, opacity: float = 0.3, extra: str = "") -> str:
    place = f'x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}"'
    return f'<line {place} stroke="{GREY}" stroke-opacity="{opacity}"{extra}/>'


# What each candidate kept and lost


def marker(x: float, y: float, framework: str, *, filled: bool, size: float = 4) -> str:
    """A circle for filters, a diamond for the basis, a square for the peers; filled if it passed."""
    colour = COLOURS[framework]
    paint = f'fill="{colour if filled else "none"}" stroke="{colour}" stroke-width="1.5"'
    if framework.startswith(("l1", "taylor", "hrank")):
        return f'<circle cx="{x:g}" cy="{y:g}" r="{size}" {paint}/>'
    turn = f' transform="rotate(45 {x:g} {y:g})"' if framework.startswith("basis") else ""
    corner = f'x="{x - size:g}" y="{y - size:g}" width="{2 * size:g}" height="{2 * size:g}"'
    return f"<rect {corner} {paint}{turn}/>"


def candidates_figure(cells: Sequence[Cell], model: str, dataset: str) -> str:
    """Accuracy lost on the validation images against parameters kept, for every candidate of every framework."""
    runs = [cell for cell in pick(cells, model, dataset) if cell.candidates]
    shares = [c["parameters"] / cell.candidates[0]["parameters"] for cell in runs for c in cell.candidates]
    ticks = [tick for tick in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0) if tick >= min(shares) / 2.5]
    x, y = Axis(ticks[0], 1.15, 60, 520, log=True), Axis(-2, 10, 340, 30)
    marks = [text(60, 18, f"{MODELS[model]}, {DATASETS[dataset]}: all candidates")]
    for tick in ticks:
        marks += [line(x(tick), 30, x(tick), 340), text(x(tick), 358, f"{100 * tick:g}%", "middle")]
    for tick in range(-2, 11, 2):
        name = f"{tick}" if tick < 10 else "≥ 10"
        marks += [line(60, y(tick), 520, y(tick)), text(52, y(tick) + 4, name, "end")]
    limit = mean(cell.limit for cell in runs)
    marks.append(line(60, y(100 * limit), 520, y(100 * limit), 0.9, ' stroke-dasharray="5 4"'))
    marks.append(text(290, 380, "parameters kept, as deployed", "middle"))
    marks.append(text(16, 185, "points of accuracy lost", "middle", ' transform="rotate(-90 16 185)"'))
    for cell in runs:
        whole = cell.candidates[0]["parameters"]
        for tried in cell.candidates[1:]:
            place = x(tried["parameters"] / whole), y(100 * tried["drop"])
            marks.append(marker(*place, cell.framework, filled=tried["passed"]))
        chosen = x(cell.result["deployed_parameters"] / whole), y(100 * cell.drops[0])
        marks.append(marker(*chosen, cell.framework, filled=False, size=8))
    shown = [framework for framework in COLOURS if any(cell.framework == framework for cell in runs)]
    for row, framework in enumerate(shown):
        marks += [marker(545, 44 + 22 * row, framework, filled=True), text(560, 48 + 22 * row, label(framework))]
    notes = ("filled: within the limit", "large: chosen", "dashed: the limit")
    marks += [text(540, 60 + 22 * len(shown) + 16 * row, note) for row, note in enumerate(notes)]
    return svg(720, 390, marks)


# Figure 2


def scales_of(cells: Sequence[Cell], model: str) -> dict[str, Cell]:
    """For each dataset, the run whose scaling factors are shown, preferably with the basis of the weights."""
    found = {}
    for dataset in DATASETS:
        for variant in ("paper", "weights", "default"):
            runs = [cell for cell in pick(cells, model, dataset, "basis", variant) if cell.scales]
            if runs:
                found[dataset] = runs[0]
                break
    return found


def scales_figure(cells: Sequence[Cell], model: str) -> str:
    """Scaling factors and Taylor scores of the paper's layers, in basis order, one line per dataset."""
    shown = scales_of(cells, model)
    names = layers_of(shown, model)
    titles = {"scales": "scaling factor", "taylor": "Taylor score"}
    marks = []
    for column, (number, name) in enumerate(names.items()):
        left = 62 + 172 * column
        marks.append(text(left + 75, 18, f"layer #{number}", "middle"))
        marks.append(text(left + 75, 32, name.removeprefix("backbone."), "middle", ' class="small"'))
        for row, kind in enumerate(titles):
            curves = {dataset: np.asarray(cell.scales[name][kind]) for dataset, cell in shown.items() if cell.scales}
            marks += panel(curves, kind, left, 42 + 160 * row, axis_labels=column == 0)
        rank = max(len(cell.scales[name]["scales"]) for cell in shown.values() if cell.scales)
        marks.append(text(left, 362, "1", "start", ' class="small"'))
        marks.append(text(left + 150, 362, str(rank), "end", ' class="small"'))
    for row, title in enumerate(titles.values()):
        middle = 110 + 160 * row
        marks.append(text(12, middle, title, "middle", f' transform="rotate(-90 12 {middle})"'))
    width = 62 + 172 * len(names)
    marks.append(text(62, 384, "basis vectors in basis order"))
    for position, dataset in enumerate(shown):
        place = width - 130 * (len(shown) - position)
        marks.append(f'<rect x="{place}" y="374" width="12" height="12" fill="{DATASET_COLOURS[dataset]}"/>')
        marks.append(text(place + 18, 384, DATASETS[dataset]))
    return svg(width, 396, marks)


def layers_of(shown: dict[str, Cell], model: str) -> dict[int, str]:
    """The layers of the paper's figure by number, counted from 1 in network order."""
    names = list(next(iter(shown.values())).scales or ())
    return {number: names[number - 1] for number in PAPER["figure2_layers"][model] if number <= len(names)}


def panel(
    curves: dict[str, npt.NDArray[np.float64]], kind: str, left: float, top: float, *, axis_labels: bool
) -> list[str]:
    """The frame and the lines: scaling factors as they are; scores relative to the largest in the layer, log scale."""
    if kind == "taylor":
        curves = {dataset: values / max(values.max(), 1e-30) for dataset, values in curves.items()}
        y, ticks = Axis(1e-6, 1, top + 136, top, log=True), {10.0**power: f"1e{power}" for power in (-6, -4, -2, 0)}
    else:
        most = max(1, math.ceil(max(float(values.max()) for values in curves.values())))
        y, ticks = Axis(0, most, top + 136, top), {tick * most: f"{tick * most:g}" for tick in (0, 0.5, 1)}
    marks = []
    for tick, name in ticks.items():
        marks.append(line(left, y(tick), left + 150, y(tick)))
        if axis_labels or kind == "scales":
            marks.append(text(left - 4, y(tick) + 3, name, "end", ' class="small"'))
    for dataset, values in curves.items():
        parts = np.array_split(values, min(len(values), 100))  # means of neighbours: enough to see the trend
        x = Axis(0, max(len(parts) - 1, 1), left, left + 150)
        places = " ".join(f"{x(number):g},{y(float(part.mean())):g}" for number, part in enumerate(parts))
        colour = DATASET_COLOURS[dataset]
        marks.append(f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
    return marks


def ranks(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The rank of each value, with the mean rank for ties.

    >>> ranks([0.5, 0.1, 0.5]).tolist()
    [1.5, 0.0, 1.5]
    """
    _, inverse, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    shared: npt.NDArray[np.float64] = np.cumsum(counts) - (counts + 1) / 2
    return shared[inverse]


def order_correlation(values: Sequence[float]) -> float:
    """Spearman's correlation of the values with the basis order: 1 if they decrease, -1 if they increase.

    >>> order_correlation([0.9, 0.5, 0.1]), order_correlation([1.0, 1.0])
    (1.0, 0.0)
    """
    placed = ranks(values)
    if np.ptp(placed) == 0:
        return 0.0
    return round(float(np.corrcoef(-np.arange(len(placed)), placed)[0, 1]), 6)


def order_table(cells: Sequence[Cell]) -> str:
    """How closely scaling factors and Taylor scores follow the basis order, for each third of each network."""
    rows = []
    for model, name in MODELS.items():
        for dataset, cell in scales_of(cells, model).items():
            layers = list((cell.scales or {}).values())
            thirds = [part for part in np.array_split(np.arange(len(layers)), 3) if len(part)]
            texts = [
                f"{mean(order_correlation(layers[i]['scales']) for i in part):.2f}, "
                f"{mean(order_correlation(layers[i]['taylor']) for i in part):.2f}"
                for part in thirds
            ]
            rows.append([name, DATASETS[dataset], cell.variant, *texts, *[NONE] * (3 - len(thirds))])
    return table(("Network", "Dataset", "Variant", "First third", "Middle third", "Last third"), rows)
