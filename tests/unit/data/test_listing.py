"""Laws of finding images: the same files for all who ask, nothing twice, nothing left out in silence."""

from __future__ import annotations

import errno
import os

import pytest
from sources import write_images

from basisprune.data import image_files
from basisprune.errors import DataError


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
