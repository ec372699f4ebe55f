"""The results of a sweep as rows, for JSON, CSV, the terminal and the page, and their Pareto fronts."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from pydantic import JsonValue, TypeAdapter

from basisprune.errors import CheckpointError
from basisprune.report.html import amount
from basisprune.report.text import csv_table, text_table
from basisprune.results import FrontPoint, Interval, RunSummary, read_sealed
from basisprune.runs.folder import SUMMARY
from basisprune.runs.train import TrainSummary
from basisprune.sweeps.running import RunResult, slug
from basisprune.types import read_json

BASELINE = "baseline"
HEADER = ("model", "dataset", "framework", "seed", "accuracy", "parameters", "multiply-adds", "one image", "outcome")


@dataclass(frozen=True)
class Cell:
    """One combination of a sweep, in the words of its file; an empty framework stands for that of the recipe."""

    model: str
    dataset: str
    framework: str
    seed: int

    @property
    def name(self) -> str:
        return slug("-".join(filter(None, [self.model, self.dataset, self.framework, str(self.seed)])))


@dataclass(frozen=True)
class SweepRow:
    """The result of one cell of a sweep; `before` is the unpruned network, as deployed.

    `images` are those that accuracies are measured on, "test" or "validation"; milliseconds are for one image, in the
    delivered file where there is one. `attempts` is 0 for a cell that was done by an earlier start.
    """

    model: str
    dataset: str
    framework: str
    seed: int
    status: Literal["done", "failed"]
    error: str = ""
    attempts: int = 0
    images: str = ""
    accuracy_before: float | None = None
    accuracy: float | None = None
    interval: Interval | None = None
    parameters_before: int | None = None
    parameters: int | None = None
    macs_before: int | None = None
    macs: int | None = None
    ms_before: float | None = None
    ms: float | None = None
    kept_to_budget: bool | None = None
    certified: bool | None = None
    backbone: str = ""
    folder: str = ""


def row_of(cell: Cell, result: RunResult) -> SweepRow:
    """Return the row of a cell, from the summary in its folder."""
    values: dict[str, Any] = {**asdict(cell), "attempts": result.attempts, "folder": str(result.run.folder)}
    if result.failure is not None:
        return SweepRow(**values, status="failed", error=result.failure.error)
    path = result.run.folder / SUMMARY
    found = _trained(path) if result.run.kind == "train" else _compressed(path)
    return SweepRow(**{**values, "status": "done", **found})


def _compressed(path: Path) -> dict[str, Any]:
    summary = RunSummary.read(path)
    before, after = (summary.test.before, summary.test.after) if summary.test else (summary.reference, summary.chosen)
    rows = () if summary.latency is None else summary.latency.rows
    times = {(row.backend, row.model): 1000 * row.seconds for row in rows if row.batch_size == 1}
    backend = next((backend for backend, _ in times), "")  # delivered files come first
    settings = (summary.config.get("search"), summary.config.get("recipe"))
    frameworks = (each.get("framework") for each in settings if isinstance(each, dict))
    values: dict[str, Any] = {
        "framework": str(next(filter(None, frameworks), "")),
        "images": "test" if summary.test else "validation",
        "interval": getattr(after, "interval", None),
        "ms_before": times.get((backend, "before")),
        "ms": times.get((backend, "after")),
        "kept_to_budget": summary.kept_to_budget,
        "certified": None if summary.certificate is None else summary.certificate.certified,
        "backbone": "" if summary.portfolio is None else summary.portfolio.recommended,
    }
    for name in ("accuracy", "parameters", "macs"):
        values |= {f"{name}_before": getattr(before, name), name: getattr(after, name, None)}
    return values


def _trained(path: Path) -> dict[str, Any]:
    text = json.dumps(read_sealed(path))
    summary = read_json(TrainSummary, text, CheckpointError, str(path), strict=False)
    judged = summary.test or summary.validation
    sizes = {"accuracy": judged and judged.accuracy, "parameters": summary.parameters, "macs": summary.macs}
    before = {f"{name}_before": value for name, value in sizes.items()}
    return sizes | before | {"interval": judged and judged.interval, "images": "test" if summary.test else "validation"}


def pareto_front(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """Mark the points on the Pareto front of accuracy, parameters and milliseconds; of equal ones, the first.

    Milliseconds are ignored if those of any point are unknown.

    >>> points = [FrontPoint("", name, accuracy, (0, 1), size, 0) for name, accuracy, size in
    ...           [("large", 0.9, 100), ("small", 0.8, 10), ("bad", 0.8, 50)]]
    >>> [point.name for point in pareto_front(points) if point.front]
    ['large', 'small']
    """
    is_timed = all(point.latency_ms is not None for point in points)
    rows = [(-each.accuracy, each.parameters, each.latency_ms if is_timed else 0) for each in points]
    costs = np.array(rows, dtype=float).reshape(-1, 3)
    as_good = (costs[:, None] <= costs).all(axis=2)  # the network of the row as that of the column
    is_better = as_good & (~as_good.T | np.triu(as_good, 1))
    return tuple(replace(point, front=not is_better[:, place].any()) for place, point in enumerate(points))


def fronts_of(rows: Sequence[SweepRow]) -> dict[str, tuple[FrontPoint, ...]]:
    """Return the Pareto front of each dataset, over all models, frameworks and seeds."""
    found: dict[str, list[FrontPoint]] = {row.dataset: [] for row in rows}
    for row in rows:
        if row.accuracy is not None and row.parameters is not None and row.macs is not None:
            name = f"{row.framework or BASELINE}, seed {row.seed}"
            interval = row.interval or (row.accuracy, row.accuracy)
            point = FrontPoint(row.model, name, row.accuracy, interval, row.parameters, row.macs, row.ms)
            found[row.dataset].append(point)
    return {dataset: pareto_front(points) for dataset, points in found.items()}


def as_csv(rows: Sequence[SweepRow]) -> str:
    """Format all values of the rows as CSV."""
    values = [asdict(row) | {"interval": " ".join(map(str, row.interval or ()))} for row in rows]
    return csv_table([each.name for each in fields(SweepRow)], [tuple(each.values()) for each in values])


def as_json(rows: Sequence[SweepRow]) -> list[JsonValue]:
    """Return the rows as JSON values."""
    return cast("list[JsonValue]", TypeAdapter(list[SweepRow]).dump_python(list(rows), mode="json"))


def as_cells(rows: Sequence[SweepRow]) -> list[tuple[str, ...]]:
    """Format the rows for people, under `HEADER`."""

    def change(row: SweepRow, name: str, form: Callable[[float], str]) -> str:
        before, after = getattr(row, f"{name}_before"), getattr(row, name)
        if after is None:
            return "-"
        return form(after) if before is None or before == after else f"{form(before)} > {form(after)}"

    short = lambda value: amount(value, "parameters").replace(" ", "")  # noqa: E731
    return [
        (
            row.model if not row.backbone else f"{row.model}: {row.backbone}",
            row.dataset,
            row.framework,
            str(row.seed),
            change(row, "accuracy", "{:.1%}".format),
            change(row, "parameters", short),
            change(row, "macs", short),
            change(row, "ms", "{:.3g} ms".format),
            _outcome(row),
        )
        for row in rows
    ]


def as_text(rows: Sequence[SweepRow]) -> str:
    """Format the rows as a text table."""
    return text_table(HEADER, as_cells(rows), left={0, 1, 2, 8})


def _outcome(row: SweepRow) -> str:
    if row.status == "failed":
        return f"failed: {row.error.splitlines()[0][:80]}"
    if row.kept_to_budget is None:
        return "trained"
    if not row.kept_to_budget:
        return "not within the budget"
    return {True: "certified", False: "estimated", None: "within the budget"}[row.certified]
