"""Laws of .npz files."""

from __future__ import annotations

import numpy as np
import pytest
from sources import arrays, refused, sizes, write_npz

from basisprune.data import load_data


def test_an_npz_keeps_its_test_part_and_gets_a_validation_part(tmp_path):
    content = arrays()
    splits = load_data(write_npz(tmp_path, **content))
    assert sizes(splits) == {"train": 27, "val": 3, "test": 3}
    assert splits.classes == ("0", "1", "2")
    np.testing.assert_array_equal(splits.test[2][0].numpy(), content["x_test"][2].transpose(2, 0, 1))


def test_an_npz_may_have_grey_integers_columns_of_labels_and_a_validation_part(tmp_path):
    content = arrays()
    content = {name: array[..., 0].astype(int) if name[0] == "x" else array[:, None] for name, array in content.items()}
    path = write_npz(tmp_path, **content, x_val=content["x_test"], y_val=content["y_test"], other=np.zeros(3))
    splits = load_data(path)
    assert sizes(splits) == {"train": 30, "val": 3, "test": 3}
    assert splits.train[0][0].shape == (1, 6, 5)


def test_labels_of_an_npz_need_not_be_contiguous(tmp_path):
    content = arrays()
    names = np.array([7, -3, 40])
    content |= {"y_train": names[content["y_train"]], "y_test": names[content["y_test"]]}
    splits = load_data(write_npz(tmp_path, **content))
    assert splits.classes == ("-3", "7", "40")
    assert splits.test.labels.tolist() == [1, 0, 2]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"x_train": None}, ("x_train missing",)),
        ({"y_test": None}, ("y_test missing", "found: x_test, x_train, y_train")),
        ({"x_val": arrays()["x_test"]}, ("y_val missing",)),
        ({"x_train": arrays()["x_train"][:, 0, 0]}, ("x_train", "shape (30, 3)")),
        ({"x_train": arrays()["x_train"].transpose(0, 3, 1, 2)}, ("x_train", "(30, 3, 6, 5)", "(N, H, W, C)")),
        ({"x_train": np.uint8(3)}, ("x_train", "single number")),
        ({"x_test": arrays()["x_test"] / 255}, ("x_test", "float64", "uint8", "convert")),
        ({"x_test": arrays()["x_test"].astype(np.float32)}, ("x_test", "float32 images from", "uint8")),
        ({"x_test": np.full((3, 6, 5), np.nan)}, ("x_test", "NaN")),
        ({"x_train": arrays()["x_train"].astype(int) - 1}, ("x_train", "from -1 to 254")),
        ({"y_train": arrays()["y_train"] + 0.5}, ("y_train", "float64 labels", "integers")),
        ({"y_train": np.array(["a", "b", "c"] * 10)}, ("y_train", "labels given", "integers")),
        ({"y_train": np.eye(30)}, ("y_train", "shape (30, 30)", "argmax")),
        ({"y_train": arrays()["y_train"][:29]}, ("y_train", "29 labels given for 30 images")),
        ({"y_test": np.array([0, 1, 9])}, ("y_test", "the labels 9, which y_train lacks")),
        ({"y_train": np.zeros(30, int), "y_test": np.zeros(3, int)}, ("1 class", "at least two")),
        ({"x_test": np.array([arrays()["x_test"][0], None], dtype=object)}, ("x_test", "pickled", "never loaded")),
    ],
)
def test_an_npz_that_does_not_fit_is_refused(tmp_path, change, parts):
    content = {name: array for name, array in (arrays() | change).items() if array is not None}
    refused(write_npz(tmp_path, **content), "data.npz", *parts)


def test_what_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "data.npz"
    for content in (b"", b"text", b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        refused(path, "data.npz", "not a .npz file, or damaged")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    refused(path, "data.npz", "a single array")
    content = bytearray(write_npz(tmp_path, **arrays()).read_bytes())
    content[300:400] = bytes(100)
    path.write_bytes(content)
    refused(path, "data.npz", "not a .npz file, or damaged")
