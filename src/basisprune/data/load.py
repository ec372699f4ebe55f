"""Whatever users have their images in -> training, validation and test parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from torch.utils.data import Dataset

from basisprune.data.arguments import LARGEST_SEED, check, fraction, image_size, whole
from basisprune.data.builtin import read_builtin
from basisprune.data.datasets import LabelledImages, WrappedDataset, declared_classes
from basisprune.data.folders import read_folder
from basisprune.data.npz import read_npz
from basisprune.data.split import Splits, fill
from basisprune.errors import DataError
from basisprune.files import user_path

__all__ = ["DEFAULT_SIZE", "Source", "Splits", "load_data"]

DEFAULT_SIZE = (224, 224)

Source = str | os.PathLike[str] | Splits | Dataset[object] | Sequence[Dataset[object] | None]


def load_data(
    source: Source,
    *,
    size: tuple[int, int] | None = None,
    val_fraction: float = 0.1,
    test_fraction: float = 0.1,
    seed: int = 0,
    limit: int | None = None,
) -> Splits:
    """The training, validation and test parts of `source`.

    A source is a folder of class folders; a folder with train/ and perhaps val/ and test/ that hold class
    folders; a .npz file as Keras lays it out; "torchvision:CIFAR10" and the like; a PyTorch dataset; a tuple
    (train, val) or (train, val, test) of them, None for what is not there; or Splits, returned as they are.

    Parts that the source lacks are drawn from its training images by `seed`, stratified by class, unless
    their fraction (of those images) is 0; every class with three images or more has one in each part. `limit`
    keeps at most that many training images. Image files are resized to `size` (height, width) as they are
    decoded, by default to 224 x 224; PIL images of PyTorch datasets only if `size` is given.

    Raises ConfigError for arguments out of range, DataError for data that cannot be used.
    """
    if isinstance(source, Splits):
        return source
    _check_arguments(size, val_fraction, test_fraction, seed, limit)
    splits, where = _read(source, size)
    _check_labels(splits, where)
    return fill(splits, (val_fraction, test_fraction), seed=seed, limit=limit, where=where)


def _check_arguments(
    size: tuple[int, int] | None, val_fraction: float, test_fraction: float, seed: int, limit: int | None
) -> None:
    fractions = [fraction("val_fraction", val_fraction), fraction("test_fraction", test_fraction)]
    if not any(fractions) and val_fraction + test_fraction >= 1:
        fractions.append(f"val_fraction + test_fraction: {val_fraction + test_fraction:g} leaves nothing to train on")
    others = (
        image_size("size", size),
        whole("seed", seed, 0, LARGEST_SEED),
        None if limit is None else whole("limit", limit, 1, LARGEST_SEED),
    )
    check("load_data", [*fractions, *others])


def _read(source: object, size: tuple[int, int] | None) -> tuple[Splits, str]:
    """The parts that the source has itself, and what to call it in errors."""
    if isinstance(source, str) and source.startswith("torchvision:"):
        return read_builtin(source.removeprefix("torchvision:"), size or DEFAULT_SIZE), source
    if isinstance(source, str | os.PathLike):
        return _read_path(user_path(source, "load_data"), size or DEFAULT_SIZE), str(source)
    if isinstance(source, tuple | list):
        if len(source) not in (2, 3):
            raise DataError(f"{len(source)} datasets given, (train, val) or (train, val, test) is needed")
        return _wrap(*source, size=size), "the datasets given"
    return _wrap(cast("Dataset[object]", source), size=size), "the dataset given"  # which is looked at there


def _read_path(path: Path, size: tuple[int, int]) -> Splits:
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if is_folder:
        return read_folder(path, size)
    if not is_there:
        raise DataError(
            f"{path}: there is no such file or folder; give a folder of class folders, a .npz file or torchvision:NAME"
        )
    if path.suffix.lower() != ".npz":
        raise DataError(f"{path}: a file of this kind cannot be read; give a folder of class folders or a .npz file")
    return read_npz(path)


def _wrap(
    train: Dataset[object],
    val: Dataset[object] | None = None,
    test: Dataset[object] | None = None,
    *,
    size: tuple[int, int] | None,
) -> Splits:
    """The datasets as parts that all have the classes of the first one."""

    def wrap(dataset: Dataset[object], name: str, classes: tuple[str, ...] | None) -> LabelledImages:
        own = declared_classes(dataset)
        # Names alone do not tell a class that a part happens to lack from one that was never there.
        if any(mine != theirs for mine, theirs in zip(own, classes or own, strict=False)):
            raise DataError(
                f"{name} dataset: its classes {own[:10]} are not those of training, {(classes or ())[:10]}; "
                "all parts need the same classes in the same order"
            )
        if isinstance(dataset, LabelledImages):
            return dataset
        return WrappedDataset(dataset, classes, size=size, name=f"{name} dataset")

    first = wrap(train, "train", None)
    return Splits(
        first,
        None if val is None else wrap(val, "val", first.classes),
        None if test is None else wrap(test, "test", first.classes),
        first.classes,
    )


def _check_labels(splits: Splits, where: str) -> None:
    """Raises DataError unless there are two classes at least and training has them all."""
    known = np.unique(splits.train.labels)
    if len(known) < 2:
        raise DataError(f"{where}: images of {len(known)} class in the training part; at least two are needed")
    for name, part in splits.parts.items():
        if len(part) == 0:
            raise DataError(f"{where}: the {name} part is empty; leave it out to have one drawn")
        unknown = np.setdiff1d(part.labels, known)
        if len(unknown) > 0:
            raise DataError(
                f"{where}: the {name} part has the labels {', '.join(map(str, unknown[:10]))}, which training "
                "lacks; every class needs training images"
            )
