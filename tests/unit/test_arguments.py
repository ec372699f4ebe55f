"""Laws of arguments: the public functions refuse what is of another type, in one message that lists all of it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from tiny import tiny_decomposed, tiny_images
from torch import nn

import basisprune
from basisprune.arguments import fits, takes
from basisprune.errors import BasisPruneError, ConfigError
from basisprune.listener import Listener, Silence

FUNCTIONS = [name for name in basisprune.__all__ if inspect.isfunction(getattr(basisprune, name))]
ODD = [object(), b"x", -1, 2.5, [object()], {1: object()}, lambda: None]


@pytest.mark.parametrize(
    ("value", "hint", "fit"),
    [
        (3, int, True),
        (np.int64(3), int, True),
        (True, int, False),
        (3, float, True),
        (np.float32(3), float, True),
        ("3", float, False),
        (None, int | None, True),
        ("a", int | None, False),
        ("anything", Literal["a", "b"], True),
        (3, Literal["a", "b"], False),
        ((1, 2), Sequence[int], True),
        (torch.Size((1, 2)), tuple[int, ...], True),
        ((1, 2, 3), tuple[int, int], False),
        ((1, "2"), Sequence[int], False),
        ("12", Sequence[str], False),
        ({"a": 1}, Mapping[str, int], True),
        ({"a": "b"}, Mapping[str, int], False),
        (Path("x"), str | Path, True),
        (3, str | Path, False),
        (torch.zeros(2), Iterable[object], True),
        (["x", 3], Iterable[str | nn.Module], False),
        (Silence(), Listener | None, True),
        (3, Listener | None, False),
        (print, Callable[[int], int], True),
        (3, Callable[[int], int], False),
    ],
)
def test_a_value_fits_a_type_or_not(value, hint, fit):
    assert fits(value, hint) is fit


def test_all_faults_are_told_at_once():
    @takes
    def join(first: str, *rest: str, times: int = 1, **more: object) -> str:
        return first + "".join(rest) * times

    assert join("a", "b", times=2, other=3) == "abb"
    assert inspect.signature(join).parameters.keys() == {"first", "rest", "times", "more"}
    with pytest.raises(ConfigError) as error:
        join(3, times=[1])
    assert error.value.faults == ("first: 3 given, str is needed", "times: a list given, int is needed")
    with pytest.raises(TypeError, match="missing a required argument"):
        join()


def test_the_public_functions_are_those_that_look_at_their_arguments():
    assert len(FUNCTIONS) > 30
    assert all(hasattr(getattr(basisprune, name), "__wrapped__") for name in FUNCTIONS)
    assert basisprune.fit is basisprune.fit


@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_argument_of_a_wrong_type_gets_further_than_a_message(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function = getattr(basisprune, name)
    given = {"model": tiny_decomposed(), "data": tiny_images(), "batches": [], "path": "file"}
    needed = [each for each in inspect.signature(function).parameters.values() if each.default is each.empty]
    named = [each for each in needed if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        base = {each.name: given.get(each.name, object()) for each in named}
        for odd in ODD:
            with contextlib.suppress(BasisPruneError):  # or it is not needed, and never looked at
                function(**base | {parameter.name: odd})
    assert list(tmp_path.iterdir()) == []
