"""The result of a run or a sweep -> one self-contained HTML file for any screen, readable offline."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from basisprune.budget.metrics import in_points, in_words
from basisprune.errors import MissingExtraError
from basisprune.files import write_text
from basisprune.report.figures import (
    COSTS,
    FONT,
    PALETTE,
    Plot,
    error_plot,
    front_plots,
    importance_plots,
    layer_plot,
    search_plots,
    training_plots,
)
from basisprune.results import CandidateRow, FrontPoint, Interval, RunSummary, Side

if TYPE_CHECKING:
    from jinja2 import Environment
from basisprune.types import dotted

# A larger matrix is unreadable; only the classes most often confused are shown.
_MATRIX = 20
# Beyond this many classes the matrices would make the page too large.
_MOST_CLASSES = 100
_MINUS = "\u2212"


@dataclass(frozen=True)
class Row:
    """One row of the before-and-after table; `after` is None if no model was chosen."""

    key: str
    label: str
    before: float | None
    after: float | None
    intervals: tuple[Interval | None, Interval | None] = (None, None)


@dataclass(frozen=True)
class Speed:
    """The milliseconds per image in a runtime, before and after."""

    backend: str
    batch: int
    before: float
    after: float
    speedup: float


@dataclass(frozen=True)
class SweepPage:
    """What is on the page of a sweep: a table, the networks of each front by its title, and the same as JSON."""

    title: str
    message: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    fronts: Mapping[str, Sequence[FrontPoint]]
    data: Mapping[str, JsonValue]


def write_report(summary: RunSummary, path: str | Path) -> Path:
    """Write the report, one HTML file with the figures, tables and raw numbers of the run, and return its path.

    The file is self-contained and needs no network. The page also contains the summary as JSON, in the script
    element with the id "result". Raises MissingExtraError without jinja2.
    """
    path = Path(path)
    write_text(path, render_report(summary))
    return path


def write_sweep_page(page: SweepPage, path: Path) -> Path:
    """Write the page of a sweep likewise."""
    fronts = enumerate(page.fronts.items())
    plots = {title: front_plots(points, f"front-{place}") for place, (title, points) in fronts}
    write_text(path, _render("sweep.html", plots, page=page))
    return path


def render_report(summary: RunSummary) -> str:
    """Return the text of the report that `write_report` writes."""
    too_many = len(summary.classes) > _MOST_CLASSES and summary.confusion is not None
    if too_many:
        summary = replace(summary, confusion=None)
    shown = in_one_runtime(summary)
    rows, layers = comparison(shown), layer_plot(shown.layers)
    plots = {
        "portfolio": [] if summary.portfolio is None else front_plots(summary.portfolio.points),
        "search": search_plots(shown),
        "layers": [layers] if layers else [],
        "importance": importance_plots(summary.importance),
        "training": training_plots(summary),
        "errors": [] if summary.errors is None else [error_plot(summary.errors)],
    }
    first = {row.key: row for row in reversed(rows) if row.key != "bytes"}
    settings = [
        (name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in dotted(summary.config)
    ]
    return _render(
        "report.html",
        plots,
        result=shown,
        data=summary.as_dict(),
        rows=rows,
        certified=certified_in_words(summary),
        confusion=_matrices(summary),
        too_many_classes=too_many,
        speeds=_speeds(summary),
        metric_key=metric_key(summary),
        tiles=[row for row in rows if row is first.get(row.key)],
        settings=settings,
    )


def environment() -> Environment:
    """Return the environment of the templates; raises MissingExtraError without jinja2."""
    try:
        jinja2 = import_module("jinja2")
    except ModuleNotFoundError as error:
        raise MissingExtraError("jinja2", extra="report") from error
    environment: Environment = jinja2.Environment(
        loader=jinja2.PackageLoader("basisprune.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Keys keep the order of the result; tojson escapes anything that could end a script element.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    environment.filters.update(amount=amount, exact=exact, change=change, points=points, limit=_limit, number=number)
    return environment


def _render(template: str, plots: Mapping[str, Sequence[Plot]], **values: object) -> str:
    text: str = (
        environment()
        .get_template(template)
        .render(
            plots=plots,
            figures={plot.key: plot.figure for group in plots.values() for plot in group},
            palette=PALETTE,
            font=FONT,
            plotly=resources.files(__package__).joinpath("templates/plotly-basic.min.js").read_text(encoding="utf-8"),
            **values,
        )
    )
    return text


def comparison(summary: RunSummary) -> list[Row]:
    """Return the rows of the before-and-after table: accuracies, then costs, on the test images if there are any."""
    test, chosen, reference = summary.test, summary.chosen, summary.reference
    rows = []
    if test:
        rows.append(_accuracy_row(summary, "test", test.before, test.after))
    if chosen or not test:
        rows.append(_accuracy_row(summary, "validation", reference, chosen))
    before, after = (test.before, test.after) if test else (reference, chosen)
    rows += _latency_rows(summary)
    for cost, label in COSTS.items():
        if cost == "latency_ms" and summary.latency is not None:
            continue  # those of the delivered forms say more than the one that the search took
        values = getattr(before, cost), getattr(after, cost, None)
        if values[0] is not None and (values[1] is not None or after is None):
            rows.append(Row(cost, label, *values))
    return rows


def _latency_rows(summary: RunSummary) -> list[Row]:
    """One image in the runtime of the delivered file."""
    threads = 0 if summary.latency is None else summary.latency.threads
    on = f"{threads} thread{'' if threads == 1 else 's'}"
    singles = [speed for speed in _speeds(summary) if speed.batch == 1]
    return [Row("latency_ms", f"one image, {speed.backend}, {on}", speed.before, speed.after) for speed in singles[:1]]


def in_one_runtime(summary: RunSummary) -> RunSummary:
    """Leave out latencies of candidates that are of another runtime than that of the delivered file."""
    runtime = next((speed.backend for speed in _speeds(summary)), summary.latency_by)
    if summary.latency_by == runtime or summary.config.get("device") or summary.budget.quantity == "latency_ms":
        return summary
    rows = tuple(replace(each, latency_ms=None) for each in summary.candidates)
    return replace(summary, candidates=rows, reference=replace(summary.reference, latency_ms=None))


def certified_in_words(summary: RunSummary) -> str:
    """Say what the test of the delivered model found, or that of the first one if it failed."""
    certificate = summary.certificate
    if certificate is None or not certificate.tests:
        return ""
    test, form = certificate.delivered or certificate.tests[0], points if summary.metric_is_share else number
    is_drop, unit = summary.budget.kind == "max_drop", " points" if summary.metric_is_share else ""
    metric = in_words(certificate.metric)
    model, what = "delivered" if test.passed else "first", "images" if summary.task == "classification" else "examples"
    bound = f"loss is at most {form(test.bound)}{unit} of {metric}"
    known = bound if is_drop else f"{metric} is at least {amount(test.bound, metric_key(summary))}"
    counted = summary.task == "classification" or test.lost or test.won
    changed = f"The {model} model is worse than the unpruned one on {test.lost:,} {what}, and better on {test.won:,}. "
    sure = f"With {100 * certificate.confidence:.3g}% confidence, its true {known}"
    outcome = "within the budget" if test.passed else "not within the budget"
    return f"{changed if counted else ''}{sure}: {outcome}."


def _accuracy_row(summary: RunSummary, part: str, before: Side, after: Side | CandidateRow | None) -> Row:
    key, label = metric_key(summary), f"{part} {summary.metric}"
    if after is None:
        return Row(key, label, before.accuracy, None, (before.interval, None))
    return Row(key, label, before.accuracy, after.accuracy, (before.interval, after.interval))


def metric_key(summary: RunSummary) -> str:
    """Return the kind of value that the metric is: shares are shown as accuracies are."""
    return "accuracy" if summary.metric_is_share else "number"


@dataclass(frozen=True)
class Cell:
    """How often one class was predicted as another, and how strongly to colour the cell."""

    count: int
    share: float


@dataclass(frozen=True)
class Matrices:
    """The confusion matrices of the classes shown, and the number of all classes."""

    classes: list[str]
    all: int
    tables: dict[str, list[list[Cell]]]


def _matrices(summary: RunSummary) -> Matrices | None:
    """The confusion matrices, for all classes or for those most often confused."""
    confusion, classes = summary.confusion, summary.classes
    if not confusion:
        return None
    sides = {"before": confusion.before, "after": confusion.after}
    shown = list(range(len(classes)))
    if len(classes) > _MATRIX:
        wrong = {index: sum(_mistakes(matrix, index) for matrix in sides.values()) for index in shown}
        shown = sorted(sorted(shown, key=lambda index: -wrong[index])[:_MATRIX])
    tables = {
        side: [[Cell(matrix[i][j], math.sqrt(matrix[i][j] / max(sum(matrix[i]), 1))) for j in shown] for i in shown]
        for side, matrix in sides.items()
    }
    return Matrices([classes[index] for index in shown], len(classes), tables)


def _speeds(summary: RunSummary) -> list[Speed]:
    """The rows of the latency table: milliseconds per image before and after, by runtime, PyTorch last, and batch."""
    if summary.latency is None:
        return []
    found = {(row.model, row.backend, row.batch_size): row for row in summary.latency.rows}
    names = {"onnxruntime": "ONNX Runtime", "eager": "PyTorch"}
    speeds = []
    for (model, backend, batch), row in found.items():
        if model == "before":
            after = found["after", backend, batch]
            before_ms, after_ms = (1000 * each.seconds / batch for each in (row, after))
            speeds.append(Speed(names.get(backend, backend), batch, before_ms, after_ms, after.speedup))
    return sorted(speeds, key=lambda speed: speed.backend == names["eager"])


def _mistakes(matrix: Sequence[Sequence[int]], index: int) -> int:
    """How often the class was predicted as another, or another as it."""
    return sum(matrix[index]) + sum(row[index] for row in matrix) - 2 * matrix[index][index]


def percent(value: float) -> str:
    """Format a fraction as a percentage.

    >>> percent(0.9734)
    '97.3%'
    """
    return f"{value:.1%}".replace("-", _MINUS)


def points(value: float) -> str:
    """Format a fraction in percentage points, without a unit.

    >>> points(0.0042)
    '0.4'
    """
    return f"{100 * value:.1f}".replace("-", _MINUS)


def number(value: float) -> str:
    """Format a number that is no share, with four digits.

    >>> number(12.34567)
    '12.35'
    """
    return f"{value:.4g}".replace("-", _MINUS)


def amount(value: float | None, key: str) -> str:
    """Format a value of that kind, short enough to read at a glance.

    >>> amount(4_651_234, "macs"), amount(812, "parameters"), amount(0.5, "accuracy"), amount(3.14159, "latency_ms")
    ('4.65 M', '812', '50.0%', '3.14 ms')
    >>> amount(4_651_234, "bytes")
    '4.65 MB'
    """
    if value is None:
        return "\u2013"
    if key in ("accuracy", "number"):
        return percent(value) if key == "accuracy" else number(value)
    if key == "latency_ms":
        return f"{_three_digits(value)} ms"
    if key == "bytes":
        return amount(value, "parameters") + ("B" if value >= 1e3 else " B")
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{value:g}"


def _three_digits(value: float) -> str:
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:,.0f}"


def exact(value: float | None, key: str) -> str:
    """Format a value of that kind with all digits a table needs.

    >>> exact(4_651_234, "macs"), exact(0.9734, "accuracy")
    ('4,651,234', '97.3%')
    """
    return f"{value:,}" if isinstance(value, int) and key in ("parameters", "macs") else amount(value, key)


def change(row: Row) -> str:
    """Format the change from before to after: points of accuracy, or the relative change of a cost.

    >>> change(Row("macs", "multiply-adds", 400, 100)) == "\u221275.0%"
    True
    """
    before, after = row.before, row.after
    if after is not None and before is not None and row.key == "number":
        return f"{after - before:+.3g}".replace("-", _MINUS)
    if after is None or not before:
        return ""
    if row.key == "accuracy":
        return f"{100 * (after - before):+.1f} points".replace("-", _MINUS)
    return f"{after / before - 1:+.1%}".replace("-", _MINUS)


def _limit(summary: RunSummary) -> str:
    """Word the limit of the search as a sentence."""
    metric = summary.metric if summary.certificate is None else in_words(summary.certificate.metric)
    kind, value, quantity = summary.budget.kind, summary.budget.value, summary.budget.quantity
    if quantity is None or value is None:
        return "The ratios were fixed."
    if quantity == "accuracy" and not summary.metric_is_share:
        return f"Limit: {'lose at most' if kind == 'max_drop' else 'at least'} {number(value)} of {metric}."
    if kind == "max_drop":
        return f"Limit: lose at most {in_points(value)} of {metric}."
    if kind == "min_accuracy":
        return f"Limit: at least {percent(value)} {metric}."
    if quantity == "latency_ms":
        return f"Limit: a latency of at most {amount(value, quantity)}."
    return f"Limit: at most {amount(value, quantity)} {COSTS[quantity]}."
