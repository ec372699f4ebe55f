"""The arguments of public functions, checked against their annotations before anything is done with them."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import numbers
import reprlib
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Annotated, Any, Literal, NamedTuple, ParamSpec, TypeVar, Union, get_args, get_origin

import typeguard

from basisprune.errors import BasisPruneError, ConfigError, ModelError

P = ParamSpec("P")
T = TypeVar("T")

LARGEST_COUNT, LARGEST_SIDE = 2**63 - 1, 1 << 14  # what a generator takes as its seed; pixels


class Within(NamedTuple):
    """A range of numbers, as metadata of `Annotated`."""

    least: float
    most: float
    words: str

    def check(self, value: Any, origin: object, *_: object) -> None:
        kind = numbers.Integral if origin is int else numbers.Real
        if isinstance(value, bool) or not isinstance(value, kind) or not self.least <= value <= self.most:  # type: ignore[operator]
            raise typeguard.TypeCheckError(f"is not {self.words}")


def _whole(least: int, most: int) -> Any:
    return Within(least, most, f"a whole number from {least} to {most}")


Fraction = Annotated[float, Within(0, math.nextafter(1, 0), "a fraction in [0, 1)")]
Seed = Annotated[int, _whole(0, LARGEST_COUNT)]
Count = Annotated[int, _whole(1, LARGEST_COUNT)]
Side = Annotated[int, Within(1, LARGEST_SIDE, f"1 to {LARGEST_SIDE} pixels")]
ImageSize = tuple[Side, Side]

typeguard.checker_lookup_functions.insert(
    0, lambda _origin, _args, extras: next((each.check for each in extras if isinstance(each, Within)), None)
)


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it raises ConfigError that lists all arguments of a wrong type or out of range.

    If the function fails because of the kind of a network, such as another precision, it raises ModelError instead.

    >>> @checked
    ... def repeat(text: str, times: int | None = None) -> str:
    ...     return text * (times or 1)
    >>> repeat("ab", times="2")
    Traceback (most recent call last):
    basisprune.errors.ConfigError: repeat: times: '2' given, int or None is needed
    """
    signature = inspect.signature(function)
    where = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
    hints = functools.cache(lambda: _hints_of(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        given = signature.bind(*args, **kwargs).arguments  # a TypeError for a name that is unknown, as of any function
        faults = [
            f"{name}: {reprlib.repr(value)} given, {_words(hint)} is needed"
            for name, hint in hints().items()
            if name in given and not fits(value := given[name], hint)
        ]
        if faults:
            raise ConfigError.of(where, faults)
        try:
            return function(*args, **kwargs)
        except BasisPruneError:
            raise
        except Exception as error:
            from basisprune.torchkit.running import why_it_fails  # loads torch, which the function has loaded by now

            if why := why_it_fails(given.values()):
                raise ModelError(f"{where}: {why} ({str(error)[:300]})") from error
            raise

    return call


class _Names(dict[str, object]):
    """The names of a module; those that it imports for type checkers alone are anything."""

    def __missing__(self, name: str) -> Any:
        return Any


def _hints_of(function: Callable[..., object]) -> dict[str, object]:
    names = _Names(vars(builtins) | inspect.unwrap(function).__globals__)
    hints = typing.get_type_hints(function, localns=names, include_extras=True)
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = inspect.signature(function).parameters
    return {name: hint for name, hint in hints.items() if name in known and known[name].kind not in several}


def fits(value: object, hint: Any) -> bool:
    """Return whether the value is of that type: numpy's numbers are numbers, and lists may stand for tuples.

    >>> fits([1, 2], Sequence[int]), fits("ab", Sequence[str]), fits(True, int), fits([1, 2], tuple[int, int])
    (True, False, False, True)
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:  # a function says itself which of them it knows, and which were probably meant
        return isinstance(value, tuple({type(each) for each in inner}))
    if hint in (int, float):
        return isinstance(value, numbers.Integral if hint is int else numbers.Real) and not isinstance(value, bool)
    if origin in (Sequence, Iterable, Collection) and isinstance(value, str | bytes):
        return False
    if origin in (Iterable, Collection) and isinstance(value, list | tuple | set | frozenset | dict):
        return all(fits(each, inner[0]) for each in value)
    try:
        typeguard.check_type(
            tuple(value) if isinstance(value, list) and origin is tuple else value,
            hint,
            forward_ref_policy=typeguard.ForwardRefPolicy.IGNORE,
            collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS,
        )
    except typeguard.TypeCheckError:
        return False
    return True


def _words(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, get_args(hint))))
    if get_origin(hint) is Annotated:
        return str(hint.__metadata__[0].words)
    if hint == ImageSize:
        return f"(height, width) of 1 to {LARGEST_SIDE} pixels"
    return "None" if hint is types.NoneType else str(getattr(hint, "__name__", hint)).replace("PathLike", "path")
