"""The results of a sweep's cells as rows: for JSON, CSV, the terminal and the page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Literal

from pydantic import JsonValue, TypeAdapter

from basisprune.files import unsealed
from basisprune.report.html import amount
from basisprune.report.text import csv_table, text_table
from basisprune.results import FrontPoint, Interval, RunSummary
from basisprune.runs.adapt import TrainSummary
from basisprune.runs.output import SUMMARY
from basisprune.sweeps.cells import Cell
from basisprune.sweeps.file import BASELINE, Coordinates
from basisprune.sweeps.front import with_front
from basisprune.sweeps.running import Outcome


@dataclass(frozen=True)
class SweepRow:
    """One cell of a sweep: what came of it. `images` says on which the accuracies are: "test" or "validation".

    `before` is the unpruned network. Sizes are those of the deployed form, of a baseline those of the trained one;
    milliseconds are those of one image, in the delivered file where there is one. `certified` is None where the budget
    is not about accuracy. `attempts` is 0 for a cell that was done by an earlier start.
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


HEADER = ("model", "dataset", "framework", "seed", "accuracy", "parameters", "multiply-adds", "one image", "outcome")


def row_of(place: Coordinates, outcome: Outcome) -> SweepRow:
    """The row of a cell, from the summary in its folder."""
    cell = outcome.cell
    head = (place.model, place.dataset, place.framework, place.seed)
    if outcome.failure is not None:
        error = outcome.failure.error
        return SweepRow(*head, "failed", error, outcome.attempts, folder=str(cell.folder))
    row = SweepRow(*head, "done", attempts=outcome.attempts, folder=str(cell.folder))
    return SweepRow(**{**asdict(row), **(_trained(cell) if cell.kind == "train" else _compressed(cell))})


def _compressed(cell: Cell) -> dict[str, object]:
    summary = RunSummary.read(cell.folder / SUMMARY)
    chosen = summary.chosen
    before, after = (summary.test.before, summary.test.after) if summary.test else (summary.reference, chosen)
    times = _milliseconds(summary)
    return {
        "framework": _framework(summary),
        "images": "test" if summary.test else "validation",
        "accuracy_before": before.accuracy,
        "accuracy": None if after is None else after.accuracy,
        "interval": None if after is None else after.interval,
        "parameters_before": before.parameters,
        "parameters": None if after is None else after.parameters,
        "macs_before": before.macs,
        "macs": None if after is None else after.macs,
        "ms_before": times[0],
        "ms": times[1],
        "kept_to_budget": summary.kept_to_budget,
        "certified": None if summary.certificate is None else summary.certificate.certified,
        "backbone": "" if summary.portfolio is None else summary.portfolio.recommended,
    }


def _framework(summary: RunSummary) -> str:
    """The framework that was asked for, or the recipe's."""
    search, recipe = summary.config.get("search"), summary.config.get("recipe")
    asked = search.get("framework") if isinstance(search, dict) else None
    return str(asked or (recipe.get("framework") if isinstance(recipe, dict) else ""))


def _milliseconds(summary: RunSummary) -> tuple[float | None, float | None]:
    """One image before and after: of the delivered files, which come first, or else of PyTorch."""
    rows = () if summary.latency is None else summary.latency.rows
    found = {(row.backend, row.model): 1000 * row.seconds for row in rows if row.batch_size == 1}
    backend = next((backend for backend, _ in found), "")
    return found.get((backend, "before")), found.get((backend, "after"))


def _trained(cell: Cell) -> dict[str, object]:
    summary = TypeAdapter(TrainSummary).validate_python(unsealed((cell.folder / SUMMARY).read_bytes()))
    judged = summary.test or summary.validation
    return {
        "images": "test" if summary.test else "validation",
        "accuracy_before": None if judged is None else judged.accuracy,
        "accuracy": None if judged is None else judged.accuracy,
        "interval": None if judged is None else judged.interval,
        "parameters_before": summary.parameters,
        "parameters": summary.parameters,
        "macs_before": summary.macs,
        "macs": summary.macs,
    }


def points_of(rows: Sequence[SweepRow]) -> dict[str, tuple[FrontPoint, ...]]:
    """The front of each dataset, over all models, frameworks and seeds."""
    found: dict[str, list[FrontPoint]] = {}
    for row in rows:
        points = found.setdefault(row.dataset, [])
        if row.accuracy is None or row.parameters is None or row.macs is None:
            continue
        name = f"{row.framework or BASELINE}, seed {row.seed}"
        interval = row.interval or (row.accuracy, row.accuracy)
        points.append(FrontPoint(row.model, name, row.accuracy, interval, row.parameters, row.macs, row.ms))
    return {dataset: with_front(points) for dataset, points in found.items()}


def as_csv(rows: Sequence[SweepRow]) -> str:
    """The rows with all their values."""
    names = [each.name for each in fields(SweepRow)]
    intervals = [" ".join(map(str, row.interval or ())) for row in rows]
    cells = [{**asdict(row), "interval": interval} for row, interval in zip(rows, intervals, strict=True)]
    return csv_table(names, [tuple(row[name] for name in names) for row in cells])


def as_json(rows: Sequence[SweepRow]) -> list[JsonValue]:
    """The rows as JSON values."""
    values: list[JsonValue] = TypeAdapter(list[SweepRow]).dump_python(list(rows), mode="json")
    return values


def as_cells(rows: Sequence[SweepRow]) -> list[tuple[str, ...]]:
    """The rows as texts, for `HEADER`."""
    return [
        (
            row.model if not row.backbone else f"{row.model}: {row.backbone}",
            row.dataset,
            row.framework,
            str(row.seed),
            _change(row.accuracy_before, row.accuracy, lambda value: f"{value:.1%}"),
            _change(row.parameters_before, row.parameters, _short),
            _change(row.macs_before, row.macs, _short),
            _change(row.ms_before, row.ms, lambda value: f"{value:.3g} ms"),
            _outcome(row),
        )
        for row in rows
    ]


def as_text(rows: Sequence[SweepRow]) -> str:
    """The rows as a text table."""
    return text_table(HEADER, as_cells(rows), left={0, 1, 2, 8})


def _outcome(row: SweepRow) -> str:
    if row.status == "failed":
        return f"failed: {row.error.splitlines()[0][:80]}"
    if row.kept_to_budget is None:
        return "trained"
    if not row.kept_to_budget:
        return "not within the budget"
    return {True: "certified", False: "estimated", None: "within the budget"}[row.certified]


def _change(before: float | None, after: float | None, shown: Callable[[float], str]) -> str:
    if after is None:
        return "-"
    return shown(after) if before is None or before == after else f"{shown(before)} > {shown(after)}"


def _short(value: float) -> str:
    return amount(value, "parameters").replace(" ", "")
