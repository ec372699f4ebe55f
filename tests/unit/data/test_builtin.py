from __future__ import annotations

import gzip
import struct
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torchvision
from PIL import Image

from basisprune.data import ArrayImages, Splits, load_data
from basisprune.data.builtin import ARGUMENTS, cache_folder
from basisprune.errors import DataError


def write_mnist(root: Path, counts: dict[str, int]) -> None:
    """MNIST's own files, with few images."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in counts.items():
        noise = np.random.default_rng(len(part)).bytes(count * 784)
        images = struct.pack(">4i", 2051, count, 28, 28) + noise
        labels = struct.pack(">2i", 2049, count) + bytes(number % 10 for number in range(count))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(images)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(labels)
        for kind in ("images-idx3", "labels-idx1"):  # some releases look for the archives too
            packed = gzip.compress((raw / f"{part}-{kind}-ubyte").read_bytes())
            (raw / f"{part}-{kind}-ubyte.gz").write_bytes(packed)


def sizes(splits: Splits) -> dict[str, int]:
    return {name: len(part) for name, part in splits.parts.items()}


def refused(name: str, *parts: str) -> None:
    with pytest.raises(DataError) as caught:
        load_data(f"torchvision:{name}")
    assert all(part in str(caught.value) for part in parts), caught.value


def test_torchvision_data_is_found_in_the_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BASISPRUNE_DATA", str(tmp_path))
    write_mnist(tmp_path, {"train": 50, "t10k": 20})
    splits = load_data("torchvision:MNIST")
    assert isinstance(splits.test, ArrayImages)
    assert sizes(splits) == {"train": 40, "val": 10, "test": 20}
    assert splits.num_classes == 10
    assert splits.train[0][0].shape == (1, 28, 28)


def test_the_cache_folder_has_a_default(monkeypatch):
    monkeypatch.delenv("BASISPRUNE_DATA", raising=False)
    assert cache_folder() == Path.home() / ".cache" / "basisprune"


class Photos:
    """Stands for a torchvision dataset of image files."""

    def __init__(self, root, split="train", download=False) -> None:
        self.classes = ["a", "b"]
        self._labels = [0, 1] * {"trainval": 10, "test": 3}[split]
        self.height = len(split)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index):
        return Image.new("RGB", (7 + index, self.height)), self._labels[index]


def test_torchvision_files_are_resized_to_stack(tmp_path, monkeypatch):
    monkeypatch.setenv("BASISPRUNE_DATA", str(tmp_path / "new"))
    monkeypatch.setattr(torchvision.datasets, "OxfordIIITPet", Photos)
    splits = load_data("torchvision:OxfordIIITPet", size=(8, 6))
    assert sizes(splits) == {"train": 16, "val": 4, "test": 6}
    assert splits.classes == ("a", "b")
    assert {image.shape for image, _ in splits.train} == {(3, 8, 6)}


def test_torchvision_arrays_with_channels_first_are_taken_from_memory(tmp_path, monkeypatch):
    class Numbers:
        data = np.arange(30 * 90, dtype=np.uint8).reshape(30, 3, 6, 5)
        labels = np.arange(30) % 3

        def __init__(self, root, split, download) -> None:
            if split == "test":
                self.data = 255 - self.data

        def __len__(self) -> int:
            return 30

        def __getitem__(self, index):
            return Image.new("RGB", (5, 6)), int(self.labels[index])

    monkeypatch.setenv("BASISPRUNE_DATA", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets, "SVHN", Numbers)
    splits = load_data("torchvision:SVHN")
    assert isinstance(splits.test, ArrayImages)
    np.testing.assert_array_equal(splits.test[3][0].numpy(), 255 - Numbers.data[3])


def test_every_known_name_is_one_of_torchvision():
    assert all(hasattr(torchvision.datasets, name) for name in ARGUMENTS)


def test_an_unknown_name_is_refused_with_the_nearest():
    refused("cifar10", "torchvision:cifar10", "Did you mean", "CIFAR10")
    refused("FashonMNIST", "FashionMNIST")
    refused("zzzzzz", "Known are", *ARGUMENTS)


def test_a_failed_download_says_where_to_put_the_files(tmp_path, monkeypatch):
    def fail(self) -> None:
        raise URLError("no route to host")

    monkeypatch.setenv("BASISPRUNE_DATA", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "download", fail)
    refused("CIFAR10", "torchvision:CIFAR10", "no route to host", str(tmp_path), "BASISPRUNE_DATA")
