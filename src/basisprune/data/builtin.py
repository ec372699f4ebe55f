"""Datasets that torchvision knows by name -> datasets of ours."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torchvision
from numpy.typing import NDArray
from torch import Tensor

from basisprune.data.datasets import ArrayImages, LabelledImages
from basisprune.data.split import Splits
from basisprune.data.wrapped import WrappedDataset
from basisprune.errors import DataError, nearest, pass_on

# How each one names its parts: the arguments beside `root` and `download`.
_BY_FLAG: dict[str, Mapping[str, object]] = {"train": {"train": True}, "test": {"train": False}}
_SPLIT_NAMES: dict[str, dict[str, str]] = {
    "Country211": {"train": "train", "val": "valid", "test": "test"},
    "DTD": {"train": "train", "val": "val", "test": "test"},
    "FGVCAircraft": {"train": "train", "val": "val", "test": "test"},
    "Flowers102": {"train": "train", "val": "val", "test": "test"},
    "Food101": {"train": "train", "test": "test"},
    "GTSRB": {"train": "train", "test": "test"},
    "Imagenette": {"train": "train", "val": "val"},
    "OxfordIIITPet": {"train": "trainval", "test": "test"},
    "PCAM": {"train": "train", "val": "val", "test": "test"},
    "RenderedSST2": {"train": "train", "val": "val", "test": "test"},
    "STL10": {"train": "train", "test": "test"},
    "SVHN": {"train": "train", "test": "test"},
    "StanfordCars": {"train": "train", "test": "test"},
}
ARGUMENTS: dict[str, dict[str, Mapping[str, object]]] = {
    **dict.fromkeys(("CIFAR10", "CIFAR100", "FashionMNIST", "KMNIST", "MNIST", "USPS"), _BY_FLAG),
    "EMNIST": {part: {"split": "balanced", **flag} for part, flag in _BY_FLAG.items()},
    **{name: {part: {"split": s} for part, s in parts.items()} for name, parts in _SPLIT_NAMES.items()},
    **{name: {"train": {}} for name in ("Caltech101", "Caltech256", "EuroSAT", "SEMEION")},
}


def cache_folder() -> Path:
    """Where downloaded data lies: the environment variable BASISPRUNE_DATA, or ~/.cache/basisprune."""
    return Path(os.environ.get("BASISPRUNE_DATA") or "~/.cache/basisprune").expanduser()


def read_builtin(name: str, size: tuple[int, int]) -> Splits:
    """The parts of the torchvision dataset called `name`, downloaded if they are not in the cache folder.

    Datasets that lie in memory keep their size; images in files are resized to `size` as they are decoded.
    Raises DataError for an unknown name, with the nearest valid ones, and if the files cannot be had.
    """
    if name not in ARGUMENTS:
        hint = nearest(name, ARGUMENTS, most=3) or f" Known are {', '.join(sorted(ARGUMENTS))}"
        raise DataError(f"torchvision:{name}: there is no such dataset.{hint}")
    arguments = dict(ARGUMENTS[name])
    train = _read_part(name, arguments.pop("train"), size, None)
    parts = {part: _read_part(name, given, size, train.classes) for part, given in arguments.items()}
    return Splits(train, parts.get("val"), parts.get("test"), train.classes)


def _read_part(
    name: str, arguments: Mapping[str, object], size: tuple[int, int], classes: tuple[str, ...] | None
) -> LabelledImages:
    root = cache_folder()
    try:
        root.mkdir(parents=True, exist_ok=True)
        dataset = getattr(torchvision.datasets, name)(root=str(root), download=True, **arguments)
    except Exception as error:  # from the network, the disk, the archive or an optional reader
        pass_on(error, root)
        raise DataError(
            f"torchvision:{name}: could not be downloaded or read ({type(error).__name__}: {error}); put its "
            f"files into {root} as torchvision lays them out, or set BASISPRUNE_DATA to the folder that has them"
        ) from error
    wrapped = WrappedDataset(dataset, classes, size=size, name=f"torchvision:{name}")
    images = _images_in_memory(dataset)
    if images is None:
        return wrapped
    return ArrayImages(images, wrapped.labels, wrapped.classes, name=wrapped.name)


def _images_in_memory(dataset: object) -> NDArray[np.uint8] | None:
    """The uint8 array (N, H, W) or (N, H, W, C) of a dataset that holds one, without decoding anything."""
    data = getattr(dataset, "data", None)
    if not isinstance(data, np.ndarray | Tensor):
        return None
    array = np.asarray(data)
    if array.ndim == 4 and array.shape[1] == 3 != array.shape[3]:
        array = array.transpose(0, 2, 3, 1)
    return array if array.dtype == np.uint8 and array.ndim in (3, 4) else None
