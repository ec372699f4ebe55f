"""A sweep from start to end: its cells are run, wherever there is room, and their results gathered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from basisprune.errors import CheckpointError, ConfigError, MissingExtraError
from basisprune.files import locked, read_checked, sealed, write_checked, write_text
from basisprune.listener import Listener, Silence
from basisprune.report.fronts import Front, SweepPage, write_sweep_page
from basisprune.runs.validating import differences
from basisprune.sweeps.cells import Cell
from basisprune.sweeps.file import CELLS, Sweep, read_sweep
from basisprune.sweeps.pools import Processes
from basisprune.sweeps.ray_pool import OnRay
from basisprune.sweeps.running import Running, closing, run_cells, started_by_a_launcher
from basisprune.sweeps.table import HEADER, SweepRow, as_cells, as_csv, as_json, points_of, row_of
from basisprune.sweeps.work import is_done
from basisprune.types import JsonValue as Value

_RECORD = "cells.json"
RESULTS, TABLE, PAGE = "sweep.json", "sweep.csv", "sweep.html"


@dataclass(frozen=True)
class SweepResult:
    """The rows of all cells, in the order of the file, and the folder they are in."""

    rows: tuple[SweepRow, ...]
    folder: Path

    @property
    def failed(self) -> tuple[SweepRow, ...]:
        """The cells that failed for good."""
        return tuple(row for row in self.rows if row.status == "failed")


@dataclass(frozen=True)
class _Record(Value):
    """All cells that were ever run in a folder, by name."""

    cells: dict[str, Cell]


def run_sweep(
    file: str | Path | Sweep,
    *,
    output: str | Path | None = None,
    jobs: int = 1,
    ray_address: str | None = None,
    trust_code: bool = False,
    listener: Listener | None = None,
) -> SweepResult:
    """The results of a sweep over models, datasets, frameworks and seeds, which a YAML file describes.

    Each cell is a run of `compress` in a folder of its own and in its own process: `jobs` at once here, or on the Ray
    cluster at `ray_address` ("auto", an address, or "local" for one that is started here). Cells that are done are not
    repeated, those that were stopped go on, and those that fail are tried again as often as the file says; one that
    fails for good is recorded with its error, and the others go on. The folder gets sweep.json, sweep.csv and
    sweep.html, with the Pareto front of each dataset; more cells may be added to the file later. Code that the file or
    its models name is imported only with `trust_code`.

    Raises ConfigError for faults of the file, and CheckpointError if the folder has cells with other options.
    """
    sweep = file if isinstance(file, Sweep) else read_sweep(file, output, trust_code=trust_code)
    if faults := started_by_a_launcher():
        raise ConfigError.of("run_sweep", faults)
    hears = listener or Silence()
    running = Running(jobs, ray_address, sweep.resources, sweep.retries)
    (sweep.output / CELLS).mkdir(parents=True, exist_ok=True)
    cells = list(sweep.cells.values())
    with locked(sweep.output):
        _claim(sweep.output, cells)
        with closing(Processes(running) if ray_address is None else OnRay(running)) as pool:
            outcomes = run_cells(cells, pool, running.retries, hears, done=is_done)
        rows = tuple(row_of(place, outcome) for place, outcome in zip(sweep.cells, outcomes, strict=True))
        _write(sweep.output, rows, hears)
    return SweepResult(rows, sweep.output)


def _claim(folder: Path, cells: Sequence[Cell]) -> None:
    """Records the cells; raises CheckpointError if one of them was begun with other settings."""
    path = folder / _RECORD
    known = _Record.from_json(read_checked(path)).cells if path.exists() else {}
    changes = [
        f"{cell.name}: {name}: {change}"
        for cell in cells
        if cell.name in known
        for name, change in differences(_settings(known[cell.name]), _settings(cell)).items()
    ]
    if changes:
        raise CheckpointError.of(f"{folder}: belongs to a sweep with other settings; use another folder", changes)
    write_checked(path, _Record({**known, **{cell.name: cell for cell in cells}}).to_json().encode())


def _settings(cell: Cell) -> dict[str, JsonValue]:
    named = {"model": cell.backbone.name, "data": cell.data, **cell.options}
    return {name: value for name, value in named.items() if name != "trust_code"}


def _write(folder: Path, rows: Sequence[SweepRow], listener: Listener) -> None:
    """Writes the results; the page only if its packages are installed."""
    fronts = points_of(rows)
    on_front = {name: [f"{p.group}, {p.name}" for p in points if p.front] for name, points in fronts.items()}
    content: dict[str, JsonValue] = {"cells": as_json(rows), "fronts": json.loads(json.dumps(on_front))}
    write_text(folder / RESULTS, sealed(json.dumps(content, indent=1)))
    write_text(folder / TABLE, as_csv(rows))
    failed = sum(row.status == "failed" for row in rows)
    said = f"{len(rows) - failed} of {len(rows)} cells are done" + (f", {failed} failed." if failed else ".")
    page = SweepPage(
        folder.name,
        said,
        HEADER,
        tuple(as_cells(rows)),
        tuple(Front(name, points) for name, points in fronts.items()),
        content,
    )
    try:
        write_sweep_page(page, folder / PAGE)
    except MissingExtraError as error:
        listener.say(f"{PAGE} is not written: {error}; its contents are in {RESULTS}")
