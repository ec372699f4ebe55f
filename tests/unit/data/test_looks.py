"""Laws of looking at an image once."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import pytest
import torch
from PIL import Image

from basisprune.data import looks
from basisprune.data.decode import Depth
from basisprune.data.looks import file_hash, image_hash, look_at_file, random_numbers_kept, same_random_numbers
from basisprune.errors import DataError


def saved(path, array):
    Image.fromarray(array).save(path)
    return path


def test_a_look_tells_content_and_depth(tmp_path):
    flat = saved(tmp_path / "flat.png", np.full((4, 4), 7, dtype=np.uint8))
    assert look_at_file(flat).sha256 == file_hash(flat) == hashlib.sha256(flat.read_bytes()).hexdigest()
    assert look_at_file(flat).depth is None
    deep = saved(tmp_path / "deep.png", np.full((4, 4), 3000, dtype=np.uint16))
    assert look_at_file(deep).depth == Depth(4095)


def test_a_file_that_has_not_changed_is_read_once_and_one_that_has_is_read_again(tmp_path, monkeypatch):
    read, path = [], saved(tmp_path / "a.png", np.zeros((4, 4), dtype=np.uint8))
    original = looks.read_bytes
    monkeypatch.setattr(looks, "read_bytes", lambda path: (read.append(path), original(path))[1])
    first = look_at_file(path)
    assert (look_at_file(path), file_hash(path), len(read)) == (first, first.sha256, 1)
    saved(path, np.ones((4, 4), dtype=np.uint8))
    os.utime(path, ns=(0, 0))
    assert look_at_file(path) != first
    assert len(read) == 2


def test_what_is_wrong_is_told_and_not_raised(tmp_path):
    (tmp_path / "text.png").write_text("text")
    assert "text.png: not an image" in look_at_file(tmp_path / "text.png").fault
    assert look_at_file(tmp_path / "text.png").sha256 == hashlib.sha256(b"text").hexdigest()
    assert "none.png: cannot be read (No such file" in look_at_file(tmp_path / "none.png").fault
    assert "a folder" in look_at_file(tmp_path).fault
    with pytest.raises(DataError, match=r"none\.png: there is no such file"):
        file_hash(tmp_path / "none.png")
    with pytest.raises(DataError, match="cannot be read"):
        file_hash(tmp_path)


def test_images_in_memory_are_told_apart_by_values_type_shape_and_mode():
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    kinds = [array, array.T, array.reshape(4, 3), array.astype(np.int8), array + 1, array[None]]
    kinds += [Image.fromarray(array), Image.fromarray(array).convert("RGB"), Image.fromarray(array).convert("P")]
    assert len({image_hash(kind) for kind in kinds}) == len(kinds)
    assert image_hash(torch.from_numpy(array).T) == image_hash(array.T)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_numbers_inside_are_not_missed_outside_and_can_be_the_same():
    with random_numbers_kept():
        expected = draw()
    with random_numbers_kept():
        same_random_numbers()
        first = draw()
    assert draw() == expected
    with random_numbers_kept():
        same_random_numbers()
        assert draw() == first != expected
