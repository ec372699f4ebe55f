"""Check what public functions are given, before anything is done with it: types by their signatures, ranges."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import itertools
import math
import numbers
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from basisprune.errors import BasisPruneError, ConfigError, ModelError

P = ParamSpec("P")
T = TypeVar("T")

LARGEST_SEED = 2**63 - 1
LARGEST_SIDE = 1 << 14  # pixels
_LOOKED_INTO = 100  # items of a list or mapping
_NUMBERS: dict[object, type] = {int: numbers.Integral, float: numbers.Real}
_PARTS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def takes(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it raises ConfigError that lists all arguments of a wrong type.

    Annotations that cannot be checked from outside, such as those of a callable's arguments, are ignored. If the
    function fails because of the kind of a network, such as another precision, it raises ModelError that says so.

    >>> @takes
    ... def repeat(text: str, times: int | None = None) -> str:
    ...     return text * (times or 1)
    >>> repeat("ab", times="2")
    Traceback (most recent call last):
    basisprune.errors.ConfigError: repeat: times: '2' given, int or None is needed
    """
    signature, hint_of = inspect.signature(function), _hints_of(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        bound = signature.bind(*args, **kwargs)  # a TypeError for a name that is unknown, as of any function
        faults = [
            f"{name}: {_shown(value)} given, {_wanted(hint_of(name))} is needed"
            for name, value in bound.arguments.items()
            if signature.parameters[name].kind not in _PARTS and not fits(value, hint_of(name))
        ]
        if faults:
            raise ConfigError.of(function.__name__, faults)
        try:
            return function(*args, **kwargs)
        except BasisPruneError:
            raise
        except Exception as error:
            from basisprune.torchkit.kinds import why_it_fails  # loads torch, which the function has loaded by now

            if why := why_it_fails(bound.arguments.values()):
                raise ModelError(f"{function.__name__}: {why} ({str(error)[:300]})") from error
            raise

    return checked


def _hints_of(function: Callable[..., object]) -> Callable[[str], object]:
    """Return a function that evaluates an annotation when it is first needed."""
    names = getattr(inspect.unwrap(function), "__globals__", {})

    @functools.cache
    def hint_of(name: str) -> object:
        hint = getattr(function, "__annotations__", {}).get(name, Any)
        try:
            return eval(hint, dict(names)) if isinstance(hint, str) else hint  # this package's source, nothing given
        except NameError:  # imported for type checkers only
            return Any

    return hint_of


def fits(value: object, hint: object) -> bool:
    """Whether the value is of that type, as far as that can be checked without using it.

    >>> fits([1, 2], Sequence[int]), fits("ab", Sequence[str]), fits(True, int), fits(1, float)
    (True, False, False, True)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if hint in (Any, object) or isinstance(hint, TypeVar | str):
        return True
    if hint is None or hint is types.NoneType:
        return value is None
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:  # which of them are allowed, the function says itself
        return isinstance(value, tuple({type(each) for each in inner}))
    if hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    kind = origin or hint
    if not isinstance(kind, type):
        return True
    return _is_a(value, kind) and _items_fit(value, kind, inner)


def _is_a(value: object, kind: type) -> bool:
    if getattr(kind, "_is_protocol", False):
        return all(hasattr(value, name) for name in typing.get_type_hints(kind) or vars(kind) if name[0] != "_")
    if kind in (collections.abc.Sequence, list, tuple):
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if kind is collections.abc.Iterable:
        return not isinstance(value, str | bytes) and (hasattr(value, "__iter__") or hasattr(value, "__getitem__"))
    if kind is os.PathLike or issubclass(kind, os.PathLike):
        return isinstance(value, os.PathLike)
    return isinstance(value, kind)


def _items_fit(value: object, kind: type, inner: tuple[object, ...]) -> bool:
    """Whether the items of a list or mapping are of the right types; other containers are not checked."""
    if isinstance(value, Mapping) and len(inner) == 2:
        some = itertools.islice(value.items(), _LOOKED_INTO)
        return all(fits(key, inner[0]) and fits(each, inner[1]) for key, each in some)
    if not inner or not isinstance(value, list | tuple | set | frozenset | Mapping):
        return True
    if kind is tuple and ... not in inner:
        return len(value) == len(inner) and all(fits(each, hint) for each, hint in zip(value, inner, strict=True))
    return all(fits(each, inner[0]) for each in itertools.islice(value, _LOOKED_INTO))


def _wanted(hint: object) -> str:
    """The type in words."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_wanted(each) for each in get_args(hint)))
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if hint is types.NoneType:
        return "None"
    return str(getattr(hint, "__name__", hint)).replace("PathLike", "path").replace("Path", "path")


def _shown(value: object) -> str:
    """Return the value itself if it is short."""
    if isinstance(value, int) and abs(value) >= 10**30:
        return "a number of more than 30 digits"
    text = repr(value) if isinstance(value, str | bytes | int | float | tuple | list | None) else ""
    return text if 0 < len(text) <= 60 else f"a {type(value).__name__}"


# ------------------------------------------------------------------------------------------- ranges


def whole(name: str, value: object, least: int, most: int) -> str | None:
    """Return the fault of a value that is no whole number from `least` to `most`; None if it is.

    >>> whole("seed", "a", 0, 9)
    "seed: 'a' given, a whole number from 0 to 9 is needed"
    >>> whole("limit", 0, 1, 2**63)
    'limit: 0 given, at least 1 is needed'
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None:
        return f"{name}: {_shown(value)} given, a whole number from {least} to {most} is needed"
    if number < least:
        return f"{name}: {_shown(value)} given, at least {least} is needed"
    return f"{name}: {_shown(value)} given, at most {most} is allowed" if number > most else None


def fraction(name: str, value: object) -> str | None:
    """Return the fault of a value that is no number in [0, 1)."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value < 1
    return None if fits else f"{name}: {_shown(value)} given, a fraction in [0, 1) is needed"


def image_size(name: str, value: object) -> str | None:
    """Return the fault of a value that is neither None nor (height, width) in pixels."""
    if value is None:
        return None
    sides = list(value) if isinstance(value, tuple | list) else []
    if len(sides) != 2 or any(whole(name, side, 1, LARGEST_SIDE) for side in sides):
        return f"{name}: {_shown(value)} given, (height, width) of 1 to {LARGEST_SIDE} pixels is needed"
    return None


def of_type(name: str, value: object, kind: type | tuple[type, ...], wanted: str) -> str | None:
    """Return the fault of a value that is not of that type, which is called `wanted`."""
    return None if isinstance(value, kind) else f"{name}: {type(value).__name__} given, {wanted} is needed"


def check(where: str, faults: Iterable[str | None]) -> None:
    """Raise ConfigError that lists all faults found in `where`, if there are any."""
    found = [fault for fault in faults if fault is not None]
    if found:
        raise ConfigError.of(where, found)
