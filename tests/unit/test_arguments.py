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
from tiny import tiny_decomposed, tiny_images, tiny_model, tiny_training
from torch import nn

import basisprune
from basisprune.arguments import fits, takes
from basisprune.errors import BasisPruneError, ConfigError, ModelError
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


# ------------------------------------------------------------------------------- networks that are not what they seem

IMAGES = torch.zeros(2, 3, 16, 16)
WORK = {
    "evaluate": lambda model: basisprune.evaluate(model, tiny_images(6)),
    "predict": lambda model: basisprune.predict(model, tiny_images(6)),
    "taylor_scores": lambda model: basisprune.taylor_scores(model, batches()),
    "basis_loss": lambda model: basisprune.basis_loss(model, batches()),
    "basis_statistics": lambda model: basisprune.basis_statistics(model, batches()),
    "fold": lambda model: basisprune.fold(model, IMAGES),
}


def batches() -> basisprune.PreparedBatches:
    return basisprune.PreparedBatches(tiny_images(6), tiny_decomposed().input_spec, batch_size=3)


@pytest.mark.parametrize("name", [name for name in WORK if name != "fold"])
@pytest.mark.parametrize("change", ["half", "double"])
def test_a_network_of_another_precision_is_shown_its_images_in_it(name, change):
    WORK[name](getattr(tiny_decomposed(), change)())


@pytest.mark.parametrize(("name", "change"), [*((name, "meta") for name in WORK), ("fold", "half"), ("fold", "double")])
def test_a_network_of_another_kind_is_named_where_it_fails(name, change):
    model = tiny_decomposed()
    model = model.to("meta") if change == "meta" else getattr(model, change)()
    wanted = "on the meta device" if change == "meta" else r"weights of torch\.float\d\d was given; pass model\.float"
    with pytest.raises(ModelError, match=f"^{name}: .*{wanted}"):
        WORK[name](model)


MORE_WORK = {
    "choose_layers": basisprune.choose_layers,
    "decompose": basisprune.decompose,
    "export_program": lambda model: basisprune.export_program(model, "net.pt2", example_inputs=IMAGES),
    "export_onnx": lambda model: basisprune.export_onnx(model, "net.onnx"),
    "fit": lambda model: basisprune.fit(model, tiny_images(6), None, tiny_training(epochs=1)),
    "measure": basisprune.measure,
    "measure_latency": lambda model: basisprune.measure_latency({"it": model}, repeats=1, backends=["eager"]),
    "rebase": lambda model: basisprune.rebase(model, batches()),
    "recompose": basisprune.recompose,
    "save_pretrained": lambda model: basisprune.save_pretrained(model, "bundle"),
    "score_filters": lambda model: basisprune.score_filters(model, "l1", ["backbone.0"]),
    "set_trainable": basisprune.set_trainable,
    "trace_coupling": lambda model: basisprune.trace_coupling(model, IMAGES),
    "weight_uses": basisprune.weight_uses,
}


def lazy() -> nn.Module:
    model = tiny_decomposed()
    model.classifier = nn.LazyLinear(3)
    return model


@pytest.mark.filterwarnings("ignore")  # torch's own, about scripting and lazy layers
@pytest.mark.parametrize("kind", ["half", "double", "meta", "scripted", "lazy"])
def test_only_errors_of_ours_come_of_odd_networks(kind, tmp_path, monkeypatch):
    """Where a network of another kind will do, it does; nothing else comes out than an answer or an error of ours."""
    monkeypatch.chdir(tmp_path)
    slow = {"export_onnx", "export_program"} if kind in ("half", "double", "lazy") else set()  # which they can export
    plain = {"scripted": lambda: torch.jit.trace(tiny_model().eval(), IMAGES), "lazy": lazy}.get(kind, tiny_decomposed)
    for name, work in (WORK | MORE_WORK).items():
        model = plain()
        model = model.to("meta") if kind == "meta" else getattr(model, kind)() if kind in ("half", "double") else model
        if name not in slow:
            with contextlib.suppress(BasisPruneError):
                work(model)


@pytest.mark.parametrize("name", ["taylor_scores", "basis_loss"])
def test_what_needs_gradients_says_so_or_works_without(name):
    with torch.no_grad(), contextlib.suppress(BasisPruneError):
        WORK[name](tiny_decomposed())
    with torch.inference_mode(), pytest.raises(ModelError, match="it was called without gradients"):
        WORK[name](tiny_decomposed())


def test_another_default_precision_is_named_where_something_fails():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(ModelError, match=r"default dtype is torch\.float64"):
            WORK["fold"](tiny_decomposed())
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_fault_of_ours_stays_what_it_is():
    @takes
    def fail(model: nn.Module) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        fail(tiny_decomposed())
