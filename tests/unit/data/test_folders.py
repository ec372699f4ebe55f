"""Laws of folders of class folders."""

from __future__ import annotations

import errno
import os

import numpy as np
import pytest
from PIL import Image
from sources import SHADES, refused, sizes, write_images

from basisprune.data import image_files, load_data
from basisprune.errors import DataError


def test_class_folders_become_three_parts(tmp_path):
    splits = load_data(write_images(tmp_path, {"cat": 10, "ant": 20, "bee": 3}), size=(8, 9))
    assert splits.classes == ("ant", "bee", "cat")
    assert splits.num_classes == 3
    assert sizes(splits) == {"train": 14 + 1 + 7, "val": 4 + 1 + 2, "test": 2 + 1 + 1}
    for part in splits.parts.values():
        assert part.classes == splits.classes
        for image, label in part:
            assert image.shape == (3, 8, 9)
            assert image.unique().tolist() == [SHADES[splits.classes[label]]]


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_part_folders_are_taken_as_they_are(tmp_path, val):
    for part, count in (("train", 5), (val, 2), ("test", 3)):
        write_images(tmp_path / part, {"ant": count, "bee": count})
    write_images(tmp_path / "extra", {"dog": 2})
    splits = load_data(tmp_path)
    assert sizes(splits) == {"train": 10, "val": 4, "test": 6}
    assert splits.classes == ("ant", "bee")


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


@pytest.mark.parametrize(
    "names", [("Train", "VAL", "Test"), ("TRAINING", "Valid", "TESTING"), ("training", "validation", "test")]
)
def test_parts_are_known_by_their_names_in_any_case(tmp_path, names):
    for part, count in zip(names, (5, 2, 3), strict=True):
        write_images(tmp_path / part, {"ant": count, "bee": count})
    splits = load_data(tmp_path)
    assert sizes(splits) == {"train": 10, "val": 4, "test": 6}
    assert splits.classes == ("ant", "bee")


@pytest.mark.parametrize(
    "folders",
    [
        {"train": ("ant", "bee"), "test_images": ("ant", "bee")},
        {"train_set": ("ant", "bee"), "test_set": ("ant", "bee")},
        {"": ("ant", "bee"), "val": ("ant", "bee")},
        {"": ("ant", "bee"), "Evaluation": ("bee",)},
    ],
)
def test_a_folder_that_may_be_meant_as_a_part_is_asked_about(tmp_path, folders):
    for folder, classes in folders.items():
        write_images(tmp_path / folder, dict.fromkeys(classes, 4))
    refused(tmp_path, "looks like a part of the data", "call the parts train/, val/ and test/")


def test_classes_may_be_called_like_parts(tmp_path):
    write_images(tmp_path, {"valid": 4, "invalid": 4, "tested": 4})
    write_images(tmp_path / "tested", {"twice": 2})
    assert load_data(tmp_path).classes == ("invalid", "tested", "valid")


def test_two_training_folders_are_refused(tmp_path):
    for name in ("Train", "training"):
        write_images(tmp_path / name, {"ant": 3, "bee": 3})
    refused(tmp_path, "both Train and training")


def test_a_class_whose_name_is_no_utf8_is_refused(tmp_path):
    write_images(tmp_path, {"ant": 3})
    os.mkdir(os.fsencode(tmp_path) + b"/b\xffe")
    refused(tmp_path, "the name of the class is not valid UTF-8")


def test_a_class_that_is_a_link_to_another_is_refused(tmp_path):
    write_images(tmp_path, {"ant": 3, "bee": 3})
    (tmp_path / "cat").symlink_to(tmp_path / "ant")
    refused(tmp_path, str(tmp_path / "cat"), "read already")


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


def found(folder, within=None) -> list[str]:
    return [str(path.relative_to(within or folder)) for path in image_files(folder)]


def test_images_are_found_however_deep_and_hidden_ones_passed_over(tmp_path):
    write_images(tmp_path, {"b": 2, "a": 1, "a/deep": 1, ".hidden": 1, "a/.cache/inner": 1})
    (tmp_path / "a" / "._0.png").write_bytes(b"x")
    (tmp_path / "a" / "notes.txt").write_bytes(b"x")
    (tmp_path / "LOUD.JPG").write_bytes(b"x")
    assert found(tmp_path) == ["LOUD.JPG", "a/0.png", "a/deep/0.png", "b/0.png", "b/1.png"]


def test_a_folder_that_is_hidden_itself_can_be_asked_for(tmp_path):
    write_images(tmp_path, {".hidden": 1})
    assert found(tmp_path / ".hidden") == ["0.png"]


def test_links_are_followed(tmp_path):
    write_images(tmp_path / "elsewhere", {"more": 2})
    write_images(tmp_path, {"class": 1})
    (tmp_path / "class" / "more").symlink_to(tmp_path / "elsewhere" / "more")
    (tmp_path / "class" / "one.png").symlink_to(tmp_path / "elsewhere" / "more" / "0.png")
    assert found(tmp_path / "class") == ["0.png", "more/0.png", "more/1.png", "one.png"]


@pytest.mark.parametrize("target", [".", "deep", "../class"])
def test_a_link_to_what_is_read_already_is_refused_by_name(tmp_path, target):
    write_images(tmp_path, {"class/deep": 1})
    (tmp_path / "class" / "round").symlink_to(target)
    with pytest.raises(DataError, match=r"read already; remove the link"):
        image_files(tmp_path / "class")


def test_what_is_called_an_image_and_is_no_file_is_refused_by_name(tmp_path):
    write_images(tmp_path, {"class": 1})
    path = tmp_path / "class" / "gone.png"
    for make in (lambda: path.symlink_to("nowhere"), lambda: path.symlink_to("gone.png"), lambda: os.mkfifo(path)):
        make()
        with pytest.raises(DataError, match=r"gone\.png: is a link to nothing, a pipe or a device"):
            image_files(tmp_path)
        path.unlink()


def test_a_folder_that_cannot_be_read_is_refused_by_name(tmp_path, monkeypatch):
    def fail(path):
        raise NotADirectoryError(20, "Not a directory")

    monkeypatch.setattr("os.scandir", fail)
    with pytest.raises(DataError, match=r"cannot be read \(Not a directory\)"):
        image_files(tmp_path)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.EIO])
def test_what_the_system_refuses_is_said_as_such_with_the_name(number, tmp_path, monkeypatch):
    def fail(path):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("os.scandir", fail)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        image_files(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path))
