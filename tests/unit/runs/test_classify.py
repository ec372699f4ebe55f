"""Laws of the answers about image files."""

from __future__ import annotations

import errno
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sources import write_images
from tiny import NAMES, tiny_images

from basisprune.errors import DataError
from basisprune.runs.classify import classify_files, image_files
from basisprune.runs.load import load_any


def test_answers_come_in_the_order_of_the_files_with_all_classes(forms, tmp_path):
    from basisprune.runs.summary import picture_of

    images = tiny_images(40)
    for index in range(40):
        picture_of(images[index][0]).save(tmp_path / f"{index:02}.png")
    (tmp_path / "07.png").write_text("broken")
    answers = list(classify_files(load_any(forms / "bundle"), image_files([tmp_path])))
    assert [answer.file.name for answer in answers] == [f"{index:02}.png" for index in range(40)]
    assert [bool(answer.error) for answer in answers] == [index == 7 for index in range(40)]
    good = [answer for answer in answers if not answer.error]
    assert all(set(dict(answer.classes)) == set(NAMES) for answer in good)
    assert torch.allclose(torch.tensor([sum(dict(answer.classes).values()) for answer in good]), torch.ones(39))
    assert all(answer.classes[0][1] == max(dict(answer.classes).values()) for answer in good)


def test_images_are_found_as_a_run_finds_them(tmp_path):
    write_images(tmp_path, {"class": 2, "class/deep": 1, ".hidden": 1})
    (tmp_path / "class" / "._0.png").write_text("what some systems leave beside a file")
    write_images(tmp_path / "elsewhere", {"more": 1})
    (tmp_path / "class" / "link").symlink_to(tmp_path / "elsewhere" / "more")
    found = [str(path.relative_to(tmp_path / "class")) for path in image_files([tmp_path / "class"])]
    assert found == ["0.png", "1.png", "deep/0.png", "link/0.png"]
    (tmp_path / "class" / "round").symlink_to(tmp_path / "class")
    with pytest.raises(DataError, match="read already; remove the link"):
        image_files([tmp_path / "class"])


def test_deep_images_are_read_with_the_white_that_the_network_knows(forms, tmp_path):
    loaded = load_any(forms / "bundle")
    values = (np.arange(256).reshape(16, 16) * 16).astype(np.uint16)
    values[0, 0] = 5  # nothing in this image tells that 4095 is white
    Image.fromarray(np.minimum(values, 250)).save(tmp_path / "deep.png")
    Image.fromarray((np.minimum(values, 250) * (255 / 4095) + 0.5).astype(np.uint8)).save(tmp_path / "flat.png")
    deep = replace(loaded, spec=replace(loaded.spec, white=4095))
    files = [tmp_path / "deep.png", tmp_path / "flat.png"]
    one, two = classify_files(deep, files)
    assert one.classes == two.classes
    one, two = classify_files(loaded, files)
    assert one.classes != two.classes


def test_a_file_that_may_not_be_read_spoils_nothing_and_a_machine_that_cannot_read_is_told(
    forms, tmp_path, monkeypatch
):
    write_images(tmp_path, {"class": 3})
    loaded, files, normal = load_any(forms / "bundle"), image_files([tmp_path]), open
    number = errno.EACCES

    def failing(name, *args, **options):
        if str(name) == str(files[1]):
            raise OSError(number, os.strerror(number), str(name))
        return normal(name, *args, **options)

    monkeypatch.setattr("builtins.open", failing)
    answers = list(classify_files(loaded, files))
    assert [answer.error for answer in answers] == ["", f"{files[1]}: Permission denied", ""]
    number = errno.EMFILE
    with pytest.raises(OSError, match="Too many open files"):
        list(classify_files(loaded, files))
