"""Points of the field -> one picture for each dataset, as SVG: accuracy against each cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cells import DATASETS
from field_points import Cost, Mean, frontier
from figures import Axis, line, svg, text

MODEL_NAMES = {"efficientnet_lite0": "EfficientNet-Lite0", "resnet50": "ResNet-50"}
COSTS: dict[Cost, tuple[str, float]] = {
    "parameters": ("parameters, millions", 1e6),
    "macs": ("multiply-adds, millions", 1e6),
    "ms": ("milliseconds", 1.0),
}
COLOURS = {
    "ours": "#ef4444",
    "distilled": "#f59e0b",
    "fastnas": "#16a394",
    "unpruned": "#7b8794",
    "smaller images": "#a855f7",
    "torch-pruning taylor": "#3b82f6",
    "torch-pruning magnitude": "#22a355",
    "torch-pruning group norm": "#06a3b7",
    "truncated svd": "#a3764f",
    "l1": "#84cc16",
    "hrank": "#d946ef",
}
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def field_figure(points: Sequence[Mean], dataset: str) -> str:
    """Three panels: test accuracy against parameters, multiply-adds and milliseconds, a line for each method.

    They end below the least accurate network, and 25 points below the best at the latest.
    """
    shown = [point for point in points if point.dataset == dataset]
    best, least = max(point.accuracy for point in shown), min(point.interval[0] for point in shown)
    low = math.floor(50 * max(0.0, best - 0.25, least)) / 50
    high = min(1.0, math.ceil(50 * max(point.interval[1] for point in shown)) / 50)
    marks = [text(60, 18, f"{DATASETS[dataset]}: test accuracy against what the deployed network costs")]
    series = sorted({(point.model, point.method) for point in shown})
    for column, cost in enumerate(COSTS):
        marks += _panel(shown, series, cost, 60 + 300 * column, (low, high))
    marks += _legend(series)
    return svg(960, 372 + 18 * math.ceil(len(series) / 3), marks)


def _panel(
    points: Sequence[Mean], series: Sequence[tuple[str, str]], cost: Cost, left: float, range_: tuple[float, float]
) -> list[str]:
    name, unit = COSTS[cost]
    values = [point.cost(cost) / unit for point in points]
    x, y = Axis(min(values) / 1.2, max(values) * 1.2, left, left + 250, log=True), Axis(*range_, 310, 40)
    marks = [text(left + 125, 346, name, "middle")]
    for tick in TICKS:
        if x.low <= tick <= x.high:
            marks += [line(x(tick), 40, x(tick), 310), text(x(tick), 326, f"{tick:g}", "middle", ' class="small"')]
    for step in range(round(range_[0] * 50), round(range_[1] * 50) + 1):
        label = text(left - 6, y(step / 50) + 3, f"{2 * step}%", "end", ' class="small"')
        marks += [line(left, y(step / 50), left + 250, y(step / 50)), label]
    for key in series:
        mine = [point for point in points if (point.model, point.method) == key]
        best = [point for point in frontier(mine, cost) if point.accuracy >= range_[0]]
        path = " ".join(f"{x(point.cost(cost) / unit):g},{y(point.accuracy):g}" for point in best)
        colour, dash = colour_of(key[1]), ' stroke-dasharray="4 3"' if key[0] == "resnet50" else ""
        marks.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.4"{dash}/>')
        marks += [_mark(x(point.cost(cost) / unit), point, y, key) for point in mine if point.accuracy >= range_[0]]
    return marks


def _mark(place: float, point: Mean, y: Axis, key: tuple[str, str]) -> str:
    """The point with its interval; hollow where pruning took several steps."""
    colour = colour_of(key[1])
    bar = f'<line x1="{place:g}" y1="{y(point.interval[0]):g}" x2="{place:g}" y2="{y(point.interval[1]):g}"'
    paint = f'fill="{"none" if "in steps" in key[1] else colour}" stroke="{colour}"'
    size = 4 if point.kind == "ours" else 3
    circle = f'<circle cx="{place:g}" cy="{y(point.accuracy):g}" r="{size}" {paint}/>'
    return f'{bar} stroke="{colour}" stroke-opacity="0.5"/>{circle}'


def _legend(series: Sequence[tuple[str, str]]) -> list[str]:
    marks = []
    for place, (model, method) in enumerate(series):
        left, top = 60 + 300 * (place % 3), 368 + 18 * (place // 3)
        paint = f'fill="{"none" if "in steps" in method else colour_of(method)}" stroke="{colour_of(method)}"'
        marks.append(f'<circle cx="{left}" cy="{top - 4}" r="4" {paint}/>')
        marks.append(
            text(left + 10, top, f"{method}{'' if 'lite' in model else ', from ' + MODEL_NAMES.get(model, model)}")
        )
    return marks


def colour_of(method: str) -> str:
    """The colour of a method; variants share that of what they vary.

    >>> colour_of("ours, by time") == colour_of("ours")
    True
    """
    return COLOURS.get(method.split(",")[0], "#4b5563")
