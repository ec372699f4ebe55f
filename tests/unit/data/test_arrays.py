"""Laws of .npz files."""

from __future__ import annotations

import contextlib
import os
import unicodedata
import zipfile
from pathlib import Path

import numpy as np
import pytest
from bundles import seal
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import arrays, refused, sizes, write_images, write_npz
from tiny import tiny_model

from basisprune.data import ArrayImages, Loaders, Splits, load_data
from basisprune.data.arrays import distinct_names
from basisprune.data.datasets import WrappedDataset
from basisprune.data.load import read_npz
from basisprune.deploy.bundle import load_bundle, save_pretrained
from basisprune.errors import DataError
from basisprune.runs.finished import load_any


def test_an_npz_keeps_its_test_part_and_gets_a_validation_part(tmp_path):
    content = arrays()
    splits = load_data(write_npz(tmp_path, **content))
    assert sizes(splits) == {"train": 24, "val": 6, "test": 3}
    assert splits.classes == ("0", "1", "2")
    np.testing.assert_array_equal(splits.test[2][0].numpy(), content["x_test"][2].transpose(2, 0, 1))


def test_an_npz_may_have_grey_integers_columns_of_labels_and_a_validation_part(tmp_path):
    content = arrays()
    content = {name: array[..., 0].astype(int) if name[0] == "x" else array[:, None] for name, array in content.items()}
    path = write_npz(tmp_path, **content, x_val=255 - content["x_test"], y_val=content["y_test"], other=np.zeros(3))
    splits = load_data(path)
    assert sizes(splits) == {"train": 30, "val": 3, "test": 3}
    assert splits.train[0][0].shape == (1, 6, 5)


def test_an_npz_with_two_members_of_one_name_is_refused(tmp_path):
    path = write_npz(tmp_path, **arrays())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x_train", archive.read("x_train.npy"))  # which numpy reads
    refused(path, "several arrays of one name")


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
        ({"y_train": None}, ("y_train missing", "x_train and y_train are needed")),
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
        ({"y_test": np.array([0, 1, 9])}, ("y_test", "the labels 9, which training lacks")),
        ({"y_train": np.zeros(30, int), "y_test": np.zeros(3, int)}, ("1 class", "at least two")),
        ({"x_test": np.array([arrays()["x_test"][0], None], dtype=object)}, ("x_test", "pickled", "never loaded")),
    ],
)
def test_an_npz_that_does_not_fit_is_refused(tmp_path, change, parts):
    content = {name: array for name, array in (arrays() | change).items() if array is not None}
    refused(write_npz(tmp_path, **content), "data.npz", *parts)


@pytest.mark.parametrize("label", [2**63, 2**64 - 1])
def test_labels_that_no_index_can_be_are_refused(tmp_path, label):
    content = arrays()
    content["y_train"] = content["y_train"].astype(np.uint64)
    content["y_train"][0] = label
    refused(write_npz(tmp_path, **content), "y_train", str(label), "at most 9223372036854775807")


def forged(tmp_path: Path, key: str, shape: str, extra: int = 0) -> Path:
    """A .npz file in which one array claims to have another shape."""
    path = write_npz(tmp_path, **arrays())
    with zipfile.ZipFile(path) as archive:
        held = {name: archive.read(name) for name in archive.namelist()}
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header = header.ljust(117) + b"\n"
    held[f"{key}.npy"] = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(extra)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in held.items():
            archive.writestr(name, data)
    return path


@pytest.mark.parametrize(
    "shape", ["(10**6,)", "(1000000000000, 3, 3)", "(2**40, 2**40)", "(-5,)", "(99999999999999999999,)"]
)
def test_a_header_that_claims_more_than_there_is_is_refused_before_memory_is_taken(tmp_path, shape, monkeypatch):
    monkeypatch.setattr("numpy.load", None)
    refused(forged(tmp_path, "x_train", shape), "data.npz")


def test_arrays_that_do_not_fit_into_memory_are_refused_before_it_is_taken(tmp_path, monkeypatch):
    path = forged(tmp_path, "x_train", "(64, 64, 64, 3)", 64**3 * 3)
    monkeypatch.setattr("basisprune.data.arrays._memory", lambda: 1000)
    refused(path, "its arrays need 78", "this machine has 1,000")


