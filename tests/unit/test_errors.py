"""Laws of the errors: faults are data, and the message is made of them."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch import nn

from basisprune.coupling import trace_coupling
from basisprune.errors import (
    BasisPruneError,
    BundleError,
    CheckpointError,
    ConfigError,
    DataError,
    LayerError,
    MissingExtraError,
    ModelError,
    PlanError,
    ProcessError,
    TooMuchError,
    TrainingError,
    faults_of_json,
    is_about_memory,
    nearest,
)
from basisprune.runs.preflight import class_scores
from basisprune.tasks import CLASSIFICATION
from basisprune.torchkit.watching import watch_run
from basisprune.transfer.model import kept_model

LISTING = [
    ConfigError,
    DataError,
    ModelError,
    PlanError,
    TooMuchError,
    CheckpointError,
    BundleError,
    TrainingError,
    ProcessError,
]
BUILTINS = dict.fromkeys(LISTING, ValueError) | {TrainingError: RuntimeError, ProcessError: RuntimeError}
words = st.text(min_size=1)


@pytest.mark.parametrize("kind", LISTING)
@given(where=words, faults=st.lists(words, min_size=1, max_size=4))
def test_an_error_keeps_its_faults_as_data_and_names_each_in_its_message(kind, where, faults):
    error = kind.of(where, faults)
    assert isinstance(error, BUILTINS[kind])
    assert (error.where, error.faults) == (where, tuple(faults))
    assert str(error).startswith(where)
    assert all(fault in str(error) for fault in faults)


def test_a_message_alone_is_the_one_fault():
    error = DataError("photo.png: is not an image")
    assert (str(error), error.where, error.faults) == (
        "photo.png: is not an image",
        "",
        ("photo.png: is not an image",),
    )


def test_several_faults_are_counted_and_listed():
    assert str(ConfigError.of("Recipe", ["a", "b"])) == "Recipe: 2 faults\n  - a\n  - b"
    assert str(ConfigError("a", "b")) == "2 faults\n  - a\n  - b"
    assert str(CheckpointError.of("run: other settings", ["a", "b"])).startswith("run: other settings: 2 differences\n")


def test_a_long_list_is_whole_as_data_and_cut_short_in_the_message():
    error = PlanError.of("the plan", [f"layer {i}" for i in range(200)])
    assert len(error.faults) == 200
    assert str(error).endswith("layer 19\n  - and 180 more")


def test_a_very_long_fault_is_whole_as_data_and_loses_its_middle_in_the_message():
    fault = f"torch says {'x' * 50_000}; fetch it again"
    one, many = BundleError.of("net", [fault]), BundleError.of("net", [fault] * 100)
    assert one.faults == (fault,)
    assert str(one).startswith("net: torch says")
    assert str(one).endswith("; fetch it again")
    assert len(str(one)) < 5_000
    assert len(str(many)) < 20_000


def test_the_error_of_a_layer_starts_with_its_name():
    error = LayerError("conv1", "has hooks")
    assert (str(error), error.layer, error.where, error.faults) == (
        *("conv1: has hooks", "conv1", "conv1"),
        ("has hooks",),
    )
    assert str(LayerError("", "has hooks")) == "(root module): has hooks"


@pytest.mark.parametrize(
    "error",
    [ConfigError.of("here", ["a", "b"]), PlanError("a"), LayerError("conv1", "b"), MissingExtraError("onnx", "onnx")],
    ids=lambda error: type(error).__name__,
)
def test_an_error_survives_copies_and_pickles(error: BasisPruneError):
    for twin in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (type(twin), str(twin), twin.where, twin.faults) == (type(error), str(error), error.where, error.faults)


def test_the_hint_names_what_is_near_and_nothing_else():
    assert nearest("tailor", ["taylor", "l1"]) == " Did you mean 'taylor'?"
    assert nearest("XYZ", ["taylor", "l1"]) == ""
    assert nearest("CIFAR", ["cifar10"]) == " Did you mean 'cifar10'?"
    assert nearest("ab1", ["ab2", "ab3", "ab4"], most=3).count("ab") == 3


class Starved(nn.Module):
    """A network for which there is no memory."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.conv, self.error = nn.Conv2d(3, 4, 3), error

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("could not create a primitive"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
    ],
)
def test_a_network_without_memory_is_not_told_to_be_a_wrong_network(error):
    network, images = Starved(error), torch.zeros(2, 3, 32, 32)
    for work in (
        lambda: watch_run(network, images),
        lambda: kept_model(network),
        lambda: trace_coupling(network, images),
        lambda: class_scores(network, CLASSIFICATION, images, 4, training=False),
    ):
        with pytest.raises(type(error)) as caught:
            work()
        assert is_about_memory(caught.value)
    assert not is_about_memory(ModelError("cannot allocate"))


def test_very_many_faults_are_not_all_kept():
    for error in (DataError.of("here", (f"fault {number}" for number in itertools.count())), DataError(*["a"] * 5000)):
        assert (len(error.faults), len(error.args)) == (1000, 1000)
        assert "1000 or more faults" in str(error)
    assert "999 faults" in str(DataError(*["a"] * 999))


def test_faults_in_json_are_listed_with_their_places_as_text():
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(dict[str, int]).validate_json('{"a\\u001b": "x", "b": [1]}')
    assert faults_of_json(caught.value)[1] == "b: Input should be a valid integer"
    assert faults_of_json(caught.value)[0].startswith("a\\x1b: Input should be a valid integer")
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(list[str]).validate_json(f"[{','.join('0' * 2000)}]")
    assert faults_of_json(caught.value) == ["2,000 faults"]
