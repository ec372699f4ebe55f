"""Datasets of labelled images: in memory, in files, and other people's PyTorch datasets."""

from __future__ import annotations

import copy
import hashlib
import operator
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from basisprune.data.arrays import (
    Labels,
    as_groups,
    as_labels,
    as_pixels,
    check_labels,
    declared_classes,
    from_array,
    labels_in,
    listed,
    numbered_classes,
    paths_in,
    read_only,
)
from basisprune.data.decode import (
    Look,
    decode_content,
    file_hash,
    image_hash,
    look_at_content,
    random_numbers_kept,
    thumbnail,
    to_pixels,
)
from basisprune.errors import DataError, pass_on

Item = tuple[Tensor, int]
MOST_BYTES = 1 << 28
"""The largest image file within a larger file."""


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
    """For each image the number of its unit, shared by all that belong together; None if none do."""
    labelled: bool = True
    """Whether the labels are known; otherwise all are 0, and the images only show on which of them networks differ."""
    prepared: bool = False
    """Whether images are what the network reads, normalised floats of the right size, rather than pixels."""
    in_parallel: bool = True
    """Whether several threads may look at its images at once."""

    @property
    def independent(self) -> int:
        return len(self) if self.units is None else len(np.unique(self.units))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        return [self[index] for index in indices]

    @cached_property
    def looks(self) -> dict[int, Look]:
        return {}

    def look(self, index: int) -> Look:
        try:
            return self._look(index)
        except DataError as error:
            return Look(fault=str(error))

    def _look(self, index: int) -> Look:
        image = self[index][0]
        return Look(image_hash(image), thumbnail=thumbnail(image))

    def content_hash(self, index: int) -> str:
        found = self.look(index)
        if found.fault:
            raise DataError(found.fault)
        return found.sha256

    def manifest_name(self, index: int, part: str) -> str:
        return f"{part}[{index}]"

    def read_as(self, size: tuple[int, int] | None, white: int | None) -> LabelledImages:  # noqa: ARG002
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
        self.classes = numbered_classes(self.labels, name) if classes is None else tuple(classes)
        self.groups = None if groups is None else as_groups(groups, len(self.images), name)
        check_labels(self.labels, self.classes, name)

    def __getitem__(self, index: int) -> Item:
        return self.images[index], int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return list(zip(self.images[chosen].unbind(), self.labels[chosen.numpy()].tolist(), strict=True))


class FileImages(LabelledImages):
    """Images in files, decoded to RGB of `size` (height, width); without `white`, each deep image suggests its own."""

    def __init__(self, labels: Labels, classes: Sequence[str], size: tuple[int, int], white: int | None = None) -> None:
        self.labels, self.classes, self.size, self.white = read_only(labels), tuple(classes), size, white

    def content(self, index: int) -> bytes:
        raise NotImplementedError

    def name(self, index: int) -> str:
        raise NotImplementedError

    def __getitem__(self, index: int) -> Item:
        return decode_content(self.content(index), self.name(index), self.size, self.white), int(self.labels[index])

    def _look(self, index: int) -> Look:
        return look_at_content(self.content(index), self.name(index))

    def content_hash(self, index: int) -> str:
        return hashlib.sha256(self.content(index)).hexdigest()

    def read_as(self, size: tuple[int, int] | None, white: int | None) -> Self:
        other = copy.copy(self)
        other.size, other.white = size or self.size, self.white if white is None else white
        return other


def path_from(path: Path, root: Path | None) -> str:
    """Return the path from the root on, with slashes; the whole path if it does not lie there."""
    inside = root is not None and path.is_relative_to(root)
    return shown_path(path.relative_to(root).as_posix() if root is not None and inside else path)


def shown_path(path: str | Path) -> str:
    """Return the path as text that can be printed and stored, whatever its bytes."""
    return os.fsencode(path).decode(errors="backslashreplace")


class Selection(LabelledImages):
    """Some images of another dataset, in the order given; see `take`."""

    def __init__(self, dataset: LabelledImages, indices: NDArray[np.int64]) -> None:
        self.dataset = dataset
        self.indices = indices
        self.labels = read_only(dataset.labels[indices])
        self.classes, self.prepared, self.labelled = dataset.classes, dataset.prepared, dataset.labelled
        self.groups = None if dataset.groups is None else tuple(dataset.groups[index] for index in indices.tolist())

    def __getitem__(self, index: int) -> Item:
        return self.dataset[int(self.indices[index])]

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        return self.dataset.__getitems__(self.indices[indices].tolist())


