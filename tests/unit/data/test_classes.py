"""Laws of the names of classes: no two images of different classes can be taken for those of one."""

from __future__ import annotations

import unicodedata

import numpy as np
import pytest
from bundles import seal
from sources import arrays, write_images
from tiny import tiny_model

from basisprune.data import ArrayImages, Loaders, Splits, load_data
from basisprune.data.classes import told_apart
from basisprune.data.wrapped import WrappedDataset
from basisprune.deploy.bundle import load_bundle, save_pretrained
from basisprune.errors import DataError
from basisprune.runs.load import load_any

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
    assert told_apart(["a", "a (1)", "a"]) == ("a", "a (1)", "a (2)")
    made = told_apart(["a", "a", "a (1)", "a"])
    assert len(set(made)) == 4
    assert (made[0], made[2]) == ("a", "a (1)")


def test_a_bundle_of_equal_names_answers_for_each_of_its_classes(tmp_path):
    folder = save_pretrained(tiny_model(), tmp_path / "ours", classes=["owl", "owl", "bee"])
    assert load_bundle(folder).classes == ("owl", "owl (1)", "bee")
    seal(folder, lambda config: config.update(classes=["owl", "owl", "owl"]))
    assert len(set(load_any(folder).classes)) == 3
