"""A sweep over models, datasets, frameworks and seeds: from its YAML file to the results of all cells."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from basisprune.budget.goal import AMOUNT
from basisprune.callback import Callback, NullCallback
from basisprune.errors import CheckpointError, ConfigError, MissingExtraError, nearest
from basisprune.files import locked, sealed, write_text
from basisprune.report.html import SweepPage, write_sweep_page
from basisprune.runs.folder import refuse_links
from basisprune.runs.load import code_of
from basisprune.runs.parsing import changed, differences, faults_of, read_settings
from basisprune.runs.settings import BUDGETS, OBJECTS, OPTIONS, RATIOS, Options, configure
from basisprune.sweeps.backbones import AUTO, is_timm
from basisprune.sweeps.running import (
    Backbone,
    Kind,
    Resources,
    Run,
    Running,
    absolute,
    open_pool,
    refuse_launcher,
    run_all,
)
from basisprune.sweeps.table import BASELINE, HEADER, Cell, SweepRow, as_cells, as_csv, as_json, fronts_of, row_of
from basisprune.sweeps.worker import is_done
from basisprune.types import FrameworkName
from basisprune.types import JsonValue as Value

CELLS, RESULTS, TABLE, PAGE = "cells", "sweep.json", "sweep.csv", "sweep.html"
_RECORD = "cells.json"
_OWN = {"framework", "seed"}  # options that the file has lists for
_PATHS = ("device", "groups", "weights")
_MOST_CELLS = 10_000


@dataclass(frozen=True)
class Sweep:
    """The runs of a sweep by their cells, and where they are done."""

    cells: Mapping[Cell, Run]
    running: Running
    output: Path


@dataclass(frozen=True)
class SweepResult:
    """The rows of all cells, in the order of the file, and their folder."""

    rows: tuple[SweepRow, ...]
    folder: Path

    @property
    def failed(self) -> tuple[SweepRow, ...]:
        return tuple(row for row in self.rows if row.status == "failed")


@dataclass(frozen=True)
class _Entry:
    """A model or a dataset of the file: its name there, and options of its own."""

    name: str | None = None
    model: str | None = None
    data: str | None = None
    options: dict[str, JsonValue] | None = None


@dataclass(frozen=True)
class _File:
    models: tuple[JsonValue, ...] = ()
    datasets: tuple[JsonValue, ...] = ()
    frameworks: tuple[FrameworkName, ...] = ()
    seeds: tuple[int, ...] = (0,)
    options: dict[str, JsonValue] | None = None
    resources: dict[str, JsonValue] | None = None
    retries: int = 2
    output: str | None = None


@dataclass(frozen=True)
class _Record(Value):
    """The settings of all runs that were ever begun in a folder, by name."""

    cells: dict[str, dict[str, JsonValue]]


def run_sweep(
    file: str | Path | Sweep,
    *,
    output: str | Path | None = None,
    jobs: int = 1,
    ray_address: str | None = None,
    trust_code: bool = False,
    callback: Callback | None = None,
) -> SweepResult:
    """Run a sweep over models, datasets, frameworks and seeds, which a YAML file describes.

    Each cell is a run of `compress` in a folder and a process of its own. Finished cells are not repeated, stopped ones
    resume, and failed ones are repeated as often as the file says; a cell that fails every time is recorded with its
    error. The folder gets sweep.json, sweep.csv and sweep.html, with the Pareto front of each dataset. Cells may be
    added to the file later.

    Args:
        file: The YAML file, or what `read_sweep` returned for it.
        output: The folder for all results, by default the one that the file names.
        jobs: The number of processes on this machine.
        ray_address: A Ray cluster: its address, "auto", or "local" to start one on this machine.
        trust_code: Import the code that the file or its models name.
        callback: Receives the progress.

    Returns:
        One row for each cell.

    Raises:
        ConfigError: For faults in the file, all at once.
        CheckpointError: If the folder has cells with other options.

    Example: `run_sweep("sweep.yaml", jobs=2).rows`
    """
    sweep = file if isinstance(file, Sweep) else read_sweep(file, output, trust_code=trust_code)
    refuse_launcher("run_sweep")
    callback, folder = callback or NullCallback(), sweep.output
    running = replace(sweep.running, jobs=jobs, ray_address=ray_address)
    (folder / CELLS).mkdir(parents=True, exist_ok=True)
    runs = list(sweep.cells.values())
    with locked(folder):
        _claim(folder, runs)
        with open_pool(running, callback) as pool:
            results = run_all(runs, pool, running.retries, callback, done=is_done)
        rows = tuple(row_of(cell, result) for cell, result in zip(sweep.cells, results, strict=True))
        _write(folder, rows, callback)
    return SweepResult(rows, folder)


def read_sweep(path: str | Path, output: str | Path | None = None, *, trust_code: bool = False) -> Sweep:
    """Read the sweep that a YAML file describes, with its results in `output`, or in the folder that the file names.

    Raises ConfigError that lists all faults with their places, code that is not allowed by `trust_code` among them.
    """
    where = str(path)
    given, faults = changed(_File(), read_settings(path), where), list[str]()
    faults += [
        f"{name}: {list(values)} given; a list of different values is needed"
        for name, values in (("frameworks", given.frameworks), ("seeds", given.seeds))
        if len(set(values)) < len(values) or (not values and name == "seeds")
    ]
    if output is None and given.output is None:
        faults.append("output: not given; name the folder for the results here, or pass --output")
    models = _entries(given.models, "models", "model", faults)
    datasets = _entries(given.datasets, "datasets", "data", faults)
    shared = _options(given.options, "options", faults)
    running = Running()
    with _faults_into(faults):
        running = Running(retries=given.retries)
    with _faults_into(faults, "resources."):
        running = replace(running, resources=_resources(given.resources or {}))
    lists = models, datasets, given.frameworks or ("",), given.seeds
    if (count := math.prod(map(len, lists))) > _MOST_CELLS:
        faults.append(f"{count:,} cells described; at most {_MOST_CELLS:,} are allowed, so divide the file")
    faults += [] if trust_code else _code_in([*models, *datasets, _Entry(options=shared)])
    if faults:
        raise ConfigError.of(where, faults)
    folder = Path(output or given.output or "").expanduser().resolve()
    if os.path.lexists(folder / CELLS):
        refuse_links(folder)
    cells = dict(_cell(*each, shared, folder) for each in product(*lists))
    for run in cells.values():
        run.options.update({"trust_code": True} if trust_code else {})
        with _faults_into(faults, f"{run.name}: "):
            configure(cast("Options", run.options))
            if run.backbone.name == AUTO and run.kind == "train":
                raise ConfigError(f"the framework {BASELINE!r} needs one model, and {AUTO!r} given")
    # Folders of a-b on c and of a on b-c would be the same; some file systems do not tell A from a.
    twice = _repeated(cell.name.casefold() for cell in cells)
    faults += [f"{name}: {count} cells have this name; rename models or datasets" for name, count in twice.items()]
    if faults:
        raise ConfigError.of(where, faults)
    return Sweep(cells, running, folder)


def _resources(given: Mapping[str, JsonValue]) -> Resources:
    memory = given.get("memory")
    needs = {**given, "memory": AMOUNT.parse(memory)} if isinstance(memory, str) else given
    return changed(Resources(), needs, "resources")


def _cell(
    model: _Entry, data: _Entry, framework: str, seed: int, shared: Mapping[str, JsonValue], folder: Path
) -> tuple[Cell, Run]:
    cell = Cell(str(model.name), str(data.name), framework, seed)
    options = _merged(shared, model.options or {}, data.options or {}) | {"seed": seed}
    options |= {"framework": framework} if framework not in ("", BASELINE) else {}
    kind: Kind = "train" if framework == BASELINE else "compress"
    return cell, Run(cell.name, kind, folder / CELLS / cell.name, Backbone(str(model.model)), str(data.data), options)


def _code_in(entries: Sequence[_Entry]) -> list[str]:
    found = [name for each in entries for _, name in code_of(each.model, each.data, (each.options or {}).get("task"))]
    return [
        f"{name!r} would import and run code; if you trust the author of the file, pass trust_code=True (--trust-code)"
        for name in dict.fromkeys(found)
    ]


def _entries(given: Sequence[JsonValue], where: str, key: str, faults: list[str]) -> list[_Entry]:
    found: list[_Entry] = []
    for number, value in enumerate(given):
        here = f"{where}[{number}]"
        with _faults_into(faults, f"{here}."):
            entry = changed(_Entry(), {key: value} if isinstance(value, str) else value, here)
            source = getattr(entry, key)
            if source is None or (entry.model is not None and entry.data is not None):
                needed = f"a name, or a mapping with {key}, name and options is needed"
                raise ConfigError(f"{key}: {value!r} given; {needed}")
            options = _options(entry.options, f"{here}.options", faults)
            place = source if is_timm(source) else absolute(source)
            short = Path(source.rpartition(":")[2]).name or source  # birds of /photos/birds
            found.append(_Entry(entry.name or short, **{key: place}, options=options))
    twice = _repeated(str(entry.name) for entry in found)
    faults += [f"{where}: {name!r} is there twice; give each a name of its own" for name in sorted(twice)]
    if not given:
        faults.append(f"{where}: none given; a list of {where} is needed")
    return found


def _repeated(names: Iterable[str]) -> dict[str, int]:
    return {name: count for name, count in Counter(names).items() if count > 1}


def _options(given: Mapping[str, JsonValue] | None, where: str, faults: list[str]) -> dict[str, JsonValue]:
    known = OPTIONS.keys() - _OWN
    found: dict[str, JsonValue] = {}
    for name, value in (given or {}).items():
        if name in _OWN:
            faults.append(f"{where}.{name}: is varied by the sweep; put it under {name}s")
        elif name == "trust_code":
            faults.append(f"{where}.{name}: a file cannot vouch for itself; pass trust_code=True (--trust-code)")
        elif name not in known:
            faults.append(f"{where}.{name}: no such setting.{nearest(name, known)}")
        else:
            with _faults_into(faults, f"{where}.{name}: "):
                if isinstance(value, str) and (unit := OPTIONS[name].unit) is not None:
                    value = unit.parse(value)
                found[name] = absolute(value) if isinstance(value, str) and name in _PATHS else value
                if name not in OBJECTS:
                    faults += faults_of(found[name], OPTIONS[name].type, f"{where}.{name}")
    return found


@contextmanager
def _faults_into(faults: list[str], prefix: str = "") -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        faults += [f"{prefix}{fault}" for fault in error.faults]


def _merged(*layers: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    goals = {*BUDGETS, *RATIOS}
    found: dict[str, JsonValue] = {}
    for layer in layers:
        if goals & layer.keys():
            found = {name: value for name, value in found.items() if name not in goals}
        found |= layer
    return found


def _claim(folder: Path, runs: Sequence[Run]) -> None:
    """Record the settings of all runs; raise CheckpointError if one of them was begun with others."""
    path = folder / _RECORD
    settings = {run.name: {"model": run.backbone.name, "data": run.data, **run.options} for run in runs}
    for each in settings.values():
        each.pop("trust_code", None)
    known = _Record.read(path).cells if path.exists() else {}
    changes = [
        f"{name}: {setting}: {change}"
        for name in settings
        for setting, change in differences(known.get(name, settings[name]), settings[name]).items()
    ]
    if changes:
        raise CheckpointError.of(f"{folder}: belongs to a sweep with other settings; use another folder", changes)
    _Record({**known, **settings}).write(path)


def _write(folder: Path, rows: Sequence[SweepRow], callback: Callback) -> None:
    fronts = fronts_of(rows)
    on_front: dict[str, JsonValue] = {
        name: [f"{point.group}, {point.name}" for point in points if point.front] for name, points in fronts.items()
    }
    content: dict[str, JsonValue] = {"cells": as_json(rows), "fronts": on_front}
    write_text(folder / RESULTS, sealed(json.dumps(content, indent=1)))
    write_text(folder / TABLE, as_csv(rows))
    failed = sum(row.status == "failed" for row in rows)
    message = f"{len(rows) - failed} of {len(rows)} cells are done" + (f", {failed} failed." if failed else ".")
    page = SweepPage(folder.name, message, HEADER, tuple(as_cells(rows)), fronts, content)
    try:
        write_sweep_page(page, folder / PAGE)
    except MissingExtraError as error:
        callback.log(f"{PAGE} is not written: {error}; its contents are in {RESULTS}")
