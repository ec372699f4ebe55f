"""Labelled images, in memory and in files."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from basisprune.data.arguments import check, image_size
from basisprune.data.arrays import Labels, as_labels, as_pixels, read_only
from basisprune.data.decode import decode
from basisprune.data.kin import thumbnail
from basisprune.data.looks import Look, file_hash, image_hash, look_at_file
from basisprune.errors import DataError

Item = tuple[Tensor, int]
_MOST_CLASSES = 1_000_000


class LabelledImages(Dataset[Item]):
    """A dataset that yields (image, label) and knows all its labels and the names of its classes.

    An image is a tensor (C, H, W): uint8 in 0..255, or floats as the user's own dataset yields them. `labels`
    is a read-only int64 array; a label is an index into `classes`. `groups` names what an image belongs to, a patient
    or a scene, where that is known.
    """

    labels: Labels
    classes: tuple[str, ...]
    groups: tuple[str, ...] | None = None
    units: Labels | None = None
    """For each image the number of its unit, which all that belong together share; None where none do."""
    in_parallel: bool = True
    """Whether several threads may look at its images at once."""

    @property
    def independent(self) -> int:
        """The number of units: of images, if none belong together."""
        return len(self) if self.units is None else len(np.unique(self.units))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """The items of a whole batch; PyTorch's loaders ask for them all at once."""
        return [self[index] for index in indices]

    @cached_property
    def looks(self) -> dict[int, Look]:
        """What is known of the images that were looked at so far, by index."""
        return {}

    def look(self, index: int) -> Look:
        """What opening an image shows."""
        try:
            image = self[index][0]
            return Look(image_hash(image), thumbnail=thumbnail(image))
        except DataError as error:
            return Look(fault=str(error))

    def content_hash(self, index: int) -> str:
        """The hash that `look` gives; raises DataError for an image that cannot be had."""
        found = self.look(index)
        if found.fault:
            raise DataError(found.fault)
        return found.sha256

    def called(self, index: int, part: str) -> str:
        """The name of an image in a manifest; `part` is the part of the data that the dataset is."""
        return f"{part}[{index}]"

    def read_as(self, size: tuple[int, int] | None, white: int | None) -> LabelledImages:  # noqa: ARG002
        """The same images, resized to `size` and with this white as they are read; None leaves either as it is."""
        return self


class ArrayImages(LabelledImages):
    """Images in memory: uint8 (N, H, W) or (N, H, W, C), with a label each.

    Without names the classes are called "0", "1", ... up to the largest label.

    >>> images = ArrayImages(np.zeros((3, 8, 8, 3), dtype=np.uint8), [0, 2, 1])
    >>> len(images), images.classes, images[1][0].shape, images[1][1]
    (3, ('0', '1', '2'), torch.Size([3, 8, 8]), 2)
    """

    in_parallel = False  # a hash takes less time than to hand it to a thread

    def __init__(
        self,
        images: NDArray[np.generic] | Tensor,
        labels: object,
        classes: Sequence[str] | None = None,
        *,
        groups: object = None,
        name: str = "ArrayImages",
    ) -> None:
        self.images = as_pixels(images, name)
        self.labels = as_labels(labels, len(self.images), name)
        self.classes = numbered(self.labels, name) if classes is None else tuple(classes)
        self.groups = None if groups is None else as_groups(groups, len(self.images), name)
        _check_range(self.labels, self.classes, name)

    def __getitem__(self, index: int) -> Item:
        return self.images[index], int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """The items of a whole batch, gathered at once."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return list(zip(self.images[chosen].unbind(), self.labels[chosen.numpy()].tolist(), strict=True))


class FolderImages(LabelledImages):
    """Images in files, decoded when asked for: RGB, upright, resized to `size` (height, width).

    `root` is the folder that the names of the files start from in a manifest, `white` what counts as white in images of
    more than 8 bits (None: what each suggests itself). Raises DataError, which names the file, when an image turns out
    to be damaged or none.
    """

    def __init__(
        self,
        files: Iterable[tuple[str | Path, int]],
        classes: Sequence[str],
        size: tuple[int, int] = (224, 224),
        *,
        root: Path | None = None,
        white: int | None = None,
    ) -> None:
        check("FolderImages", (image_size("size", size),))
        try:
            listed = [(Path(path), label) for path, label in files]
        except (TypeError, ValueError) as error:
            raise DataError(f"FolderImages: {error}; (path, label) is needed for each file") from error
        self.paths = tuple(path for path, _ in listed)
        self.labels = as_labels([label for _, label in listed], len(listed), "FolderImages")
        self.classes = tuple(classes)
        self.size, self.root, self.white = size, root, white
        _check_range(self.labels, self.classes, "FolderImages")

    def __getitem__(self, index: int) -> Item:
        return decode(self.paths[index], self.size, self.white), int(self.labels[index])

    def look(self, index: int) -> Look:
        """What opening the file shows."""
        path = self.paths[index]
        if _shown(path) != str(path):
            return Look(fault=f"{_shown(path)}: the name of the file is not valid UTF-8; rename it")
        return look_at_file(path)

    def content_hash(self, index: int) -> str:
        """The hash of the file's content; nothing is decoded."""
        return file_hash(self.paths[index])

    def called(self, index: int, part: str) -> str:  # noqa: ARG002
        """The path of the file from the root."""
        return below(self.paths[index], self.root)

    def read_as(self, size: tuple[int, int] | None, white: int | None) -> Self:
        """The same files."""
        other = copy.copy(self)
        other.size = self.size if size is None else size
        other.white = self.white if white is None else white
        return other


