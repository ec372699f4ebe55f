"""A search's result -> one HTML file that explains itself, offline, on any screen."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from importlib import import_module, resources
from pathlib import Path
from typing import Any

from basisprune.errors import ConfigError, MissingExtraError
from basisprune.files import write_text
from basisprune.report.figures import (
    COSTS,
    FONT,
    PALETTE,
    Plot,
    graph_objects,
    importance_plots,
    rank_plot,
    search_plots,
    status_of,
    target_of,
    training_plots,
)
from basisprune.types import dotted

_NEEDED = (
    *("title", "command", "config", "seed", "versions", "device", "created", "verdict"),
    *("budget", "classes", "reference", "candidates", "layers"),
)
# A matrix of more classes than this cannot be read; the ones most often confused are shown.
_MATRIX = 20
# Beyond this many classes the matrices would make the page too large.
_MOST_CLASSES = 100
_MINUS = "\u2212"


def write_report(result: Mapping[str, Any], path: str | Path) -> Path:
    """The path of the report: one HTML file with the figures, tables and raw numbers of the result.

    The file needs nothing beside it and nothing from the network. `result` is what JSON can hold; numbers that
    are not finite become null. It is in the page as JSON too, in the script element with the id "result".
    Raises ConfigError for a result that lacks a part, MissingExtraError without plotly or jinja2.
    """
    path = Path(path)
    write_text(path, render_report(result))
    return path


def render_report(result: Mapping[str, Any]) -> str:
    """The text of the report that `write_report` writes."""
    missing = [key for key in _NEEDED if key not in result]
    if missing:
        raise ConfigError.of(
            "report", [f"the result has no {key!r}; every result of a search has one" for key in missing]
        )
    graph_objects()  # refuse before any work, not half-way
    plain = _plain(result)
    if len(plain["classes"]) > _MOST_CLASSES:
        plain.pop("confusion", None)
    plots = _plots(plain)
    template = _environment().get_template("report.html")
    text: str = template.render(
        result=plain,
        chosen=_chosen(plain),
        rows=comparison(plain),
        plots=plots,
        figures={plot.key: plot.figure for group in plots.values() for plot in group},
        confusion=_matrices(plain),
        too_many_classes=len(plain["classes"]) > _MOST_CLASSES and bool(result.get("confusion")),
        speeds=_speeds(plain),
        changed=plain.get("changed"),
        settings=[(name, _said(value)) for name, value in dotted(plain["config"])],
        palette=PALETTE,
        font=FONT,
        plotly=resources.files(__package__).joinpath("templates/plotly-basic.min.js").read_text(encoding="utf-8"),
    )
    return text


def comparison(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of the table before and after: accuracies, then costs; `after` is None where no model was chosen.

    Costs are those of the test where there is one.
    """
    test, chosen, reference = result.get("test"), _chosen(result), result["reference"]
    rows = []
    if test:
        rows.append(_row("accuracy", "test accuracy", test["before"], test["after"]))
    if chosen or not test:
        rows.append(_row("accuracy", "validation accuracy", reference, chosen))
    before, after = (test["before"], test["after"]) if test else (reference, chosen)
    for cost, label in COSTS.items():
        row = _row(cost, label, before, after)
        if row["before"] is not None and (row["after"] is not None or not after):
            rows.append(row)
    return rows


def _row(key: str, label: str, before: Mapping[str, Any], after: Mapping[str, Any] | None) -> dict[str, Any]:
    intervals = [side.get("interval") if side and key == "accuracy" else None for side in (before, after)]
    values = before.get(key), after.get(key) if after else None
    return {"key": key, "label": label, "before": values[0], "after": values[1], "intervals": intervals}