def test_a_pipe_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "data.npz")
    refused(tmp_path / "data.npz", "data.npz: cannot be read (it is a pipe, no file)")


@given(place=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.booleans())
@settings(max_examples=150)
def test_any_damage_is_refused_by_name_or_harmless(tmp_path_factory, place, value, cut):
    path = write_npz(tmp_path_factory.getbasetemp(), **arrays())
    content = bytearray(path.read_bytes())
    content[place % len(content)] = value
    path.write_bytes(content[: place % len(content)] if cut else content)
    with contextlib.suppress(DataError):
        load_data(path)


def test_what_is_no_npz_is_refused(tmp_path):
    path = tmp_path / "data.npz"
    for content in (b"", b"text", b"PK\x03\x04 cut off"):
        path.write_bytes(content)
        refused(path, "data.npz: cannot be read (", "write it with numpy.savez")
    with path.open("wb") as file:
        np.save(file, np.zeros(3))
    refused(path, "data.npz", "a single array")
    content = bytearray(write_npz(tmp_path, **arrays()).read_bytes())
    content[300:400] = bytes(100)
    path.write_bytes(content)
    refused(path, "data.npz: cannot be read (", "write it with numpy.savez")


def test_arrays_that_are_far_larger_than_their_file_are_refused(tmp_path, monkeypatch):
    content = arrays(300)
    np.savez_compressed(tmp_path / "bomb.npz", **{**content, "x_train": np.zeros((300, 96, 96, 3), dtype=np.uint8)})
    assert len(read_npz(tmp_path / "bomb.npz").train) == 300  # as small as it is, it may
    monkeypatch.setattr("basisprune.data.arrays._UNPACKED", 1 << 20)
    refused(tmp_path / "bomb.npz", "bomb.npz: its arrays need 8,", "the file has")


ALIKE = [
    ("ant", "ant "),
    ("ant", "ant\u200b"),
    ("caf\u00e9", unicodedata.normalize("NFD", "caf\u00e9")),
    ("a b", "a  b"),
]


@pytest.mark.parametrize("names", ALIKE)
def test_class_folders_that_look_alike_are_refused_by_both_names(names, tmp_path):
    with pytest.raises(DataError, match="look alike") as caught:
        load_data(write_images(tmp_path, dict.fromkeys((*names, "bee"), 3)), size=(4, 4))
    assert all(f"{name!a}" in str(caught.value) for name in names)


def test_capital_and_small_letters_are_two_classes(tmp_path):
    splits = load_data(write_images(tmp_path, {"a": 6, "A": 6}), size=(4, 4), val_fraction=0, test_fraction=0)
    assert splits.classes == ("A", "a")
    assert np.bincount(splits.train.labels).tolist() == [6, 6]


def test_equal_names_of_arrays_and_loaders_are_refused():
    images = ArrayImages(arrays()["x_train"], arrays()["y_train"], ["ant", "bee", "ant"])
    with pytest.raises(DataError, match="'ant' and 'ant' look alike"):
        Splits(images, None, None, images.classes)
    with pytest.raises(DataError, match="look alike"):
        load_data(images)
    loaders = Loaders(train=[], val=[], classes=("ant", "ant"))
    assert loaders.classes == ("ant", "ant")  # which are looked at with the task


def test_numbered_classes_of_one_name_get_their_number():
    class Birds:
        classes = ("crane", "owl", "crane")

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int):
            return np.full((4, 4, 3), index, dtype=np.uint8), index

    assert WrappedDataset(Birds()).classes == ("crane", "owl", "crane (2)")
    assert distinct_names(["a", "a (1)", "a"]) == ("a", "a (1)", "a (2)")
    made = distinct_names(["a", "a", "a (1)", "a"])
    assert len(set(made)) == 4
    assert (made[0], made[2]) == ("a", "a (1)")


def test_a_bundle_of_equal_names_answers_for_each_of_its_classes(tmp_path):
    folder = save_pretrained(tiny_model(), tmp_path / "ours", classes=["owl", "owl", "bee"])
    assert load_bundle(folder).classes == ("owl", "owl (1)", "bee")
    seal(folder, lambda config: config.update(classes=["owl", "owl", "owl"]))
    assert len(set(load_any(folder).classes)) == 3