class Selection(LabelledImages):
    """Some images of another dataset, in the order given; see `take`."""

    def __init__(self, dataset: LabelledImages, indices: NDArray[np.int64]) -> None:
        self.dataset = dataset
        self.indices = indices
        self.labels = read_only(dataset.labels[indices])
        self.classes = dataset.classes
        self.groups = None if dataset.groups is None else tuple(dataset.groups[index] for index in indices.tolist())

    def __getitem__(self, index: int) -> Item:
        return self.dataset[int(self.indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """The items of a whole batch, as the dataset below gathers them."""
        return self.dataset.__getitems__(self.indices[indices].tolist())


def take(dataset: LabelledImages, indices: Sequence[int] | NDArray[np.int64]) -> Selection:
    """The images at the indices, with their labels and the same classes; nothing is copied.

    >>> images = ArrayImages(np.zeros((4, 8, 8), dtype=np.uint8), [0, 1, 2, 1])
    >>> take(images, [3, 0]).labels
    array([1, 0])
    """
    chosen = np.arange(len(dataset))[np.asarray(indices, dtype=np.int64)]
    base, indices = base_of(dataset)
    found = Selection(base, indices[chosen])
    found.units = None if dataset.units is None else dataset.units[chosen]
    return found


def in_units(dataset: LabelledImages, units: Labels | None) -> LabelledImages:
    """The same images, of which those with one number belong together; unchanged where none do."""
    if units is None or len(np.unique(units)) == len(units):
        return dataset
    found = take(dataset, np.arange(len(dataset)))
    found.units = units
    return found


def base_of(dataset: LabelledImages) -> tuple[LabelledImages, NDArray[np.int64]]:
    """The dataset that holds the images, and which of them these are."""
    if isinstance(dataset, Selection):
        return dataset.dataset, dataset.indices
    return dataset, np.arange(len(dataset))


def as_groups(groups: object, count: int, name: str) -> tuple[str, ...]:
    """The group of each of `count` images, as texts; raises DataError for what is not a text or number for each."""
    try:
        array = np.asarray(groups)
    except (TypeError, ValueError) as error:
        raise DataError(f"{name}: groups that are no array given ({error})") from error
    if array.shape != (count,) or array.dtype.kind not in "iuU":
        raise DataError(
            f"{name}: groups {array.dtype} of shape {array.shape} given for {count} images; a number or a text is "
            "needed for each"
        )
    return tuple(map(str, array.tolist()))


def numbered(labels: Labels, name: str) -> tuple[str, ...]:
    """The classes "0", "1", ... up to the largest label."""
    largest = int(labels.max(initial=-1))
    if largest >= _MOST_CLASSES:
        raise DataError(
            f"{name}: the label {largest} given, which would make {largest + 1} classes; number the classes from 0 on"
        )
    return tuple(str(number) for number in range(largest + 1))


def _check_range(labels: Labels, classes: tuple[str, ...], name: str) -> None:
    wrong = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(wrong) > 0:
        raise DataError(
            f"{name}: item {wrong[0]}: label {labels[wrong[0]]} given, "
            f"0..{len(classes) - 1} is allowed for {len(classes)} classes"
        )


def below(path: Path, root: Path | None) -> str:
    """The path from the root on, with slashes; the whole path where it does not lie there."""
    inside = root is not None and path.is_relative_to(root)
    return _shown(path.relative_to(root).as_posix() if root is not None and inside else path)


def _shown(path: str | Path) -> str:
    """The path as text that can be printed and stored, whatever its bytes."""
    return os.fsencode(path).decode(errors="backslashreplace")
