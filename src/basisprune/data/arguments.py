"""What is wrong with an argument, in the words of one fault of a ConfigError; None where nothing is."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

from basisprune.errors import ConfigError

LARGEST_SEED = 2**63 - 1
LARGEST_SIDE = 1 << 14  # pixels


def whole(name: str, value: object, least: int, most: int) -> str | None:
    """Unless the value is a whole number from `least` to `most`.

    >>> whole("seed", "a", 0, 9)
    "seed: 'a' given, a whole number from 0 to 9 is needed"
    >>> whole("limit", 0, 1, 2**63)
    'limit: 0 given, at least 1 is needed'
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        return f"{name}: {_shown(value)} given, a whole number from {least} to {most} is needed"
    if number < least:
        return f"{name}: {_shown(value)} given, at least {least} is needed"
    return f"{name}: {_shown(value)} given, at most {most} is allowed" if number > most else None


def fraction(name: str, value: object) -> str | None:
    """Unless the value is a number in [0, 1)."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value < 1
    return None if fits else f"{name}: {_shown(value)} given, a fraction in [0, 1) is needed"


def image_size(name: str, value: object) -> str | None:
    """Unless the value is None or (height, width) in pixels."""
    if value is None:
        return None
    sides = list(value) if isinstance(value, tuple | list) else []
    if len(sides) != 2 or any(whole(name, side, 1, LARGEST_SIDE) for side in sides):
        return f"{name}: {_shown(value)} given, (height, width) of 1 to {LARGEST_SIDE} pixels is needed"
    return None


def of_type(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> str | None:
    """Unless the value is of that type, which is called `wanted`."""
    return None if isinstance(value, kind) else f"{name}: {type(value).__name__} given, {wanted} is needed"


def check(where: str, faults: Iterable[str | None]) -> None:
    """Raises ConfigError that lists all faults found in `where`, if there are any."""
    found = [fault for fault in faults if fault is not None]
    if found:
        raise ConfigError.of(where, found)


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