def _chosen(result: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((candidate for candidate in result["candidates"] if candidate["chosen"]), None)


def _plots(result: Mapping[str, Any]) -> dict[str, list[Plot]]:
    ranks = rank_plot(result["layers"])
    return {
        "search": search_plots(result),
        "ranks": [ranks] if ranks else [],
        "importance": importance_plots(result.get("importance") or {}),
        "training": training_plots(result["candidates"]),
    }


def _matrices(result: Mapping[str, Any]) -> dict[str, Any] | None:
    """The confusion matrices of the classes that are shown: all, or those most often confused."""
    confusion, classes = result.get("confusion"), result["classes"]
    if not confusion:
        return None
    shown = list(range(len(classes)))
    if len(classes) > _MATRIX:
        wrong = {index: sum(_mistakes(matrix, index) for matrix in confusion.values()) for index in shown}
        shown = sorted(sorted(shown, key=lambda index: -wrong[index])[:_MATRIX])
    tables = {
        side: [
            [{"count": matrix[i][j], "share": math.sqrt(matrix[i][j] / max(sum(matrix[i]), 1))} for j in shown]
            for i in shown
        ]
        for side, matrix in confusion.items()
        if side in ("before", "after")
    }
    return {"classes": [classes[index] for index in shown], "all": len(classes), "tables": tables}


def _speeds(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of the table of latencies: for each setting the milliseconds for one image, before and after."""
    latency = result.get("latency")
    if not latency:
        return []
    found = {(row["model"], row["backend"], row["batch_size"]): row for row in latency["rows"]}
    names = {"eager": "PyTorch", "onnxruntime": "ONNX Runtime"}
    return [
        {
            "backend": names.get(backend, backend),
            "batch": batch,
            "before": 1000 * row["seconds"] / batch,
            "after": 1000 * found["after", backend, batch]["seconds"] / batch,
            "speedup": found["after", backend, batch]["speedup"],
        }
        for (model, backend, batch), row in found.items()
        if model == "before"
    ]


def _mistakes(matrix: Sequence[Sequence[int]], index: int) -> int:
    """How often the class was taken for another or another for it."""
    return sum(matrix[index]) + sum(row[index] for row in matrix) - 2 * matrix[index][index]


def _plain(value: Any) -> Any:
    """The value as JSON has it: tuples are lists, keys are text, what is not finite is None, the rest is text.

    >>> _plain({"a": (1, float("nan")), 2: Path("x")})
    {'a': [1, None], '2': 'x'}
    """
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)


def _said(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _environment() -> Any:
    try:
        jinja2 = import_module("jinja2")
    except ModuleNotFoundError as error:
        raise MissingExtraError("jinja2", extra="report") from error
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("basisprune.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The order of keys is that of the result; tojson escapes what could end a script element.
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    environment.filters.update(amount=amount, exact=exact, change=change, points=points)
    environment.filters.update(limit=_limit, status=status_of)
    return environment


def percent(value: float) -> str:
    """A fraction in per cent.

    >>> percent(0.9734)
    '97.3 %'
    """
    return f"{value:.1%}".replace("%", " %").replace("-", _MINUS)


def points(value: float) -> str:
    """A fraction in points of a hundred, without a unit.

    >>> points(0.0042)
    '0.4'
    """
    return f"{100 * value:.1f}".replace("-", _MINUS)


def amount(value: float | None, key: str) -> str:
    """A value of that kind, short enough to be read at a glance.

    >>> amount(4_651_234, "macs"), amount(812, "parameters"), amount(0.5, "accuracy"), amount(3.14159, "latency_ms")
    ('4.65 M', '812', '50.0 %', '3.14 ms')
    >>> amount(4_651_234, "bytes")
    '4.65 MB'
    """
    if value is None:
        return "\u2013"
    if key == "accuracy":
        return percent(value)
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
    """A value of that kind with all the digits that a table needs.

    >>> exact(4_651_234, "macs"), exact(0.9734, "accuracy")
    ('4,651,234', '97.3 %')
    """
    return f"{value:,}" if isinstance(value, int) and key in ("parameters", "macs") else amount(value, key)


def change(row: Mapping[str, Any]) -> str:
    """What changed from before to after: points of accuracy, or the share of a cost.

    >>> change({"key": "macs", "before": 400, "after": 100}) == "\u221275.0 %"
    True
    """
    before, after = row["before"], row["after"]
    if after is None or not before:
        return ""
    if row["key"] == "accuracy":
        return f"{100 * (after - before):+.1f} points".replace("-", _MINUS)
    return f"{after / before - 1:+.1%}".replace("%", " %").replace("-", _MINUS)


def _limit(result: Mapping[str, Any]) -> str:
    """What the search had to keep to, as a sentence."""
    kind, value = result["budget"]["kind"], result["budget"]["value"]
    target = target_of(result["budget"], result["reference"])
    if target is None:
        return "The ratios were given."
    if kind == "max_drop":
        unit = "point" if value == 0.01 else "points"
        return f"At most {100 * value:.3g} {unit} of accuracy could be lost on the validation images."
    if kind == "min_accuracy":
        return f"An accuracy of at least {percent(value)} on the validation images was asked for."
    cost, most = target
    if cost == "latency_ms":
        return f"A latency of at most {amount(most, cost)} was asked for."
    return f"At most {amount(most, cost)} {COSTS[cost]} were asked for."
