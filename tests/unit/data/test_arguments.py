"""Laws of arguments: what is of the wrong type or out of range is named, and all of it at once."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_images

from basisprune.data import FolderImages, PreparedBatches, load_data, make_loader, prepare
from basisprune.data.arguments import check, fraction, image_size, of_type, whole
from basisprune.errors import BasisPruneError, ConfigError, DataError
from basisprune.types import InputSpec

SPEC = InputSpec((16, 16), (0.5,) * 3, (0.5,) * 3)
ANYTHING = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5)
    | st.lists(st.integers() | st.text(max_size=2), max_size=3) | st.dictionaries(st.text(max_size=2), st.integers())
    | st.tuples(st.integers(), st.floats()) | st.builds(object) | st.complex_numbers() | st.just(np.zeros(3))
)  # fmt: skip


@given(value=ANYTHING)
def test_whatever_is_given_there_is_a_fault_or_it_fits(value):
    assert whole("n", value, 0, 9) is not None or 0 <= value <= 9
    assert fraction("n", value) is not None or 0 <= value < 1
    assert image_size("n", value) is not None or value is None or len(value) == 2
    assert of_type("n", value, int, "a number") is not None or isinstance(value, int)


def test_numbers_of_numpy_are_numbers():
    assert whole("n", np.int64(3), 0, 9) is None
    assert fraction("n", np.float64(0.5)) is None


def test_all_faults_are_told():
    with pytest.raises(ConfigError, match=r"(?s)here: 2 faults.*a: -1 given.*b: 'x' given"):
        check("here", [whole("a", -1, 0, 9), None, whole("b", "x", 0, 9)])
    check("here", [None])


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
