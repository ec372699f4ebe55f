"""Whatever users have their images in -> training, validation and test parts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import numpy as np
from torch.utils.data import Dataset

from basisprune.data import hub, shards
from basisprune.data.arguments import LARGEST_SEED, check, fraction, image_size, of_type, whole
from basisprune.data.builtin import read_builtin
from basisprune.data.datasets import LabelledImages
from basisprune.data.folders import read_folder
from basisprune.data.manifest import Manifest, Role
from basisprune.data.npz import read_npz
from basisprune.data.opening import opened, reread
from basisprune.data.reading import Reading
from basisprune.data.roles import ROLES, groups_of, recalled, related, units, without_shared
from basisprune.data.split import Splits, fill, limited, set_aside
from basisprune.data.wrapped import WrappedDataset, declared_classes
from basisprune.errors import DataError
from basisprune.files import user_path
from basisprune.types import TEST_FRACTION, VAL_FRACTION

__all__ = ["DEFAULT_SIZE", "Source", "Splits", "load_data"]

DEFAULT_SIZE = (224, 224)
_BUILTIN = "torchvision:"
PREFIXES = (_BUILTIN, shards.PREFIX, hub.PREFIX)
"""How the names of sources begin that are not paths."""
FETCHED = (_BUILTIN, hub.PREFIX)
"""How the names of sources begin that are downloaded."""

Source = str | os.PathLike[str] | Splits | Dataset[object] | Sequence[Dataset[object] | None]


def load_data(
    source: Source,
    *,
    size: tuple[int, int] | None = None,
    val_fraction: float = VAL_FRACTION,
    test_fraction: float = TEST_FRACTION,
    confirm_fraction: float = 0.0,
    seed: int = 0,
    limit: int | None = None,
    reading: Reading | None = None,
) -> Splits:
    """The training, validation and test parts of `source`.

    A source is a folder of class folders; a folder with train/ and perhaps val/ and test/ that hold class
    folders; a .npz file as Keras lays it out; "torchvision:CIFAR10" and the like; WebDataset shards, as a folder of
    .tar files or "wds:photos-{000..009}.tar"; a Hugging Face dataset, as a folder that `save_to_disk` wrote, a folder
    of Parquet files or "hf:NAME"; a PyTorch dataset; a tuple (train, val) or (train, val, test) of them, None for what
    is not there; or Splits, which are divided already.

    Parts that the source lacks are drawn from its training images by `seed`, stratified by class, unless
    their fraction (of those images) is 0; every class with three images or more has one in each part. Copies of
    an image, exact and near ones, stay in one part, and so do images of one group (see `Reading`); what the source
    itself has in several parts is left out of all but the first, with a warning. Of the validation images,
    `confirm_fraction` is set aside to confirm a result. `limit` keeps at most that many training images. Image files
    are resized to `size` (height, width) as they are decoded, by default to 224 x 224; PIL images of PyTorch datasets
    only if `size` is given.

    All images are opened once; those that are damaged are left out, with a warning. Raises ConfigError for arguments
    out of range, DataError for data that cannot be used.
    """
    _check_arguments(size, (val_fraction, test_fraction, confirm_fraction), seed, limit, reading)
    if isinstance(source, Splits) and reading is None and confirm_fraction == 0:
        return source
    wanted = reading or Reading()
    if wanted.manifest is not None and not isinstance(source, Splits):
        return _as_before(source, size, wanted.manifest, wanted)
    given, where = _read(source, size)
    _check_labels(given, where)
    groups = groups_of(given, wanted.groups)
    splits = opened(given, wanted, where)
    splits = without_shared(splits, groups, wanted, where)
    if not isinstance(source, Splits):
        together = units(splits, "train", groups)
        splits = fill(splits, (val_fraction, test_fraction), seed=seed, units=together, where=where)
    if splits.val is not None:
        splits = set_aside(splits, confirm_fraction, seed, units(splits, "val", groups))
    splits = related(splits, groups)
    return splits if isinstance(source, Splits) else limited(splits, limit, seed)


def fetch(source: str) -> None:
    """Downloads data that is called by name, unless that has been done; not by several processes at once."""
    if source.startswith(_BUILTIN):
        read_builtin(source.removeprefix(_BUILTIN), DEFAULT_SIZE)
    elif source.startswith(hub.PREFIX):
        hub.fetch_hub(source)


def read_parts(source: Source, size: tuple[int, int], reading: Reading, white: int | None = None) -> Splits:
    """The parts that the source has itself, undivided, without images that cannot be used.

    `white` is what counts as white in deep images, by default what they suggest.
    """
    given, where = _read(source, size)
    _check_labels(given, where)
    splits = opened(given, reading, where)
    return splits if white is None else reread(splits, white=white)


def recall(
    source: Source, size: tuple[int, int] | None, manifest: Manifest, roles: Sequence[Role], reading: Reading
) -> dict[Role, LabelledImages]:
    """The images of these roles that a manifest lists; raises DataError if they are not as they were."""
    path = user_path(source, "load_data") if _is_path(source) else None
    if path is not None and path.is_dir() and not (hub.holds_dataset(path) or shards.holds_shards(path)):
        return recalled(path, manifest, size or DEFAULT_SIZE, roles=roles, listener=reading.listener)
    given, _ = _read(source, size)
    return recalled(given, manifest, size or DEFAULT_SIZE, roles=roles, listener=reading.listener)


def _as_before(source: Source, size: tuple[int, int] | None, manifest: Manifest, reading: Reading) -> Splits:
    parts = recall(source, size, manifest, ROLES, reading)
    return Splits(parts["train"], parts.get("val"), parts.get("test"), manifest.classes, parts.get("confirm"))


def _check_arguments(
    size: tuple[int, int] | None,
    fractions: tuple[float, float, float],
    seed: int,
    limit: int | None,
    reading: Reading | None,
) -> None:
    names = ("val_fraction", "test_fraction", "confirm_fraction")
    faults = [fraction(name, value) for name, value in zip(names, fractions, strict=True)]
    if not any(faults) and fractions[0] + fractions[1] >= 1:
        faults.append(f"val_fraction + test_fraction: {fractions[0] + fractions[1]:g} leaves nothing to train on")
    others = (
        image_size("size", size),
        whole("seed", seed, 0, LARGEST_SEED),
        None if limit is None else whole("limit", limit, 1, LARGEST_SEED),
        of_type("reading", reading, (Reading, type(None)), "a Reading"),
    )
    check("load_data", [*faults, *others])


def _read(source: object, size: tuple[int, int] | None) -> tuple[Splits, str]:
    """The parts that the source has itself, and what to call it in errors."""
    if isinstance(source, Splits):
        return source, "the data given"
    if isinstance(source, str) and source.startswith(_BUILTIN):
        return read_builtin(source.removeprefix(_BUILTIN), size or DEFAULT_SIZE), source
    if isinstance(source, str) and source.startswith(shards.PREFIX):
        return shards.read_shards(source, size or DEFAULT_SIZE), source
    if isinstance(source, str) and source.startswith(hub.PREFIX):
        return hub.read_hub(source, size or DEFAULT_SIZE), source
    if isinstance(source, str | os.PathLike):
        return _read_path(user_path(source, "load_data"), size or DEFAULT_SIZE), str(source)
    if isinstance(source, tuple | list):
        if len(source) not in (2, 3):
            raise DataError(f"{len(source)} datasets given, (train, val) or (train, val, test) is needed")
        return _wrap(*source, size=size), "the datasets given"
    return _wrap(cast("Dataset[object]", source), size=size), "the dataset given"  # which is looked at there


def _is_path(source: object) -> bool:
    return isinstance(source, os.PathLike) or (isinstance(source, str) and not source.startswith(PREFIXES))


def _read_path(path: Path, size: tuple[int, int]) -> Splits:
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if is_folder and hub.holds_dataset(path):
        return hub.read_hub(path, size)
    if path.suffix.lower() == ".tar" or (is_folder and shards.holds_shards(path)):
        return shards.read_shards(path, size)
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
