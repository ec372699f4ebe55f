"""Settings as plain data: read YAML, check values with pydantic, report all faults at once, compare settings."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TypeVar, cast

from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from basisprune.errors import ConfigError, nearest
from basisprune.files import read_bytes
from basisprune.recipes import RECIPES, Recipe, find_recipe
from basisprune.results import Settings
from basisprune.runs.plain_yaml import parse_yaml
from basisprune.search import SearchConfig
from basisprune.types import dotted

_BASE = "base"
_MOST_BYTES, _LARGEST, _MOST_LETTERS = 1 << 20, 10**18, 10_000
_KINDS = {
    "int": "a whole number is needed",
    "float": "a number is needed",
    "finite_number": "a finite number is needed",
    "bool": "true or false is needed",
    "string": "a string is needed",
    "tuple": "a list is needed",
    "list": "a list is needed",
    "dataclass": "a mapping of settings is needed",
}
T = TypeVar("T")


def read_settings(path: str | Path) -> dict[str, JsonValue]:
    """Read the settings in a YAML file; raise ConfigError unless it is a readable mapping of plain values."""
    try:
        content = read_bytes(Path(path), most=_MOST_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    return parse_settings(content, str(path))


def parse_settings(content: bytes, where: str) -> dict[str, JsonValue]:
    """Parse settings in YAML text; raise ConfigError, which names `where`, unless it is a mapping of plain values."""
    try:
        given = parse_yaml(content.decode())
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: is not valid YAML ({error})") from error
    if given is not None and not isinstance(given, dict):
        raise ConfigError(
            f"{where}: {type(given).__name__} found; a mapping is needed, with lines such as 'model: resnet50'"
        )
    faults = [f"{name}: {fault}" for name, value in _leaves("", given or {}) if (fault := _leaf_fault(value))]
    if faults:
        raise ConfigError.of(where, faults)
    return given or {}


def _leaves(name: str, value: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    """Yield every value that is no list or mapping, with its dotted name."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{name}.{key}".removeprefix("."), each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(name, each)
    else:
        yield name, value


def _leaf_fault(value: JsonValue) -> str:
    """Return why no setting can have this value; empty if one can."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} given; a finite number is needed"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"a number beyond {_LARGEST:.0e} given"
    if isinstance(value, str) and len(value) > _MOST_LETTERS:
        return f"a text of {len(value):,} letters given; at most {_MOST_LETTERS:,} are read"
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return f"{value!r} given, which is not Unicode"
    return ""


def recipe_of(given: str | Mapping[str, object] | Recipe) -> Recipe:
    """Find a recipe by name, or change the recipe named under `base` (default: quick).

    >>> recipe_of({"base": "paper", "train": {"epochs": 3}}).train.epochs
    3
    >>> recipe_of({"train": {"epoch": 3}})
    Traceback (most recent call last):
    basisprune.errors.ConfigError: recipe: train.epoch: no such setting. Did you mean 'epochs'?
    """
    if isinstance(given, Recipe):
        return given
    if isinstance(given, Mapping):
        base = find_recipe(_name(given.get(_BASE, "quick"), f"recipe: {_BASE}"))
        return changed(base, {key: value for key, value in given.items() if key != _BASE}, "recipe")
    return find_recipe(_name(given, "recipe"))


def _name(given: object, where: str) -> str:
    if not isinstance(given, str):
        raise ConfigError(f"{where}: {given!r} given; a name is needed: {', '.join(RECIPES)}")
    return given


def search_of(given: Mapping[str, object] | SearchConfig | None) -> SearchConfig:
    """Return the search settings, with defaults for those not given."""
    if isinstance(given, SearchConfig):
        return given
    return changed(SearchConfig(), {} if given is None else given, "search")


def changed(base: T, given: object, where: str) -> T:
    """Return the dataclass `base` with the given changes; raise ConfigError that lists all faults."""
    faults: list[str] = []
    merged = _merged(asdict(base), given, "", faults)  # type: ignore[call-overload]
    result, found = _validated(merged, type(base))
    if faults or result is None:
        raise ConfigError.of(where, faults + found)
    return result


def faults_of(value: object, kind: object, name: str) -> list[str]:
    """List what is wrong with the value for that type.

    >>> faults_of("three", int, "epochs")
    ["epochs: 'three' given; a whole number is needed"]
    """
    return _validated(value, cast("type[object]", kind), name)[1]


def _merged(base: dict[str, object], given: object, prefix: str, faults: list[str]) -> dict[str, object]:
    """Override the values of `base` by the given ones; unknown names are faults."""
    if not isinstance(given, Mapping):
        faults.append(f"{prefix.rstrip('.')}: {given!r} given; {_KINDS['dataclass']}".removeprefix(": "))
        return base
    result = dict(base)
    for key, value in given.items():
        old = base.get(key)
        if key not in base:
            hint = nearest(str(key), base) or " Known settings: " + ", ".join(base)
            faults.append(f"{prefix}{key}: no such setting.{hint}")
        else:
            is_changed = isinstance(old, dict) and value is not None  # None switches some settings off
            result[key] = _merged(old, value, f"{prefix}{key}.", faults) if is_changed else value  # type: ignore[arg-type]
    return result


def _validated(value: object, kind: type[T], name: str = "") -> tuple[T | None, list[str]]:
    """Validate the value with pydantic; return None and the faults if it is wrong."""
    try:
        # In JSON mode, a list is accepted for a tuple and an int for a float, but a string is not a number.
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True), []
    except ValidationError as error:
        return None, [line for fault in error.errors() for line in _told(fault, name)]
    except (TypeError, ValueError, RecursionError) as error:
        return None, [f"{name or 'it'}: only strings, numbers, lists and mappings of settings are allowed ({error})"]


def _told(fault: ErrorDetails, name: str) -> list[str]:
    """Word a fault found by pydantic; a ConfigError of a dataclass keeps its own words."""
    place = [part for part in fault["loc"] if isinstance(part, str)]
    where = ".".join([name] * bool(name) + place)
    own = fault.get("ctx", {}).get("error")
    if isinstance(own, ConfigError):
        return [f"{where}.{each}".removeprefix(".") for each in own.faults]
    if fault["type"] == "literal_error":
        allowed = re.findall("'(.+?)'", fault["ctx"]["expected"])
        wanted = f"allowed are {', '.join(allowed)}.{nearest(str(fault['input']), allowed)}"
    else:
        wanted = _KINDS.get(fault["type"].rpartition("_")[0], fault["msg"])
    return [f"{where}: {fault['input']!r} given; {wanted}"]


def differences(old: Settings, new: Settings) -> dict[str, str]:
    """Compare two settings: for each dotted name that changed, the old and the new value.

    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
    {'a.b': '1 -> 3'}
    """
    before, after = dict(dotted(old)), dict(dotted(new))
    return {
        key: f"{before.get(key, 'not set')} -> {after.get(key, 'not set')}"
        for key in {**before, **after}
        if before.get(key, ...) != after.get(key, ...)
    }
