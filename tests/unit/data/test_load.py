"""Laws of `load_data`: any source becomes parts, and what cannot is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sources import arrays, refused, sizes, write_images
from tiny import Notes
from torch.utils.data import TensorDataset, random_split

from basisprune.data import ArrayImages, FolderImages, WrappedDataset, load_data
from basisprune.data.load import Reading
from basisprune.errors import ConfigError, DataError


def tensors(count: int = 30, classes: int = 3) -> TensorDataset:
    return TensorDataset(torch.rand(count, 3, 4, 4), torch.arange(count) % classes)


def test_the_same_seed_gives_the_same_files_and_the_default_size_is_224(tmp_path):
    write_images(tmp_path, {"ant": 8, "bee": 8})

    def files(seed: int) -> list[Path]:
        test = load_data(tmp_path, seed=seed, test_fraction=0.4).test
        return [test.dataset.paths[index] for index in test.indices]

    assert files(1) == files(1)
    assert files(1) != files(2)
    assert load_data(str(tmp_path)).train[0][0].shape == (3, 224, 224)


def test_parts_that_are_missing_are_drawn_from_training(tmp_path):
    write_images(tmp_path / "train", {"ant": 10, "bee": 10})
    assert sizes(load_data(tmp_path)) == {"train": 14, "val": 4, "test": 2}
    assert sizes(load_data(tmp_path, test_fraction=0)) == {"train": 16, "val": 4}
    assert sizes(load_data(tmp_path, val_fraction=0, test_fraction=0)) == {"train": 20}
    write_images(tmp_path / "test", {"ant": 3, "bee": 3})
    assert sizes(load_data(tmp_path)) == {"train": 16, "val": 4, "test": 6}


def test_a_limit_keeps_that_many_training_images(tmp_path):
    write_images(tmp_path, {"ant": 20, "bee": 10})
    assert sizes(load_data(tmp_path, limit=6)) == {"train": 6, "val": 6, "test": 3}
    assert np.bincount(load_data(tmp_path, limit=6).train.labels).tolist() == [4, 2]
    assert sizes(load_data(tmp_path, limit=1000))["train"] == 21
    with pytest.raises(ConfigError, match="limit: 1 given, at least 2 is needed"):
        load_data(tmp_path, limit=1)


def test_a_missing_path_is_refused(tmp_path):
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"), "no such file or folder")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "data.csv").write_text("1,2")
    refused(tmp_path / "data.csv", "data.csv", "cannot be read", ".npz")


def test_splits_are_returned_as_they_are():
    splits = load_data(tensors())
    assert load_data(splits) is splits


def test_one_dataset_is_split():
    splits = load_data(tensors())
    assert sizes(splits) == {"train": 21, "val": 6, "test": 3}
    assert isinstance(splits.train.dataset, WrappedDataset)


def test_datasets_in_a_tuple_are_the_parts():
    assert sizes(load_data((tensors(), tensors(6)))) == {"train": 27, "val": 6, "test": 3}
    assert sizes(load_data((tensors(), tensors(6)), test_fraction=0)) == {"train": 30, "val": 6}
    assert sizes(load_data((tensors(), tensors(6), tensors(9)))) == {"train": 30, "val": 6, "test": 9}
    assert sizes(load_data((tensors(), None, tensors(9)))) == {"train": 24, "val": 6, "test": 9}


def test_random_splits_and_our_own_datasets_are_taken(tmp_path):
    train, val = random_split(tensors(60), [50, 10], torch.Generator().manual_seed(0))
    assert sizes(load_data((train, val), test_fraction=0)) == {"train": 50, "val": 10}
    write_images(tmp_path, {"ant": 10})
    files = FolderImages([(tmp_path / "ant" / f"{index}.png", index % 2) for index in range(10)], ("a", "b"), (4, 4))
    assert load_data(files).train.dataset is files


def test_images_of_a_dataset_are_resized_only_if_asked():
    items = [(Image.new("RGB", (9, 7), (index, 0, 0)), index % 2) for index in range(10)]
    assert load_data(items_dataset(items)).train[0][0].shape == (3, 7, 9)
    assert load_data(items_dataset(items), size=(4, 4)).train[0][0].shape == (3, 4, 4)


def items_dataset(items):
    class Items(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(items)

        def __getitem__(self, index):
            return items[index]

    return Items()


def test_parts_whose_class_names_differ_are_refused():
    def named(*classes: str, shade: int = 0) -> ArrayImages:
        return ArrayImages(arrays()["x_train"] ^ shade, arrays()["y_train"], classes)

    refused((named("a", "b", "c"), named("a", "c", "b")), "val dataset", "('a', 'c', 'b')", "('a', 'b', 'c')")
    assert load_data((named("a", "b", "c"), named("a", "b", "c", shade=255))).classes == ("a", "b", "c")


def test_datasets_that_do_not_fit_are_refused():
    refused((tensors(),), "1 datasets given", "(train, val)")
    refused((tensors(classes=2), tensors(6, classes=3)), "val part: has the labels 2, which training lacks")
    refused(tensors(classes=1), "1 class", "at least two")
    refused((tensors(), tensors(0)), "val part is empty")
    with pytest.raises(ConfigError, match="source: 42 given"):
        load_data(42)


def test_all_wrong_arguments_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        load_data(tensors(), size=(0, 4), val_fraction=-0.1, test_fraction=1.0, seed=-1, limit=0)
    faults = ("5 faults", "val_fraction: -0.1", "test_fraction: 1.0", "size: (0, 4)", "seed: -1", "limit: 0")
    assert all(fault in str(caught.value) for fault in faults)
    with pytest.raises(ConfigError, match="leaves nothing to train on"):
        load_data(tensors(), val_fraction=0.5, test_fraction=0.5)


FOUND = [f"{number}.png" for number in range(12)]


def test_a_listener_hears_the_first_ten_and_how_many_more():
    notes = Notes()
    Reading(callback=notes).report("photos: 12 damaged", FOUND)
    assert notes.lines == ["\n  - ".join(["photos: 12 damaged", *FOUND[:10], "and 2 more"])]


def test_without_a_listener_it_is_a_warning_and_strict_it_is_an_error():
    with pytest.warns(UserWarning, match=r"photos: 1 damaged\n  - 0\.png$"):
        Reading().report("photos: 1 damaged", FOUND[:1])
    with pytest.raises(DataError) as error:
        Reading(strict=True, callback=Notes()).report("photos: 12 damaged", FOUND)
    assert (error.value.where, list(error.value.faults)) == ("photos: 12 damaged", FOUND)
