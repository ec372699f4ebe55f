"""Settings as plain data: YAML -> dataclasses with all faults at once, and back; how two of them differ."""

from __future__ import annotations

import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]

from basisprune.errors import CheckpointError, ConfigError, nearest
from basisprune.files import write_text
from basisprune.recipes import RECIPES, Recipe, find_recipe
from basisprune.search import SearchConfig
from basisprune.types import dotted

CONFIG = "config.yaml"
VERSIONS = "versions"
IN_PYTHON = " given in Python"  # ends what the settings call an object without a name
_BASE = "base"
# What may change from one start of a run to the next: the files at its end, not how it comes to them.
_FREE = frozenset({"onnx", "int8"})
T = TypeVar("T")


def read_settings(path: str | Path) -> dict[str, Any]:
    """The settings in a YAML file; raises ConfigError where it cannot be read or is no mapping of names."""
    try:
        given = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no YAML ({error})") from error
    if given is not None and not (isinstance(given, dict) and all(isinstance(key, str) for key in given)):
        raise ConfigError(f"{path}: {type(given).__name__} found; lines such as 'model: resnet50' are needed")
    return given or {}


def recipe_of(given: str | Mapping[str, Any] | Recipe) -> Recipe:
    """The recipe that is meant: by its name, or by what differs from the recipe named under `base` (quick).

    >>> recipe_of({"base": "paper", "train": {"epochs": 3}}).train.epochs
    3
    >>> recipe_of({"train": {"epoch": 3}})
    Traceback (most recent call last):
    basisprune.errors.ConfigError: recipe: train.epoch: no such setting. Did you mean 'epochs'?
    """
    if not isinstance(given, Mapping):
        return find_recipe(given)
    base = given.get(_BASE, "quick")
    if not isinstance(base, str):
        raise ConfigError.of("recipe", [f"base: {base!r} given; allowed are {', '.join(RECIPES)}"])
    return changed(find_recipe(base), {key: value for key, value in given.items() if key != _BASE}, "recipe")


def search_of(given: Mapping[str, Any] | SearchConfig | None) -> SearchConfig:
    """The settings of the search that are meant: those given, and the defaults for the others."""
    return given if isinstance(given, SearchConfig) else changed(SearchConfig(), given or {}, "search")


def changed(base: T, given: Any, where: str) -> T:
    """The dataclass `base` with what is given in its place; raises ConfigError that lists all faults at once."""
    faults: list[str] = []
    result = _changed(base, given, "", faults)
    if faults:
        raise ConfigError.of(where, faults)
    return result


def fault_of(value: Any, kind: Any, name: str) -> list[str]:
    """What is wrong with the value for that type, if anything.

    >>> fault_of("three", int, "epochs")
    ["epochs: 'three' given; a whole number is needed"]
    """
    faults: list[str] = []
    _converted(value, kind, name, faults)
    return faults


def _changed(base: T, given: Any, prefix: str, faults: list[str]) -> T:
    if not isinstance(given, Mapping):
        faults.append(f"{prefix.rstrip('.') or 'it'}: {given!r} given; settings by name are needed")
        return base
    hints = get_type_hints(type(base))
    known = [field.name for field in fields(base)]  # type: ignore[arg-type]
    values = {}
    for key, value in given.items():
        if key not in known:
            hint = nearest(str(key), known) or " Known are " + ", ".join(known)
            faults.append(f"{prefix}{key}: no such setting.{hint}")
        elif is_dataclass(getattr(base, key)):
            values[key] = _changed(getattr(base, key), value, f"{prefix}{key}.", faults)
        else:
            values[key] = _converted(value, hints[key], f"{prefix}{key}", faults)
    if faults:
        return base
    try:
        return replace(base, **values)  # type: ignore[type-var]
    except ConfigError as error:
        faults += [prefix + fault for fault in error.faults]
        return base


def _converted(value: Any, hint: Any, name: str, faults: list[str]) -> Any:
    """The value as the hint wants it; a fault is added where it cannot be."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in get_args(hint):
            return None
        (hint,) = [each for each in get_args(hint) if each is not type(None)]
        return _converted(value, hint, name, faults)
    if origin is Literal:
        if value not in get_args(hint):
            allowed = [str(each) for each in get_args(hint)]
            faults.append(f"{name}: {value!r} given; allowed are {', '.join(allowed)}.{nearest(str(value), allowed)}")
        return value
    try:
        if isinstance(value, bool) != (hint is bool) or value is None:
            raise ValueError
        # YAML takes 1e-3 for a text, and a float is also written without a point.
        return hint(value) if hint is float else _exactly(value, str if hint is Path else hint)
    except (TypeError, ValueError):
        faults.append(f"{name}: {value!r} given; {_KINDS.get(hint, hint.__name__)} is needed")
        return value


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}


def _exactly(value: Any, kind: type) -> Any:
    if not isinstance(value, kind):
        raise TypeError
    return value


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What changed from the old settings to the new ones, each as 'name: old -> new'.

    >>> differences({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
    ['a.b: 1 -> 3']
    """
    before, after = dict(dotted(old)), dict(dotted(new))
    return [
        f"{key}: {before.get(key, 'not set')} -> {after.get(key, 'not set')}"
        for key in {**before, **after}
        if before.get(key, ...) != after.get(key, ...)
    ]


def is_loadable(data: object) -> bool:
    """Whether the data can be loaded by what the settings call it: a path that is there, or torchvision:NAME.

    >>> is_loadable("torchvision:CIFAR10"), is_loadable("some digits"), is_loadable(None)
    (True, False, False)
    """
    return isinstance(data, str) and (data.startswith("torchvision:") or Path(data).expanduser().exists())


def is_repeatable(config: Mapping[str, Any]) -> bool:
    """Whether the settings alone bring the model and the data of their run back."""
    model = config.get("model")
    return isinstance(model, str) and not model.endswith(IN_PYTHON) and is_loadable(config.get("data"))


@dataclass(frozen=True)
class ResultFolder:
    """The folder of a run, which belongs to one configuration."""

    path: Path
    command: str = "compress"

    def claim(self, config: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
        """Writes the configuration into a new folder; for one that has it already, which versions changed.

        Raises CheckpointError for a folder that belongs to another configuration, or that holds other things.
        """
        plain = json.loads(json.dumps(config))
        file = self.path / CONFIG
        then: Mapping[str, str] = versions
        if file.exists():
            old = read_settings(file)
            then = old.pop(VERSIONS, {})
            lines = [line for line in differences(old, plain) if line.partition(":")[0] not in _FREE]
            if lines:
                said = f"{self.path}: belongs to a run with other settings; use another folder"
                raise CheckpointError.of(said, lines)
        else:
            self._refuse_foreign()
        text = yaml.safe_dump({**plain, VERSIONS: dict(versions)}, sort_keys=False, allow_unicode=True)
        again = f"# This run again: basisprune {self.command} --config {CONFIG} --output another\n"
        write_text(file, (again if is_repeatable(plain) else "") + text)
        return differences(then, versions)

    def _refuse_foreign(self) -> None:
        if self.path.is_file():
            raise CheckpointError(f"{self.path}: is a file; name a folder that is new or empty")
        held = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
        if any(not name.startswith(".") for name in held):
            raise CheckpointError(
                f"{self.path}: holds {', '.join(held[:3])} but no {CONFIG}, so it is not of a run that could go on; "
                "name a folder that is new or empty"
            )
