"""Settings as plain data: read and write YAML within bounds, check values with pydantic, compare settings.

YAML here has text, numbers, true and false, lists and mappings; no tags, merge keys, dates or sexagesimal numbers. A
part of a file may have a name (`&name`, `*name`), and counts again wherever it is used.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TypeVar, cast

import yaml  # type: ignore[import-untyped]
from pydantic import JsonValue, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from basisprune.errors import ConfigError, nearest, printable
from basisprune.files import read_bytes
from basisprune.recipes import RECIPES, Recipe, find_recipe
from basisprune.search import SearchConfig
from basisprune.types import dotted

_BASE = "base"
_MOST_BYTES, _MOST_VALUES, _DEEPEST = 1 << 20, 10_000, 50
_LARGEST, _MOST_DIGITS, _MOST_LETTERS = 10**18, 100, 10_000
_TRUTH = {**dict.fromkeys(("yes", "true", "on"), True), **dict.fromkeys(("no", "false", "off"), False)}
_NOTHING = ("", "~", "null", "Null", "NULL")
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_DECIMAL = re.compile(
    r"[-+]?((\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
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


# ------------------------------------------------------------------------------------------- YAML


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
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: is not valid YAML: {error}") from error
    if given is not None and not isinstance(given, dict):
        raise ConfigError(
            f"{where}: {type(given).__name__} found; a mapping is needed, with lines such as 'model: resnet50'"
        )
    return given or {}


def parse_yaml(text: str) -> JsonValue:
    """Return the value in YAML text; raise ConfigError for what no settings have, and for too much of it.

    >>> parse_yaml("a: [1e-3, 010, 1:30, 2020-01-01, off]")
    {'a': [0.001, '010', '1:30', '2020-01-01', False]}
    """
    try:
        node = _Loader(text).get_single_node()
        return None if node is None else _value_of(node, count())
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"it is nested more than {_DEEPEST} levels deep") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter of odd escapes and versions
        raise ConfigError(" ".join(str(error).split())) from error


def yaml_of(value: Mapping[str, JsonValue]) -> str:
    """Return the mapping as YAML text, which `parse_yaml` reads back."""
    text: str = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, object] = {}  # noqa: RUF012 (as in PyYAML)

    def compose_node(self, parent: yaml.Node | None, index: object) -> yaml.Node:
        event = self.peek_event()
        if tag := getattr(event, "tag", None):
            raise _error(event, f"the tag {tag[:60]} is given; tags are not allowed")
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    def represent_str(self, text: str) -> yaml.ScalarNode:
        style = None if isinstance(_plain_value(text), str) else "'"  # text that is a number here, such as 1e-3
        if printable(text) != text:  # line ends of other alphabets do not survive in plain text
            style = '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _value_of(node: yaml.Node, number: Iterator[int], depth: int = 0) -> JsonValue:
    """Return the value of a node; `number` counts all of them, those of a named part wherever it is used."""
    if next(number) >= _MOST_VALUES:
        raise _error(node, f"it holds more than {_MOST_VALUES:,} values")
    if depth > _DEEPEST:
        raise _error(node, f"it is nested more than {_DEEPEST} levels deep")
    if isinstance(node, yaml.ScalarNode):
        value = node.value if node.style is not None else _plain_value(node.value)
        if fault := _fault_of(node.value, value):
            raise _error(node, fault)
        return cast("JsonValue", value)
    if isinstance(node, yaml.SequenceNode):
        return [_value_of(each, number, depth + 1) for each in node.value]
    found: dict[str, JsonValue] = {}
    for key, value in node.value:
        name = _value_of(key, number, depth + 1) if isinstance(key, yaml.ScalarNode) else None
        if not isinstance(name, str):
            raise _error(key, "a name is needed here: text, in quotes if it looks like a number or like true and false")
        if name == "<<" and key.style is None:
            raise _error(key, "<< is given; merge keys are not allowed, so write the settings out")
        if name in found:
            raise _error(key, f"{name[:60]!r} is given twice")
        found[name] = _value_of(value, number, depth + 1)
    return found


def _plain_value(text: str) -> str | float | bool | None:
    """Return what text without quotes stands for; a number of too many digits is infinite."""
    if text in _NOTHING:
        return None
    if text.casefold() in _TRUTH and text in (text.lower(), text.upper(), text.capitalize()):
        return _TRUTH[text.casefold()]
    is_whole = _WHOLE.fullmatch(text) is not None
    if not is_whole and not _DECIMAL.fullmatch(text):
        return text
    digits = re.sub(r"_|\.(?=[inIN])", "", text)
    return math.inf if len(digits) > _MOST_DIGITS else int(digits) if is_whole else float(digits)


def _fault_of(text: str, value: object) -> str:
    if isinstance(value, float | int) and len(text) > _MOST_DIGITS:
        return f"a number of {len(text):,} digits is given; at most {_MOST_DIGITS} are read"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} given; a finite number is needed"
    if isinstance(value, int) and abs(value) > _LARGEST:
        return f"a number beyond {_LARGEST:.0e} given"
    if len(text) > _MOST_LETTERS:
        return f"a text of {len(text):,} letters given; at most {_MOST_LETTERS:,} are read"
    try:
        text.encode()
    except UnicodeEncodeError:
        return f"{text!r} given, which is not Unicode"
    return ""


def _error(place: yaml.Node | yaml.Event, message: str) -> ConfigError:
    return ConfigError(f"line {place.start_mark.line + 1}: {message}")


# ------------------------------------------------------------------------------------------- values


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
    name, where = (given.get(_BASE, "quick"), f"recipe: {_BASE}") if isinstance(given, Mapping) else (given, "recipe")
    if not isinstance(name, str):
        raise ConfigError(f"{where}: {name!r} given; a name is needed: {', '.join(RECIPES)}")
    changes = {key: value for key, value in given.items() if key != _BASE} if isinstance(given, Mapping) else {}
    return changed(find_recipe(name), changes, "recipe")


def search_of(given: Mapping[str, object] | SearchConfig | None) -> SearchConfig:
    """Return the search settings, with defaults for those not given."""
    return (
        given if isinstance(given, SearchConfig) else changed(SearchConfig(), {} if given is None else given, "search")
    )


def changed(base: T, given: object, where: str) -> T:
    """Return the dataclass `base` with the given changes; raise ConfigError that lists all faults."""
    if given == {}:
        return base
    faults: list[str] = []
    merged = _merged(asdict(base), given, "", faults)  # type: ignore[call-overload]
    result, found = _validated(merged, type(base), "")
    if faults or result is None:
        raise ConfigError.of(where, faults + found)
    return result


def faults_of(value: object, kind: object, name: str) -> list[str]:
    """List what is wrong with the value for that type.

    >>> faults_of("three", int, "epochs")
    ["epochs: 'three' given; a whole number is needed"]
    """
    return _validated(value, cast("type[object]", kind), name)[1]


def differences(old: Mapping[str, object], new: Mapping[str, object]) -> dict[str, str]:
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


def _validated(value: object, kind: type[T], name: str) -> tuple[T | None, list[str]]:
    """Validate the value with pydantic; return None and the faults if it is wrong."""
    try:
        # In JSON mode, a list is accepted for a tuple and an int for a float, but a string is not a number.
        return TypeAdapter(kind).validate_json(json.dumps(value), strict=True), []
    except ValidationError as error:
        return None, [line for fault in error.errors() for line in _in_words(fault, name)]
    except (TypeError, ValueError, RecursionError) as error:
        return None, [f"{name or 'it'}: only strings, numbers, lists and mappings of settings are allowed ({error})"]


def _in_words(fault: ErrorDetails, name: str) -> list[str]:
    """Word a fault found by pydantic; a ConfigError of a dataclass keeps its own words."""
    where = ".".join([name] * bool(name) + [part for part in fault["loc"] if isinstance(part, str)])
    own = fault.get("ctx", {}).get("error")
    if isinstance(own, ConfigError):
        return [f"{where}.{each}".removeprefix(".") for each in own.faults]
    if fault["type"] == "literal_error":
        allowed = re.findall("'(.+?)'", fault["ctx"]["expected"])
        wanted = f"allowed are {', '.join(allowed)}.{nearest(str(fault['input']), allowed)}"
    else:
        wanted = _KINDS.get(fault["type"].rpartition("_")[0], fault["msg"])
    return [f"{where}: {fault['input']!r} given; {wanted}"]
