"""Images in any form that users have them in -> training, validation and test parts, and images without labels."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import cast

import numpy as np
from torch.utils.data import Dataset

from basisprune.callback import Callback, NullCallback
from basisprune.data import hub
from basisprune.data.arrays import as_indices, as_labels, declared_classes, read_arrays
from basisprune.data.copies import look_at, looks_of, note_near_copies, units_of
from basisprune.data.datasets import ArrayImages, LabelledImages, WrappedDataset, base_of, take
from basisprune.data.decode import Depth, Look, readable
from basisprune.data.folders import SHARDS, FolderImages, holds_shards, image_files, read_folder, read_shards
from basisprune.data.manifest import ROLES, Manifest, Role, recalled
from basisprune.data.split import (
    Splits,
    draw_missing,
    groups_of,
    hold_out_confirmation,
    keys_of,
    limited,
    names_of,
    related,
    reread,
    units,
    white_of,
)
from basisprune.errors import ConfigError, DataError
from basisprune.files import user_path
from basisprune.signatures import Count, Fraction, ImageSize, Seed, checked
from basisprune.types import TEST_FRACTION, VAL_FRACTION

DEFAULT_SIZE = (224, 224)
FETCHED = (hub.TORCHVISION, hub.PREFIX)
"""How the names of sources begin that are downloaded."""
PREFIXES = (*FETCHED, SHARDS)
"""How the names of sources begin that are not paths."""
_MOST_SHOWN = 10
_SHARED = ("are exact copies of images", "are of the same groups as images", "are near copies of images")

Choose = Callable[[Splits, Mapping[str, str]], tuple[float, float, float]]
"""The parts that the data has, and groups by names -> the fractions to validate, to test, and to confirm."""
Source = str | os.PathLike[str] | Splits | Dataset[object] | Sequence[Dataset[object] | None]


@dataclass(frozen=True)
class Reading:
    """How to treat images that are damaged, belong together, were chosen before or are ready for the network.

    Args:
        groups: A CSV file of image names and groups; images of one group stay in one part.
        strict: Refuse damaged images, and images that the data has in several parts, rather than leave them out.
        manifest: Exactly the images to use.
        callback: Receives the reports, which are Python warnings without it.
        prepared: PyTorch datasets yield normalised floats of the right size, which the network reads as they are.
    """

    groups: str | os.PathLike[str] | None = None
    strict: bool = False
    manifest: Manifest | None = None
    callback: Callback | None = None
    prepared: bool = False

    def report(self, what: str, found: Sequence[str]) -> None:
        if self.strict:
            raise DataError.of(what, found)
        rest = [f"and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
        line = "\n  - ".join([what, *found[:_MOST_SHOWN], *rest])
        if self.callback is not None:
            self.callback.log(line)
        else:
            warnings.warn(line, UserWarning, stacklevel=6)


@checked
def load_data(
    source: Source,
    *,
    size: ImageSize | None = None,
    val_fraction: Fraction = VAL_FRACTION,
    test_fraction: Fraction = TEST_FRACTION,
    confirm_fraction: Fraction = 0.0,
    seed: Seed = 0,
    limit: Count | None = None,
    reading: Reading | None = None,
) -> Splits:
    """Return the training, validation and test parts of `source`.

    All images are opened once; damaged ones are left out, with a warning. Parts that the source lacks are drawn from
    its training images, stratified by class; every class with three images or more has one in each part. Copies of an
    image, exact and near ones, and images of one group (see `Reading`) stay in one part; what the source itself has in
    several parts is left out of all but the first, with a warning.

    Args:
        source: A folder of class folders; a folder with train/ and perhaps val/ and test/ that hold class folders; a
            .npz file as Keras lays it out; "torchvision:CIFAR10" and the like; WebDataset shards, as a folder of .tar
            files or "wds:photos-{000..009}.tar"; a Hugging Face dataset, as a folder that `save_to_disk` wrote, a
            folder of Parquet files or "hf:NAME"; a PyTorch dataset; a tuple (train, val) or (train, val, test) of them,
            None for a missing one; or Splits, which are divided already.
        size: Height and width to which image files are resized as they are decoded, by default 224 x 224; PIL images
            of PyTorch datasets are resized only if it is given.
        val_fraction: Fraction of the training images to validate with if the source has no such part; 0 for none.
        test_fraction: The same for testing.
        confirm_fraction: Fraction of the validation images to set aside for confirming a result.
        seed: Decides which images are drawn.
        limit: The most training images to keep.
        reading: Groups, strictness, a manifest of earlier parts, the callback, and whether images are prepared.

    Raises:
        ConfigError: For arguments out of range.
        DataError: For data that cannot be used.

    >>> images = ArrayImages(np.random.default_rng(0).integers(0, 256, (40, 8, 8), dtype=np.uint8), [0, 1] * 20)
    >>> print(load_data(images).describe())
    train: 28 images, 14 of each class
    val: 8 images, 4 of each class
    test: 4 images, 2 of each class
    """
    if val_fraction + test_fraction >= 1:
        total = f"val_fraction + test_fraction: {val_fraction + test_fraction:g}"
        raise ConfigError(f"{total} leaves nothing to train on", where="load_data")
    if isinstance(source, Splits) and reading is None and confirm_fraction == 0:
        return source
    fractions = val_fraction, test_fraction, confirm_fraction
    return load_divided(source, lambda *_: fractions, size=size, seed=seed, limit=limit, reading=reading)


def load_divided(
    source: Source,
    choose: Choose,
    *,
    size: ImageSize | None = None,
    seed: int = 0,
    limit: int | None = None,
    reading: Reading | None = None,
) -> Splits:
    """Return the parts of `source` like `load_data`; `choose` gives the fractions, except for those of a manifest."""
    wanted = reading or Reading()
    if wanted.manifest is not None and not isinstance(source, Splits):
        found = recall(source, size, wanted.manifest, ROLES, wanted)
        return Splits.of({str(role): part for role, part in found.items()}, wanted.manifest.classes)
    given, where = _read(source, size)
    if wanted.prepared:
        given = given.with_parts({name: copy.copy(part) for name, part in given.parts.items()})
        for part in given.parts.values():
            if not isinstance(part, WrappedDataset):
                raise ConfigError(f"prepared: True given with {where}; it is for PyTorch datasets", where="load_data")
            part.prepared = True
    groups = groups_of(given, wanted.groups)
    splits = _without_shared(_opened(given, where, wanted), groups, wanted, where)
    val_fraction, test_fraction, confirm_fraction = choose(splits, groups)
    if not isinstance(source, Splits):
        together = units(splits, "train", groups)
        splits = draw_missing(splits, (val_fraction, test_fraction), seed=seed, units=together, where=where)
    if splits.val is not None:
        splits = hold_out_confirmation(splits, confirm_fraction, seed, units(splits, "val", groups))
    splits = related(splits, groups)
    return splits if isinstance(source, Splits) else limited(splits, limit, seed)


def fetch(source: str) -> None:
    """Download data that is called by name, unless that has been done; not by several processes at once."""
    if source.startswith(hub.TORCHVISION):
        hub.read_torchvision(source, DEFAULT_SIZE)
    elif source.startswith(hub.PREFIX):
        hub.load_hub(source)


def read_parts(source: Source, size: tuple[int, int], reading: Reading, white: int | None = None) -> Splits:
    """Return the parts that the source has itself, undivided, without images that cannot be used."""
    splits = _opened(*_read(source, size), reading)
    return splits if white is None else reread(splits, white=white)


def recall(
    source: Source, size: tuple[int, int] | None, manifest: Manifest, roles: Sequence[Role], reading: Reading
) -> dict[Role, LabelledImages]:
    """Return the images of these roles that a manifest lists; raise DataError if they have changed."""
    given = folder_of_images(source, "load_data") or read_undivided(source, size)[0]
    return recalled(given, manifest, size or DEFAULT_SIZE, roles=roles, callback=reading.callback)


def folder_of_images(source: object, where: str) -> Path | None:
    """Return the folder that the source is, if image files lie in it rather than shards or a dataset."""
    path = user_path(source, where) if is_path(source) else None
    return path if path and path.is_dir() and not (hub.holds_dataset(path) or holds_shards(path)) else None


def _read(source: object, size: tuple[int, int] | None) -> tuple[Splits, str]:
    splits, where = read_undivided(source, size)
    known = np.unique(splits.train.labels)
    if len(known) < 2:
        raise DataError(f"{where}: images of {len(known)} class in the training part; at least two are needed")
    for name, part in splits.parts.items():
        if len(part) == 0:
            raise DataError(f"{where}: the {name} part is empty; leave it out to have one drawn")
        as_indices(np.unique(part.labels).tolist(), known.tolist(), f"{where}: the {name} part")
    return splits, where


def read_undivided(source: object, size: tuple[int, int] | None) -> tuple[Splits, str]:
    """Return the parts that the source has itself, as they are, and what to call it in errors."""
    if isinstance(source, Splits):
        return source, "the data given"
    if isinstance(source, str | os.PathLike):
        return _read_named(source, size or DEFAULT_SIZE), str(source)
    if isinstance(source, tuple | list):
        if len(source) not in (2, 3):
            raise DataError(f"{len(source)} datasets given, (train, val) or (train, val, test) is needed")
        return _wrap(source, size), "the datasets given"
    return _wrap([source], size), "the dataset given"


def is_path(source: object) -> bool:
    """Whether a source lies on the disk, rather than being called by a name with a prefix."""
    return isinstance(source, os.PathLike) or (isinstance(source, str) and not source.startswith(PREFIXES))


def _read_named(source: str | os.PathLike[str], size: tuple[int, int]) -> Splits:
    readers = {hub.TORCHVISION: hub.read_torchvision, hub.PREFIX: hub.read_hub, SHARDS: read_shards}
    for prefix, read in readers.items():
        if isinstance(source, str) and source.startswith(prefix):
            return read(source, size)
    path = user_path(source, "load_data")
    with readable(path):
        is_folder, is_there = path.is_dir(), path.exists()
    if is_folder and hub.holds_dataset(path):
        return hub.read_hub(path, size)
    if path.suffix.lower() == ".tar" or (is_folder and holds_shards(path)):
        return read_shards(path, size)
    if is_folder:
        return read_folder(path, size)
    if not is_there:
        raise DataError(f"{path}: there is no such file or folder; give class folders, a .npz file or torchvision:NAME")
    if path.suffix.lower() != ".npz":
        raise DataError(f"{path}: a file of this kind cannot be read; give a folder of class folders or a .npz file")
    return read_npz(path)


def read_npz(path: Path) -> Splits:
    """Read the parts in a .npz file: x_train and y_train, and those of val and test if they are there."""
    arrays = read_arrays(path)
    parts: dict[str, LabelledImages] = {}
    numbers: list[int] = []
    for part, groups in (("train", "groups"), ("val", "groups_val"), ("test", "")):
        if f"x_{part}" not in arrays:
            continue
        images, where = arrays[f"x_{part}"], f"{path}: y_{part}"
        labels = as_labels(arrays[f"y_{part}"], len(images), where)
        numbers = numbers or np.unique(labels).tolist()
        parts[part] = ArrayImages(
            images,
            as_indices(labels.tolist(), numbers, where),
            tuple(map(str, numbers)),
            groups=arrays.get(groups),
            name=f"{path}: x_{part}",
        )
    return Splits.of(parts)


def _wrap(datasets: Sequence[object], size: tuple[int, int] | None) -> Splits:
    parts: dict[str, LabelledImages] = {}
    for name, dataset in zip(("train", "val", "test"), datasets, strict=False):
        if dataset is None and parts:
            continue
        classes = parts["train"].classes if parts else None
        own = declared_classes(dataset)
        # Names alone do not tell a class that a part happens to lack from one that was never there.
        if any(mine != theirs for mine, theirs in zip(own, classes or own, strict=False)):
            raise DataError(
                f"{name} dataset: its classes {own[:10]} are not those of training, {(classes or ())[:10]}; "
                "all parts need the same classes in the same order"
            )
        if not isinstance(dataset, LabelledImages):
            images = cast("Dataset[object]", dataset)  # which is checked there
            dataset = WrappedDataset(images, classes, size=size, name=f"{name} dataset")
        parts[name] = dataset
    return Splits.of(parts)


# ------------------------------------------------------------------------------------------- opening the images


def _opened(splits: Splits, where: str, reading: Reading) -> Splits:
    """Return the splits without images that cannot be used, all reported, and with one white level for deep images."""
    callback = reading.callback or NullCallback()
    callback.log(f"{where}: opening {sum(map(len, splits.parts.values())):,} images")
    look_at(splits.parts.values(), callback)
    note_near_copies(splits.parts.values())
    looks = {name: looks_of(part) for name, part in splits.parts.items()}
    faults = list(dict.fromkeys(look.fault for each in looks.values() for look in each if look.fault))
    if faults:
        some = "1 image" if len(faults) == 1 else f"{len(faults)} images"
        reading.report(f"{where}: {some} left out, which cannot be used", faults)
        splits = splits.with_parts(
            {name: _sound(part, looks[name], f"{where}: {name}") for name, part in splits.parts.items()}
        )
    white = _white([look.depth for each in looks.values() for look in each], where)
    if white is None:
        return splits
    callback.log(f"{where}: has images of more than 8 bits, in which {white} is taken as white")
    return reread(splits, white=white)


def _sound(part: LabelledImages, looks: list[Look], where: str) -> LabelledImages:
    good = np.flatnonzero([not look.fault for look in looks])
    if len(good) == len(part):
        return part
    lost = np.setdiff1d(part.labels, part.labels[good])
    if len(lost) > 0:
        names = ", ".join(part.classes[label] for label in lost[:10])
        faults = [look.fault for look in looks if look.fault]
        raise DataError.of(f"{where}: no image of {names} can be used", faults)
    return take(part, good)


def _white(depths: Sequence[Depth | None], where: str) -> int | None:
    integers, floats = (
        max((each.white for each in depths if each is not None and each.floats == kind), default=None)
        for kind in (False, True)
    )
    if integers is not None and floats is not None and integers != floats:
        raise DataError(
            f"{where}: has images of integers up to {integers} and images of floats up to {floats}, so that what is "
            "white is not known; convert one kind to the other"
        )
    return integers if integers is not None else floats


def _without_shared(splits: Splits, groups: Mapping[str, str], reading: Reading, where: str) -> Splits:
    """Return the splits with each image and each group in one part only: the first of the data that has it."""
    names = names_of(splits)
    keys = {part: keys_of(splits, part, groups) for part in names}
    shared: dict[str, set[int]] = {part: set() for part in names}
    for kind, what in enumerate(_SHARED):
        first = {part: {key[kind]: name for key, name in zip(keys[part], names[part], strict=True)} for part in names}
        for part, other in combinations(names, 2):
            both = {
                index: f"{name} and {first[part][key[kind]]}"
                for index, (key, name) in enumerate(zip(keys[other], names[other], strict=True))
                if key[kind] and key[kind] in first[part] and index not in shared[other]
            }
            if both:
                said = f"{where}: {len(both)} of {len(names[other])} images of {other} {what} of {part}"
                reading.report(f"{said}, which would promise too much; they are left out of {other}", [*both.values()])
                shared[other] |= both.keys()
    kept = dict(splits.parts)
    for part, some in shared.items():
        if some and len(some) == len(names[part]):
            raise DataError(f"{where}: all images of {part} are also in another part; divide the images again")
        if some:
            kept[part] = take(kept[part], [index for index in range(len(kept[part])) if index not in some])
    return splits.with_parts(kept)


def with_unlabelled(
    splits: Splits, source: Source, size: tuple[int, int] | None, reading: Reading, manifest: Manifest | None = None
) -> Splits:
    """Return the splits with the images of the source to confirm, without their labels.

    A folder may hold images as it likes; of other sources, which `load_data` reads, they are those to train on. Damaged
    images, copies of images in the splits and all but the first of copies among themselves are left out and reported.
    With a `manifest`, exactly its images are used.
    """
    size = size or DEFAULT_SIZE
    images, where = _read_unlabelled(source, splits, size)
    if manifest is None:
        images = _distinct(images, splits, reading, where)
    else:
        given = images.root if isinstance(images, FolderImages) and images.root else Splits.of({"train": images})
        images = recalled(given, manifest, size, roles=("train",), callback=reading.callback)["train"]
        images = reread(Splits.of({"train": images}), white=white_of(splits)).train
    images.labelled = base_of(images)[0].labelled = False
    return splits.with_parts({**splits.parts, "confirm": images})


def _read_unlabelled(source: Source, splits: Splits, size: tuple[int, int]) -> tuple[LabelledImages, str]:
    if path := folder_of_images(source, "unlabelled"):
        if not (files := image_files(path)):
            raise DataError(f"{path}: contains no images; those to confirm the budget are needed")
        images = FolderImages([(file, 0) for file in files], splits.classes, size, root=path, white=white_of(splits))
        return images, str(path)
    parts, where = read_undivided(source, size)
    found = copy.copy(parts.train)
    found.labels, found.classes = np.zeros(len(found), dtype=np.int64), splits.classes
    return found, where


def _distinct(images: LabelledImages, splits: Splits, reading: Reading, where: str) -> LabelledImages:
    if reading.callback is not None:
        reading.callback.log(f"{where}: opening {len(images):,} images without labels")
    look_at([images], reading.callback)
    looks = looks_of(images)
    if faults := [look.fault for look in looks if look.fault]:
        reading.report(f"{where}: {len(faults)} images left out, which cannot be used", faults)
    images = take(images, [place for place, look in enumerate(looks) if not look.fault])
    note_near_copies([*splits.parts.values(), images])
    keys = [(look.sha256, look.cluster) for look in looks_of(images)]
    known = {key for part in splits.parts.values() for look in looks_of(part) for key in (look.sha256, look.cluster)}
    known.discard("")
    first = set(np.unique(units_of(keys), return_index=True)[1].tolist())
    kept = [place for place, each in enumerate(keys) if place in first and known.isdisjoint(each)]
    if not kept:
        raise DataError(f"{where}: no image is left that is not a copy of a labelled one")
    base, indices = base_of(images)
    if left := sorted(set(range(len(images))) - set(kept)):
        names = [base.manifest_name(int(indices[place]), "train") for place in left]
        reading.report(f"{where}: {len(left)} images without labels are copies of others, and are left out", names)
    return take(images, kept)
