from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset, random_split

from basisprune.data import ArrayImages, FolderImages, Splits, WrappedDataset, load_data
from basisprune.errors import ConfigError, DataError

SHADES = {"ant": 10, "bee": 120, "cat": 240}


def write_images(folder: Path, counts: dict[str, int]) -> Path:
    """A folder of class folders; the shade of an image tells its class."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.new("RGB", (6, 5), (SHADES.get(name, 0),) * 3).save(folder / name / f"{number}.png")
    return folder


def arrays(count: int = 30, classes: int = 3) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "x_train": random.integers(0, 256, (count, 6, 5, 3), dtype=np.uint8),
        "y_train": np.arange(count) % classes,
        "x_test": random.integers(0, 256, (classes, 6, 5, 3), dtype=np.uint8),
        "y_test": np.arange(classes),
    }


def write_npz(folder: Path, **content) -> Path:
    path = folder / "data.npz"
    np.savez(path, **content)
    return path


def tensors(count: int = 30, classes: int = 3) -> TensorDataset:
    return TensorDataset(torch.rand(count, 3, 4, 4), torch.arange(count) % classes)


def sizes(splits: Splits) -> dict[str, int]:
    return {name: len(part) for name, part in splits.parts.items()}


# -------------------------------------------------------------------- folders


def test_class_folders_become_three_parts(tmp_path):
    splits = load_data(write_images(tmp_path, {"cat": 10, "ant": 20, "bee": 3}), size=(8, 9))
    assert splits.classes == ("ant", "bee", "cat")
    assert splits.num_classes == 3
    assert sizes(splits) == {"train": 16 + 1 + 8, "val": 2 + 1 + 1, "test": 2 + 1 + 1}
    for part in splits.parts.values():
        assert part.classes == splits.classes
        for image, label in part:
            assert image.shape == (3, 8, 9)
            assert image.unique().tolist() == [SHADES[splits.classes[label]]]


def test_the_same_seed_gives_the_same_files_and_the_default_size_is_224(tmp_path):
    write_images(tmp_path, {"ant": 8, "bee": 8})

    def files(seed: int) -> list[Path]:
        test = load_data(tmp_path, seed=seed, test_fraction=0.4).test
        return [test.dataset.paths[index] for index in test.indices]

    assert files(1) == files(1)
    assert files(1) != files(2)
    assert load_data(str(tmp_path)).train[0][0].shape == (3, 224, 224)


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_part_folders_are_taken_as_they_are(tmp_path, val):
    for part, count in (("train", 5), (val, 2), ("test", 3)):
        write_images(tmp_path / part, {"ant": count, "bee": count})
    write_images(tmp_path / "extra", {"dog": 2})
    splits = load_data(tmp_path)
    assert sizes(splits) == {"train": 10, "val": 4, "test": 6}
    assert splits.classes == ("ant", "bee")


def test_parts_that_are_missing_are_drawn_from_training(tmp_path):
    write_images(tmp_path / "train", {"ant": 10, "bee": 10})
    assert sizes(load_data(tmp_path)) == {"train": 16, "val": 2, "test": 2}
    assert sizes(load_data(tmp_path, test_fraction=0)) == {"train": 18, "val": 2}
    assert sizes(load_data(tmp_path, val_fraction=0, test_fraction=0)) == {"train": 20}
    write_images(tmp_path / "test", {"ant": 3, "bee": 3})
    assert sizes(load_data(tmp_path)) == {"train": 18, "val": 2, "test": 6}


def test_a_class_may_be_called_train(tmp_path):
    assert load_data(write_images(tmp_path, {"bus": 4, "train": 4})).classes == ("bus", "train")


def test_nested_images_are_found_and_hidden_or_other_files_passed_over(tmp_path):
    write_images(tmp_path, {"ant": 3, "bee": 3})
    write_images(tmp_path / "ant", {"deep": 1, ".cache": 1})
    write_images(tmp_path, {".git": 2})
    (tmp_path / "bee" / "notes.txt").write_text("x")
    (tmp_path / "bee" / "._0.png").write_text("x")
    (tmp_path / "bee" / "3.PNG").write_bytes((tmp_path / "bee" / "0.png").read_bytes())
    splits = load_data(tmp_path, val_fraction=0, test_fraction=0)
    assert np.bincount(splits.train.labels).tolist() == [4, 4]


def test_a_limit_keeps_that_many_training_images(tmp_path):
    write_images(tmp_path, {"ant": 20, "bee": 10})
    assert sizes(load_data(tmp_path, limit=6)) == {"train": 6, "val": 3, "test": 3}
    assert np.bincount(load_data(tmp_path, limit=6).train.labels).tolist() == [4, 2]
    assert sizes(load_data(tmp_path, limit=1000))["train"] == 24
    with pytest.raises(ConfigError, match="limit: 1 given, at least 2 is needed"):
        load_data(tmp_path, limit=1)


def test_the_description_has_a_line_for_each_part(tmp_path):
    write_images(tmp_path, {"ant": 20, "bee": 10})
    train, val = load_data(tmp_path, test_fraction=0).describe().splitlines()
    assert train == "train: 27 images, smallest class 'bee' (9), largest 'ant' (18)"
    assert val == "val: 3 images, smallest class 'bee' (1), largest 'ant' (2)"


def refused(source, *parts: str, **options) -> None:
    with pytest.raises(DataError) as caught:
        load_data(source, **options)
    message = str(caught.value)
    assert all(part in message for part in parts), message


def test_a_missing_path_is_refused(tmp_path):
    refused(tmp_path / "nowhere", str(tmp_path / "nowhere"), "no such file or folder")


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "data.csv").write_text("1,2")
    refused(tmp_path / "data.csv", "data.csv", "cannot be read", ".npz")


def test_an_empty_folder_is_refused(tmp_path):
    refused(tmp_path, str(tmp_path), "no class folders")
    Image.new("RGB", (4, 4)).save(tmp_path / "loose.png")
    refused(tmp_path, str(tmp_path), "no class folders")


@pytest.mark.parametrize("extra", [(), ("a.txt", "b.txt")])
def test_a_class_without_images_is_refused(tmp_path, extra):
    write_images(tmp_path, {"ant": 3, "bee": 0})
    for name in extra:
        (tmp_path / "bee" / name).write_text("x")
    refused(tmp_path, str(tmp_path / "bee"), "no image", "2 other files, such as a.txt" if extra else "it is empty")


def test_one_class_only_is_refused(tmp_path):
    refused(write_images(tmp_path, {"ant": 3}), str(tmp_path), "one class only (ant)")


@pytest.mark.parametrize("part", ["val", "test"])
def test_parts_that_differ_in_classes_are_refused(tmp_path, part):
    write_images(tmp_path / "train", {"ant": 3, "bee": 3})
    write_images(tmp_path / part, {"ant": 3, "cat": 3})
    refused(tmp_path, str(tmp_path), f"only in train/: bee; only in {part}/: cat")


def test_two_validation_folders_or_no_training_folder_are_refused(tmp_path):
    for name in ("val", "valid"):
        write_images(tmp_path / name, {"ant": 1, "bee": 1})
    refused(tmp_path, str(tmp_path), "no train/")
    write_images(tmp_path / "train", {"ant": 3, "bee": 3})
    refused(tmp_path, str(tmp_path), "both val and valid")


def test_classes_too_small_to_split_are_refused(tmp_path):
    write_images(tmp_path, {"ant": 1, "bee": 1})
    refused(tmp_path, str(tmp_path), "val part", "val_fraction=0")
    assert sizes(load_data(tmp_path, val_fraction=0, test_fraction=0)) == {"train": 2}


# ------------------------------------------------------------------------ npz


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


# ----------------------------------------------------------- PyTorch datasets


def test_splits_are_returned_as_they_are():
    splits = load_data(tensors())
    assert load_data(splits) is splits


def test_one_dataset_is_split():
    splits = load_data(tensors())
    assert sizes(splits) == {"train": 24, "val": 3, "test": 3}
    assert isinstance(splits.train.dataset, WrappedDataset)


def test_datasets_in_a_tuple_are_the_parts():
    assert sizes(load_data((tensors(), tensors(6)))) == {"train": 27, "val": 6, "test": 3}
    assert sizes(load_data((tensors(), tensors(6)), test_fraction=0)) == {"train": 30, "val": 6}
    assert sizes(load_data((tensors(), tensors(6), tensors(9)))) == {"train": 30, "val": 6, "test": 9}
    assert sizes(load_data((tensors(), None, tensors(9)))) == {"train": 27, "val": 3, "test": 9}


def test_random_splits_and_our_own_datasets_are_taken(tmp_path):
    train, val = random_split(tensors(60), [50, 10], torch.Generator().manual_seed(0))
    assert sizes(load_data((train, val), test_fraction=0)) == {"train": 50, "val": 10}
    write_images(tmp_path, {"ant": 1})
    files = FolderImages([(tmp_path / "ant" / "0.png", label) for label in (0, 1)] * 5, ("a", "b"), (4, 4))
    assert load_data(files).train.dataset is files


def test_images_of_a_dataset_are_resized_only_if_asked():
    items = [(Image.new("RGB", (9, 7)), label) for label in (0, 1)] * 5
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
    def named(*classes: str) -> ArrayImages:
        return ArrayImages(arrays()["x_train"], arrays()["y_train"], classes)

    refused((named("a", "b", "c"), named("a", "c", "b")), "val dataset", "('a', 'c', 'b')", "('a', 'b', 'c')")
    assert load_data((named("a", "b", "c"), named("a", "b", "c"))).classes == ("a", "b", "c")


def test_datasets_that_do_not_fit_are_refused():
    refused((tensors(),), "1 datasets given", "(train, val)")
    refused((tensors(classes=2), tensors(6, classes=3)), "val part has the labels 2, which training lacks")
    refused(tensors(classes=1), "1 class", "at least two")
    refused((tensors(), tensors(0)), "val part is empty")
    refused(42, "int given, a map-style dataset is needed")


def test_all_wrong_arguments_are_listed_at_once():
    with pytest.raises(ConfigError) as caught:
        load_data(tensors(), size=(0, 4), val_fraction=-0.1, test_fraction=1.0, seed=-1, limit=0)
    faults = ("5 faults", "val_fraction: -0.1", "test_fraction: 1.0", "size: (0, 4)", "seed: -1", "limit: 0")
    assert all(fault in str(caught.value) for fault in faults)
    with pytest.raises(ConfigError, match="leaves nothing to train on"):
        load_data(tensors(), val_fraction=0.5, test_fraction=0.5)
