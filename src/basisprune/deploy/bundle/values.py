"""Attributes and arguments as JSON, and back, with what JSON does not distinguish."""

from __future__ import annotations

import math
from typing import TypeAlias, TypeGuard

import torch
from pydantic import JsonValue

from basisprune.errors import BundleError

Plain: TypeAlias = "bool | int | float | str | tuple[Plain, ...] | list[Plain] | None"
"""What an attribute must be to go into a file."""

_NOT_FINITE = {repr(value): value for value in (math.inf, -math.inf, math.nan)}


def is_plain(value: object) -> TypeGuard[Plain]:
    """Whether the value can go into a file."""
    if isinstance(value, (tuple, list)):
        return type(value) in (tuple, list, torch.Size) and all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def encode(value: Plain) -> JsonValue:
    """The value as JSON that tells tuples from lists, and has no NaN or infinity.

    >>> encode((1, [math.inf]))
    {'tuple': [1, [{'float': 'inf'}]]}
    """
    if isinstance(value, (tuple, list)):
        items = [encode(item) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    return value


def decode(value: JsonValue) -> Plain:
    """The value that `encode` was given; raises BundleError for what it does not make.

    >>> decode(encode((1, [math.inf])))
    (1, [inf])
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"tuple": [*items]} if len(value) == 1:
            return tuple(decode(item) for item in items)
        case {"float": str(text)} if len(value) == 1 and text in _NOT_FINITE:
            return _NOT_FINITE[text]
    raise BundleError(f"{str(value)[:80]} is not a value that a bundle may hold")
