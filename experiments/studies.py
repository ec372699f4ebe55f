"""The results of a study: a line of JSON for each cell in STUDY.jsonl, and what they have in common in STUDY.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from basisprune.files import write_text

Record: TypeAlias = dict[str, Any]
COMMON = ("preset", "versions", "device")


def read(study: Path) -> dict[str, Record]:
    """The results by the names of their cells; none where the study has no file."""
    if not study.exists():
        return {}
    common = json.loads(study.with_suffix(".json").read_text())
    rows = [json.loads(line) for line in study.read_text().splitlines()]
    return {row.pop("cell"): common | row for row in rows}


def write(study: Path, results: Mapping[str, Record]) -> None:
    """Write all results, sorted by the names of their cells."""
    beside = study.with_suffix(".json")
    if not beside.exists():
        first = next(iter(results.values()))
        write_text(beside, json.dumps({key: first[key] for key in COMMON if key in first}, indent=1) + "\n")
    common = json.loads(beside.read_text())
    lines = [
        json.dumps({"cell": cell} | {key: value for key, value in result.items() if common.get(key, ...) != value})
        for cell, result in sorted(results.items())
    ]
    write_text(study, "\n".join(lines) + "\n")


def add(study: Path, cell: str, result: Record) -> None:
    """Write one more result; a run that was stopped goes on behind it."""
    write(study, {**read(study), cell: result})
