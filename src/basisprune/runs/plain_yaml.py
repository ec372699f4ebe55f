"""YAML as settings need it: text, numbers, true and false, lists and mappings, with bounds that hold during reading.

Values are built from the parser's events. There are no tags, merge keys, dates or sexagesimal numbers; a part of a file
may have a name (`&name`, `*name`), and counts again wherever it is used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import yaml  # type: ignore[import-untyped]
from pydantic import JsonValue

from basisprune.errors import ConfigError, printable

_MOST_VALUES, _DEEPEST, _LONGEST_NAME, _MOST_DIGITS = 10_000, 50, 1000, 100
_TRUTH = {**dict.fromkeys(("yes", "true", "on"), True), **dict.fromkeys(("no", "false", "off"), False)}
_NOTHING = ("", "~", "null", "Null", "NULL")
_WHOLE = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_DECIMAL = re.compile(r"[-+]?((\.[0-9][0-9_]*|[0-9][0-9_]*\.[0-9_]*)([eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+)")
_UNBOUNDED = re.compile(r"([-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))")


@dataclass(frozen=True)
class _Built:
    """A value, with how many there are in it and how deep they are nested."""

    value: JsonValue
    count: int = 1
    depth: int = 0


def parse_yaml(text: str) -> JsonValue:
    """The value in YAML text; raises ConfigError, with the line, for what no settings have, and for too much of it.

    >>> parse_yaml("a: [1e-3, 010, 1:30, 2020-01-01, off]")
    {'a': [0.001, '010', '1:30', '2020-01-01', False]}
    """
    events = yaml.parse(text, yaml.SafeLoader)
    found: _Built | None = None
    try:
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if found is not None:
                    raise _error(event, "a second document begins; one is read")
                found = _Reader(events).value(next(events), 0)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # the latter of odd escapes and versions
        raise ConfigError(f"is not valid YAML ({' '.join(str(error).split())})") from error
    return None if found is None else found.value


def yaml_of(value: Mapping[str, JsonValue]) -> str:
    """The mapping as YAML text, which `parse_yaml` reads as it was: text that looks like something else is quoted."""
    text: str = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """PyYAML's, except that it quotes text that is a number here, such as 1e-3."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        """The text, in quotes unless it reads as text without them."""
        style = None if isinstance(_value(text), str) else "'"
        if printable(text) != text:  # line ends of other alphabets do not survive in plain text
            style = '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


class _Reader:
    """Builds values from events; those that have a name are remembered once they are complete."""

    def __init__(self, events: Iterator[yaml.Event]) -> None:
        self.events, self.count = events, 0
        self.named: dict[str, _Built] = {}

    def value(self, event: yaml.Event, depth: int) -> _Built:
        """The value that begins with the event."""
        if isinstance(event, yaml.AliasEvent):
            return self._again(event, depth)
        if event.tag is not None:
            raise _error(event, f"the tag {event.tag[:60]} is given; tags are not allowed")
        self._counted(event, 1, depth)
        if isinstance(event, yaml.ScalarEvent):
            built = _Built(_scalar(event))
        else:
            built = self._list(depth) if isinstance(event, yaml.SequenceStartEvent) else self._mapping(depth)
        if event.anchor is not None:
            self.named[event.anchor] = built
        return built

    def _list(self, depth: int) -> _Built:
        parts: list[_Built] = []
        while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
            parts.append(self.value(event, depth + 1))
        return _around([part.value for part in parts], parts)

    def _mapping(self, depth: int) -> _Built:
        parts: dict[str, _Built] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            name = _name(event)
            if name in parts:
                raise _error(event, f"{name[:60]!r} is given twice")
            parts[name] = self.value(next(self.events), depth + 1)
        return _around({name: part.value for name, part in parts.items()}, list(parts.values()))

    def _again(self, event: yaml.AliasEvent, depth: int) -> _Built:
        built = self.named.get(event.anchor)
        if built is None:
            raise _error(event, f"*{event.anchor[:60]} is used, and no complete part before it has this name")
        self._counted(event, built.count, depth + built.depth)
        return built

    def _counted(self, event: yaml.Event, count: int, depth: int) -> None:
        self.count += count
        if self.count > _MOST_VALUES:
            raise _error(event, f"it holds more than {_MOST_VALUES:,} values")
        if depth > _DEEPEST:
            raise _error(event, f"it is nested more than {_DEEPEST} levels deep")


def _around(value: JsonValue, parts: list[_Built]) -> _Built:
    return _Built(value, 1 + sum(part.count for part in parts), 1 + max((part.depth for part in parts), default=0))


def _name(event: yaml.Event) -> str:
    """The name in a mapping that the event is."""
    plain = isinstance(event, yaml.ScalarEvent) and event.tag is None and event.anchor is None
    name = _scalar(event) if plain else None
    if not isinstance(name, str):
        raise _error(event, "a name is needed here: text, in quotes if it looks like a number or like true and false")
    if name == "<<" and event.style is None:
        raise _error(event, "<< is given; merge keys are not allowed, so write the settings out")
    if len(name) > _LONGEST_NAME:
        raise _error(event, f"{name[:60]!r}... has {len(name):,} letters; a name has at most {_LONGEST_NAME:,}")
    return name


def _scalar(event: yaml.ScalarEvent) -> JsonValue:
    """The number, truth or text; what is quoted is text."""
    if event.style is not None:
        return str(event.value)
    try:
        return _value(event.value)
    except ValueError as error:
        raise _error(event, str(error)) from None


def _value(text: str) -> JsonValue:
    """What text without quotes stands for; raises ValueError for numbers that are too long."""
    if text in _NOTHING:
        return None
    if text.casefold() in _TRUTH and text in (text.lower(), text.upper(), text.capitalize()):
        return _TRUTH[text.casefold()]
    digits = text.replace("_", "")
    if _UNBOUNDED.fullmatch(text):
        return float(text.lower().replace(".", ""))
    is_whole = _WHOLE.fullmatch(text) is not None
    if not is_whole and not _DECIMAL.fullmatch(text):
        return text
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits is given; at most {_MOST_DIGITS} are read")
    return int(digits) if is_whole else float(digits)


def _error(event: yaml.Event, said: str) -> ConfigError:
    return ConfigError(f"is not valid YAML: line {event.start_mark.line + 1}: {said}")
