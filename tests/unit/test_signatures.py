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
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_decomposed, tiny_images, tiny_model, tiny_training
from torch import nn

import basisprune
from basisprune.callback import Callback, NullCallback
from basisprune.data import FolderImages, PreparedBatches, load_data, make_loader, prepare
from basisprune.errors import BasisPruneError, ConfigError, DataError, ModelError
from basisprune.signatures import Fraction, ImageSize, Seed, checked, fits
from basisprune.types import InputSpec


def moved(name: str) -> Callable[..., object]:
    """A function that was public, and still is with a warning."""
    with pytest.warns(DeprecationWarning, match=name):
        return getattr(basisprune, name)


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
        (np.int64(3), Seed, True),
        (np.float64(0.5), Fraction, True),
        (1.0, Fraction, False),
        ([4, 4], ImageSize, True),
        ((0, 4), ImageSize, False),
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
        (["x", 3], Sequence[str | nn.Module], False),
        (NullCallback(), Callback | None, True),
        (3, Callback | None, False),
        (print, Callable[[int], int], True),
        (3, Callable[[int], int], False),
    ],
)
def test_a_value_fits_a_type_or_not(value, hint, fit):
    assert fits(value, hint) is fit


def test_all_faults_are_told_at_once():
    @checked
    def join(first: str, *rest: str, times: int = 1, **more: object) -> str:
        return first + "".join(rest) * times

    assert join("a", "b", times=2, other=3) == "abb"
    assert inspect.signature(join).parameters.keys() == {"first", "rest", "times", "more"}
    with pytest.raises(ConfigError) as error:
        join(3, times=[1])
    assert error.value.faults == ("first: 3 given, str is needed", "times: [1] given, int is needed")
    with pytest.raises(TypeError, match="missing a required argument"):
        join()


def test_the_public_functions_are_those_that_look_at_their_arguments():
    assert len(FUNCTIONS) > 20
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
    "taylor_scores": lambda model: moved("taylor_scores")(model, batches()),
    "basis_loss": lambda model: moved("basis_loss")(model, batches()),
    "basis_statistics": lambda model: moved("basis_statistics")(model, batches()),
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
    "choose_layers": moved("choose_layers"),
    "decompose": basisprune.decompose,
    "export_program": lambda model: moved("export_program")(model, "net.pt2", example_inputs=IMAGES),
    "export_onnx": lambda model: moved("export_onnx")(model, "net.onnx"),
    "fit": lambda model: basisprune.fit(model, tiny_images(6), None, tiny_training(epochs=1)),
    "measure": basisprune.measure,
    "measure_latency": lambda model: basisprune.measure_latency({"it": model}, repeats=1, backends=["eager"]),
    "rebase": lambda model: moved("rebase")(model, batches()),
    "recompose": basisprune.recompose,
    "save_pretrained": lambda model: basisprune.save_pretrained(model, "bundle"),
    "score_filters": lambda model: moved("score_filters")(model, "l1", ["backbone.0"]),
    "set_trainable": moved("set_trainable"),
    "trace_coupling": lambda model: moved("trace_coupling")(model, IMAGES),
    "weight_uses": moved("weight_uses"),
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
    @checked
    def fail(model: nn.Module) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        fail(tiny_decomposed())


SPEC = InputSpec((16, 16), (0.5,) * 3, (0.5,) * 3)
ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.lists(st.integers() | st.text(max_size=2), max_size=3) | st.dictionaries(st.text(max_size=2), st.integers())
    | st.tuples(st.integers(), st.floats()) | st.builds(object) | st.complex_numbers() | st.just(np.zeros(3))
)  # fmt: skip


@given(value=ANYTHING)
def test_only_numbers_within_a_range_fit_it(value):
    assert not fits(value, Seed) or 0 <= value < 2**63
    assert not fits(value, Fraction) or 0 <= value < 1
    assert not fits(value, ImageSize) or len(value) == 2


def calls(name: str, value: object) -> None:
    """Calls a public function with this value for one of its arguments."""
    images, pixels = tiny_images(), torch.zeros(2, 3, 16, 16)
    where, argument = name.split(".")
    if where == "load_data":
        load_data(**{"source": images, argument: value})
    elif where == "make_loader":
        list(make_loader(**{"dataset": images, "batch_size": 4, argument: value}))
    elif where == "prepare":
        prepare(**{"images": pixels, "spec": SPEC, argument: value})
    elif where == "PreparedBatches":
        list(PreparedBatches(**{"data": images, "spec": SPEC, argument: value}))
    elif where == "InputSpec":
        InputSpec(**{"size": (4, 4), "mean": (0.5,), "std": (0.5,), argument: value})


ARGUMENTS = [
    *(f"load_data.{name}" for name in ("source", "size", "val_fraction", "test_fraction")),
    *(f"load_data.{name}" for name in ("confirm_fraction", "seed", "limit", "reading")),
    *(f"make_loader.{name}" for name in ("dataset", "batch_size", "seed", "epoch", "size")),
    *("prepare.images", "prepare.spec", "PreparedBatches.data", "PreparedBatches.spec", "PreparedBatches.limit"),
    *("InputSpec.size", "InputSpec.mean", "InputSpec.std", "InputSpec.interpolation", "InputSpec.white"),
]


@pytest.mark.parametrize("name", ARGUMENTS)
@given(value=ANYTHING)
def test_no_argument_of_a_wrong_type_ends_in_anything_but_an_error_of_ours(name, value):
    with contextlib.suppress(BasisPruneError):
        calls(name, value)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["mean", "std"])
def test_means_and_deviations_are_finite(name, number):
    with pytest.raises(ConfigError, match="finite numbers are needed"):
        InputSpec(**{"size": (4, 4), "mean": (0.5,) * 3, "std": (0.5,) * 3, name: (0.5, number, 0.5)})


@pytest.mark.parametrize("seed", [2**63, 2**64, -1, "0", 1.5, True])
def test_seeds_that_a_generator_does_not_take_are_refused(seed):
    with pytest.raises(ConfigError, match=r"load_data: seed: .* given"):
        load_data(tiny_images(), seed=seed)


def test_a_size_beyond_reason_is_refused():
    with pytest.raises(ConfigError, match=r"size: \(100000000, 100000000\) given"):
        load_data(tiny_images(), size=(10**8, 10**8))


def test_files_of_a_folder_dataset_are_looked_at():
    for files in (3, [3], [("a.png", "x")], [("a.png",)], [(3, 0)]):
        with pytest.raises((ConfigError, DataError)):
            FolderImages(files, ("a",))
