"""Results of `parts.py` -> a table of what is lost or gained when a part of the method is replaced."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev

from field_figures import MODEL_NAMES
from field_points import Record
from sections import table

Place = tuple[str, str, int]
"""Network, dataset and seed."""


def parts_tables(records: Sequence[Record]) -> str:
    """A table for each share that goes, of filters and then of basis vectors; the smallest first.

    >>> parts_tables([])
    'Not run.'
    """
    by_share: dict[float, list[Record]] = {}
    for record in records:
        by_share.setdefault(record["config"]["size"][0], []).append(record)
    tables = [
        f"### {share:.0%} of the filters and of the basis vectors removed\n\n{parts_table(by_share[share])}"
        for share in sorted(by_share)
    ]
    return "\n\n".join(tables) or "Not run."


def parts_table(records: Sequence[Record]) -> str:
    """A row for each part: the accuracy with something else in its place less that of ours, tuned and before that.

    Cells of the same network, dataset and seed are compared; what loses most comes first.
    """
    ours = {_place(record): record for record in records if record["part"] == "ours"}
    models = [model for model in MODEL_NAMES if any(place[0] == model for place in ours)]
    replaced: dict[str, list[Record]] = {}
    for record in records:
        if record["part"] != "ours" and _place(record) in ours:
            replaced.setdefault(record["part"], []).append(record)
    rows = []
    for name, cells in sorted(replaced.items(), key=lambda each: mean(differences(each[1], ours, "accuracy"))):
        by_model = [[cell for cell in cells if cell["model"] == model] for model in models]
        gains = [shown(differences(group, ours, "accuracy")) for group in by_model]
        untuned = [shown(differences(group, ours, "untuned")) for group in by_model]
        size = mean(cell["parameters"] / ours[_place(cell)]["parameters"] for cell in cells)
        texts = (name, cells[0]["ours"], cells[0]["instead"])
        rows.append((*texts, *gains, *untuned, f"{size:.2f}", str(len(cells))))
    names = [MODEL_NAMES[model] for model in models]
    return table(
        ("Part", "Ours", "Instead", *names, *(f"{name}, untuned" for name in names), "Parameters", "Runs"), rows
    )


def differences(cells: Sequence[Record], ours: Mapping[Place, Record], value: str) -> list[float]:
    """What each cell has more than ours at the same place, in points."""
    return [100 * (cell[value] - ours[_place(cell)][value]) for cell in cells]


def shown(points: Sequence[float]) -> str:
    """The mean, with its standard error where there are several.

    >>> shown([1.0]), shown([-1.0, -2.0]), shown([])
    ('+1.0', '-1.5 ± 0.5', '')
    """
    if not points:
        return ""
    error = f" ± {stdev(points) / math.sqrt(len(points)):.1f}" if len(points) > 1 else ""
    return f"{mean(points):+.1f}{error}"


def _place(record: Record) -> Place:
    return record["model"], record["dataset"], record["seed"]
