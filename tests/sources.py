"""Sources of labelled images for tests: class folders and arrays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from basisprune.data import Splits, load_data
from basisprune.errors import DataError

SHADES = {"ant": 10, "bee": 120, "cat": 240}


def write_images(folder: Path, counts: dict[str, int]) -> Path:
    """A folder of class folders; the shade of an image tells its class, and no file is a copy of another."""
    for name, count in counts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            said = PngInfo()
            said.add_text("name", f"{folder.name}/{name}/{number}")
            Image.new("RGB", (6, 5), (SHADES.get(name, 0),) * 3).save(folder / name / f"{number}.png", pnginfo=said)
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


def sizes(splits: Splits) -> dict[str, int]:
    return {name: len(part) for name, part in splits.parts.items()}


def refused(source, *parts: str, **options) -> None:
    with pytest.raises(DataError) as caught:
        load_data(source, **options)
    message = str(caught.value)
    assert all(part in message for part in parts), message