def take(dataset: LabelledImages, indices: Sequence[int] | NDArray[np.int64]) -> Selection:
    """Return the images at the indices, with their labels and the same classes; nothing is copied.

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
    """Return the same images, of which those of one unit belong together; unchanged if none do."""
    if units is None or len(np.unique(units)) == len(units):
        return dataset
    found = take(dataset, np.arange(len(dataset)))
    found.units = units
    return found


def base_of(dataset: LabelledImages) -> tuple[LabelledImages, NDArray[np.int64]]:
    """Return the dataset that holds the images, and the indices of these in it."""
    if isinstance(dataset, Selection):
        return dataset.dataset, dataset.indices
    return dataset, np.arange(len(dataset))


def is_prepared(data: object) -> bool:
    """Return whether a dataset, or the one within a DataLoader or Subset, says by `prepared = True` that it is."""
    if getattr(data, "prepared", False) is True:
        return True
    inner = getattr(data, "dataset", None)
    return inner is not None and is_prepared(inner)


# ------------------------------------------------------------------------------------------- PyTorch datasets


class WrappedDataset(LabelledImages):
    """A map-style PyTorch dataset of (image, label).

    An image is a PIL image (turned to RGB, and resized to `size` if that is given), an array (H, W) or
    (H, W, C), or a tensor (C, H, W); arrays and tensors are uint8 or floats. Labels are read from `targets`,
    `labels` or `y` if the dataset has them and they agree with its items; otherwise all items are read once, when
    labels are first needed. Raises DataError with the index of an item that is wrong.

    >>> images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    >>> wrapped = WrappedDataset(torch.utils.data.TensorDataset(images, torch.tensor([1, 0])))
    >>> wrapped.labels, wrapped.classes, wrapped[0][1]
    (array([1, 0]), ('0', '1'), 1)
    """

    def __init__(
        self,
        dataset: Dataset[object],
        classes: Sequence[str] | None = None,
        *,
        size: tuple[int, int] | None = None,
        name: str = "dataset",
        prepared: bool = False,
    ) -> None:
        map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not map_style or isinstance(dataset, IterableDataset):
            raise DataError(f"{name}: {type(dataset).__name__} given, a map-style dataset is needed")
        self.dataset, self.size, self.name = dataset, size, name
        self.prepared = prepared or is_prepared(dataset)
        if classes is not None:
            self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Item:
        image, label = self._read(index)
        if not 0 <= label < len(self.classes):
            raise DataError(f"{self._at(index)}: label {label} given, 0..{len(self.classes) - 1} is allowed")
        return self._to_tensor(image, index), label

    def _look(self, index: int) -> Look:
        if self.paths is not None:
            tensor = self._to_tensor(self._read(index)[0], index)
            return Look(file_hash(self.paths[index]), thumbnail=thumbnail(tensor))
        image = self._read_the_same(index)
        tensor = self._to_tensor(image, index)
        return Look(image_hash(image), thumbnail=thumbnail(tensor)) if self._repeats else Look()

    def content_hash(self, index: int) -> str:
        if self.paths is not None:
            return file_hash(self.paths[index])
        return image_hash(self._read_the_same(index)) if self._repeats else ""

    def manifest_name(self, index: int, part: str) -> str:
        if self.paths is None:
            return super().manifest_name(index, part)
        root = getattr(self.dataset, "root", None)
        return f"{part}/{path_from(self.paths[index], Path(root) if isinstance(root, str | os.PathLike) else None)}"

    def read_as(self, size: tuple[int, int] | None, white: int | None) -> Self:  # noqa: ARG002
        other = copy.copy(self)
        other.size = size or self.size
        return other

    @cached_property
    def paths(self) -> tuple[Path, ...] | None:
        found = listed(self.dataset, paths_in)
        return tuple(found) if found is not None and len(set(found)) == len(self) else None

    @cached_property
    def in_parallel(self) -> bool:  # type: ignore[override]
        return self.paths is not None

    @cached_property
    def groups(self) -> tuple[str, ...] | None:  # type: ignore[override]
        groups = getattr(self.dataset, "groups", None)
        return None if groups is None else as_groups(groups, len(self), self.name)

    @cached_property
    def labels(self) -> Labels:  # type: ignore[override]
        found = listed(self.dataset, labels_in)
        if found is None or any(self._read(index)[1] != found[index] for index in self._some()):
            found = [self._read(index)[1] for index in range(len(self))]
        labels = as_labels(found, len(self), self.name)
        negative = np.flatnonzero(labels < 0)
        if len(negative) > 0:
            raise DataError(f"{self._at(int(negative[0]))}: label {labels[negative[0]]} given, 0 or more is needed")
        return labels

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        names = declared_classes(self.dataset)
        return names if len(names) > self.labels.max(initial=-1) else numbered_classes(self.labels, self.name)

    @cached_property
    def _repeats(self) -> bool:
        first, again = ([image_hash(self._read_the_same(index)) for index in self._some()] for _ in range(2))
        return first == again

    def _some(self) -> set[int]:
        return {0, len(self) // 2, len(self) - 1} if len(self) > 0 else set()

    def _at(self, index: int) -> str:
        return f"{self.name}: item {index}"

    def _read_the_same(self, index: int) -> object:
        with random_numbers_kept(seed=0):
            return self._read(index)[0]

    def _read(self, index: int) -> tuple[object, int]:
        try:
            item = self.dataset[index]
        except (Exception, SystemExit) as error:
            if isinstance(error, IndexError) and index >= len(self):
                raise  # it ends a loop over the items
            pass_on(error, self._at(index))
            said = "it ends the program" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
            raise DataError(f"{self._at(index)}: cannot be read from the dataset ({said})") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{self._at(index)}: {type(item).__name__} given, (image, label) is needed")
        image, label = item
        try:
            return image, operator.index(label)
        except TypeError as error:
            raise DataError(f"{self._at(index)}: label {label!r} given, an integer is needed") from error

    def _to_tensor(self, image: object, index: int) -> Tensor:
        if isinstance(image, Image.Image):
            return to_pixels(image, self.size)
        tensor = from_array(image) if isinstance(image, np.ndarray) and image.dtype.kind in "uf" else image
        if isinstance(tensor, Tensor) and tensor.ndim == 2:
            tensor = tensor.unsqueeze(0)
        if (
            isinstance(tensor, Tensor)
            and tensor.ndim == 3
            and (tensor.is_floating_point() or tensor.dtype == torch.uint8)
        ):
            return tensor
        found = f"{getattr(image, 'dtype', '')} {type(image).__name__} {tuple(getattr(image, 'shape', ()))}"
        raise DataError(
            f"{self._at(index)}: {found.strip(' ()')} given as image; a PIL image, or an array (H, W, C) "
            "or tensor (C, H, W) of uint8 or floats is needed"
        )
