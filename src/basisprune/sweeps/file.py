"""The file of a sweep, models x datasets x frameworks x seeds, -> its cells; all faults are told at once."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from basisprune.errors import ConfigError, nearest
from basisprune.frameworks import FrameworkName
from basisprune.runs.job import code_of
from basisprune.runs.options import BUDGETS, RATIOS, Options, configure
from basisprune.runs.output import refuse_links
from basisprune.runs.settings import AMOUNT, OBJECTS, OPTIONS
from basisprune.runs.validating import changed, faults_of, read_settings
from basisprune.sweeps.backbones import AUTO, is_timm
from basisprune.sweeps.cells import Backbone, Cell, Kind, absolute, slug
from basisprune.sweeps.running import Resources

BASELINE = "baseline"
CELLS = "cells"
_OWN = ("framework", "seed")  # what the file has lists for
_PATHS = ("device", "groups", "weights")
_MOST_CELLS = 10_000


@dataclass(frozen=True)
class Coordinates:
    """What a cell is about, in the words of the file; without a framework, that of the recipe is taken."""

    model: str
    dataset: str
    framework: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the cell, and of its folder."""
        return slug("-".join(filter(None, [self.model, self.dataset, self.framework, str(self.seed)])))


@dataclass(frozen=True)
class Sweep:
    """All cells of a sweep by their coordinates, and what each needs."""

    cells: Mapping[Coordinates, Cell]
    resources: Resources
    retries: int
    output: Path


@dataclass(frozen=True)
class _Entry:
    """A model or a dataset of the file: what it is called there, and options of its own."""

    name: str | None = None
    model: str | None = None
    data: str | None = None
    options: dict[str, JsonValue] | None = None


@dataclass(frozen=True)
class _File:
    """The file as it is written."""

    models: tuple[JsonValue, ...] = ()
    datasets: tuple[JsonValue, ...] = ()
    frameworks: tuple[FrameworkName, ...] = ()
    seeds: tuple[int, ...] = (0,)
    options: dict[str, JsonValue] | None = None
    resources: dict[str, JsonValue] | None = None
    retries: int = 2
    output: str | None = None


def read_sweep(path: str | Path, output: str | Path | None = None, *, trust_code: bool = False) -> Sweep:
    """The sweep that a YAML file describes, with its results in `output`, or in the folder that the file names.

    Code that the file names is refused unless `trust_code` allows it, and so are more cells than anybody can wait for,
    before they are made. Raises ConfigError that says, for all faults at once, where in the file they are and what is
    allowed there.
    """
    where = str(path)
    given = changed(_File(), read_settings(path), where)
    faults: list[str] = []
    models = _entries(given.models, "models", "model", faults)
    datasets = _entries(given.datasets, "datasets", "data", faults)
    shared = _options(given.options, "options", faults)
    resources = _resources(given.resources, faults)
    faults += _faults_in(given, output)
    lists = models, datasets, given.frameworks or ("",), given.seeds
    if (count := math.prod(map(len, lists))) > _MOST_CELLS:
        faults.append(f"{count:,} cells described; at most {_MOST_CELLS:,} are allowed, so divide the file")
    if not trust_code:
        faults += _code_in(models, datasets, shared)
    if faults or resources is None:
        raise ConfigError.of(where, faults)
    folder = Path(output or given.output or "").expanduser().resolve()
    if os.path.lexists(folder / CELLS):
        refuse_links(folder)
    cells: dict[Coordinates, Cell] = {}
    for model, data, framework, seed in product(*lists):
        place = Coordinates(str(model.name), str(data.name), framework, seed)
        options = _merged(shared, model.options or {}, data.options or {})
        options |= {"seed": seed} | ({"framework": framework} if framework not in ("", BASELINE) else {})
        options |= {"trust_code": True} if trust_code else {}
        backbone = Backbone(str(model.model), str(folder / CELLS / place.name))
        kind: Kind = "train" if framework == BASELINE else "compress"
        cells[place] = Cell(place.name, kind, backbone, str(data.data), options)
        faults += [f"{place.name}: {fault}" for fault in _faults_of(cells[place])]
    faults += _same_names(list(cells))
    if faults:
        raise ConfigError.of(where, faults)
    return Sweep(cells, resources, given.retries, folder)


def _faults_in(given: _File, output: str | Path | None) -> list[str]:
    """Faults of what is neither a model, a dataset nor an option."""
    faults = [
        f"{name}: {list(values)} given; a list of different values is needed"
        for name, values in (("frameworks", given.frameworks), ("seeds", given.seeds))
        if len(set(values)) < len(values) or (not values and name == "seeds")
    ]
    if given.retries < 0:
        faults.append(f"retries: {given.retries} given; 0 or more are possible")
    if output is None and given.output is None:
        faults.append("output: not given; name the folder for the results here, or pass --output")
    return faults


def _code_in(models: Sequence[_Entry], datasets: Sequence[_Entry], shared: Mapping[str, JsonValue]) -> list[str]:
    """Faults for the references to code in a file."""
    found = [name for entry in (*models, *datasets) for name in code_of(entry.model, entry.data, None)]
    for options in (shared, *(entry.options or {} for entry in (*models, *datasets))):
        found += code_of(None, None, options.get("task"))
    return [
        f"{name!r} would import and run code; if you trust whoever wrote the file, pass trust_code=True (--trust-code)"
        for name in dict.fromkeys(found)
    ]


def _entries(given: Sequence[JsonValue], where: str, key: str, faults: list[str]) -> list[_Entry]:
    """The models or datasets: names, or mappings with a name and options."""
    found: list[_Entry] = []
    for number, value in enumerate(given):
        here = f"{where}[{number}]"
        try:
            entry = changed(_Entry(), {key: value} if isinstance(value, str) else value, here)
        except ConfigError as error:
            faults += [f"{here}.{fault}" for fault in error.faults]
            continue
        source = getattr(entry, key)
        other = "data" if key == "model" else "model"
        if source is None or getattr(entry, other) is not None:
            faults.append(f"{here}: {value!r} given; a name, or a mapping with {key}, name and options is needed")
            continue
        options = _options(entry.options, f"{here}.options", faults)
        place = source if is_timm(source) else absolute(source)
        found.append(_Entry(entry.name or _short(source), **{key: place}, options=options))
    counts = Counter(str(entry.name) for entry in found)
    twice = sorted(name for name, count in counts.items() if count > 1)
    faults += [f"{where}: {name!r} is there twice; give each a name of its own" for name in twice]
    if not given:
        faults.append(f"{where}: none given; a list of {where} is needed")
    return found


def _options(given: Mapping[str, JsonValue] | None, where: str, faults: list[str]) -> dict[str, JsonValue]:
    """Options of `compress`, their units turned into numbers."""
    hints = {name: each.type for name, each in OPTIONS.items() if name not in _OWN}
    found: dict[str, JsonValue] = {}
    for name, value in (given or {}).items():
        if name in _OWN:
            faults.append(f"{where}.{name}: is varied by the sweep; put it under {name}s")
        elif name == "trust_code":
            faults.append(f"{where}.{name}: a file cannot vouch for itself; pass trust_code=True (--trust-code)")
        elif name not in hints:
            hint = nearest(name, hints) or f" Known are {', '.join(hints)}"
            faults.append(f"{where}.{name}: no such setting.{hint}")
        else:
            found[name] = _in_units(name, value, where, faults)
            if name not in OBJECTS:
                faults += faults_of(found[name], hints[name], f"{where}.{name}")
    return found


def _in_units(name: str, value: JsonValue, where: str, faults: list[str]) -> JsonValue:
    if isinstance(value, str) and (unit := OPTIONS[name].option.unit) is not None:
        try:
            return unit.parse(value)
        except ConfigError as error:
            faults.append(f"{where}.{name}: {error}")
            return None
    return absolute(value) if isinstance(value, str) and name in _PATHS else value


def _resources(given: Mapping[str, JsonValue] | None, faults: list[str]) -> Resources | None:
    values = dict(given or {})
    try:
        if isinstance(values.get("memory"), str):
            values["memory"] = AMOUNT.parse(values["memory"])
        return changed(Resources(), values, "resources")
    except ConfigError as error:
        faults += [f"resources.{fault}" for fault in error.faults]
        return None


def _merged(*layers: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The options of all layers, the later before the earlier; a budget takes the place of any other."""
    goals = {*BUDGETS, *RATIOS}
    found: dict[str, JsonValue] = {}
    for layer in layers:
        if goals & layer.keys():
            found = {name: value for name, value in found.items() if name not in goals}
        found |= layer
    return found


def _same_names(places: Sequence[Coordinates]) -> list[str]:
    """Faults for cells that would have one folder, such as those of a-b on c and of a on b-c."""
    counts = Counter(place.name.casefold() for place in places)  # some file systems do not tell A from a
    twice = [name for name, count in counts.items() if count > 1]
    return [f"{name}: {counts[name]} cells have this name; name models and datasets otherwise" for name in twice]


def _faults_of(cell: Cell) -> list[str]:
    try:
        configure(cast("Options", cell.options))
    except ConfigError as error:
        return list(error.faults)
    if cell.backbone.name == AUTO and cell.kind == "train":
        return [f"the framework {BASELINE!r} needs one model, and {AUTO!r} given"]
    return []


def _short(source: str) -> str:
    """What a model or dataset is called by default: the last part of its name or path.

    >>> _short("torchvision:CIFAR10"), _short("/photos/birds"), _short("resnet50.a1_in1k")
    ('CIFAR10', 'birds', 'resnet50.a1_in1k')
    """
    return Path(source.rpartition(":")[2]).name or source
