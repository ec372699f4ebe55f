"""Datasets of somebody else, as datasets of ours."""

from __future__ import annotations

import copy
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
from torch.utils.data import Dataset, IterableDataset, Subset

from basisprune.data.arrays import Labels, as_labels, read_only
from basisprune.data.classes import told_apart
from basisprune.data.datasets import Item, LabelledImages, as_groups, below, numbered
from basisprune.data.decode import to_pixels
from basisprune.data.kin import thumbnail
from basisprune.data.looks import Look, file_hash, image_hash, random_numbers_kept, same_random_numbers
from basisprune.errors import DataError, pass_on


class WrappedDataset(LabelledImages):
    """Any map-style PyTorch dataset of (image, label).

    An image is a PIL image (turned to RGB, and resized to `size` if that is given), an array (H, W) or
    (H, W, C), or a tensor (C, H, W); arrays and tensors are uint8 or floats. Labels are read from `targets`,
    `labels` or `y` where the dataset has them and they agree with what it yields; otherwise it is gone
    through once, when they are first needed. Raises DataError with the index of an item that is wrong.

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
    ) -> None:
        map_style = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not map_style or isinstance(dataset, IterableDataset):
            raise DataError(
                f"{name}: {type(dataset).__name__} given, a map-style dataset is needed, with __len__ and __getitem__"
            )
        self.dataset = dataset
        self.size = size
        self.name = name
        if classes is not None:
            self.classes = tuple(classes)

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Item:
        image, label = self._read(index)
        if not 0 <= label < len(self.classes):
            raise DataError(f"{self.name}: item {index}: label {label} given, 0..{len(self.classes) - 1} is allowed")
        return self._to_tensor(image, index), label

    def look(self, index: int) -> Look:
        """What asking for an item shows; its content is that of its file, where the dataset lists its files."""
        try:
            if self.paths is not None:
                tensor = self._to_tensor(self._read(index)[0], index)
                return Look(file_hash(self.paths[index]), thumbnail=thumbnail(tensor))
            image = self._read_the_same(index)
            tensor = self._to_tensor(image, index)
            return Look(image_hash(image), thumbnail=thumbnail(tensor)) if self._repeats else Look()
        except DataError as error:
            return Look(fault=str(error))

    def content_hash(self, index: int) -> str:
        """The hash of an item's file or image; empty for a dataset whose images differ each time."""
        if self.paths is not None:
            return file_hash(self.paths[index])
        return image_hash(self._read_the_same(index)) if self._repeats else ""

    def called(self, index: int, part: str) -> str:
        """The path of its file from the dataset's root, or its index."""
        if self.paths is None:
            return super().called(index, part)
        root = getattr(self.dataset, "root", None)
        return f"{part}/{below(self.paths[index], Path(root) if isinstance(root, str | os.PathLike) else None)}"

    def read_as(self, size: tuple[int, int] | None, white: int | None) -> Self:  # noqa: ARG002
        """The same items."""
        other = copy.copy(self)
        other.size = self.size if size is None else size
        return other

    @cached_property
    def paths(self) -> tuple[Path, ...] | None:
        """The file of every item, where the dataset lists one for each and none twice."""
        listed = _listed_paths(self.dataset)
        return listed if listed is not None and len(set(listed)) == len(self) else None

    @cached_property
    def in_parallel(self) -> bool:  # type: ignore[override]
        """Whether its items come from files of their own."""
        return self.paths is not None

    @cached_property
    def groups(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """The groups that the dataset lists."""
        listed = getattr(self.dataset, "groups", None)
        return None if listed is None else as_groups(listed, len(self), self.name)

    @cached_property
    def _repeats(self) -> bool:
        """Whether some items are the same when asked for again."""
        some = {0, len(self) // 2, len(self) - 1}
        first, again = ([image_hash(self._read_the_same(index)) for index in some] for _ in range(2))
        return first == again

    def _read_the_same(self, index: int) -> object:
        """The image of an item, with the same random numbers each time."""
        with random_numbers_kept():
            same_random_numbers()
            return self._read(index)[0]

    @cached_property
    def labels(self) -> Labels:  # type: ignore[override]
        """The label of every item."""
        count = len(self)
        listed = _listed_labels(self.dataset)
        if listed is None or any(
            self._read(index)[1] != listed[index] for index in {0, count // 2, count - 1} if count > 0
        ):
            listed = as_labels([self._read(index)[1] for index in range(count)], count, self.name)
        negative = np.flatnonzero(listed < 0)
        if len(negative) > 0:
            raise DataError(f"{self.name}: item {negative[0]}: label {listed[negative[0]]} given, 0 or more is needed")
        return read_only(listed)

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        """The names that the dataset gives its classes, or "0", "1", ... up to the largest label."""
        names = declared_classes(self.dataset)
        return names if len(names) > self.labels.max(initial=-1) else numbered(self.labels, self.name)

    def _read(self, index: int) -> tuple[object, int]:
        try:
            item = self.dataset[index]
        except (Exception, SystemExit) as error:
            if isinstance(error, IndexError) and index >= len(self):
                raise  # it ends a loop over the items
            pass_on(error, f"{self.name}: item {index}")
            said = "it ends the program" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
            raise DataError(f"{self.name}: item {index}: cannot be had from the dataset ({said})") from error
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{self.name}: item {index}: {type(item).__name__} given, (image, label) is needed")
        image, label = item
        try:
            return image, operator.index(label)
        except TypeError as error:
            raise DataError(f"{self.name}: item {index}: label {label!r} given, an integer is needed") from error

    def _to_tensor(self, image: object, index: int) -> Tensor:
        if isinstance(image, Image.Image):
            return to_pixels(image, self.size)
        tensor = _from_array(image) if isinstance(image, np.ndarray) and image.dtype.kind in "uf" else image
        if isinstance(tensor, Tensor) and tensor.ndim == 2:
            tensor = tensor.unsqueeze(0)
        if isinstance(tensor, Tensor) and tensor.ndim == 3 and _is_pixels(tensor):
            return tensor
        found = f"{getattr(image, 'dtype', '')} {type(image).__name__} {tuple(getattr(image, 'shape', ()))}"
        raise DataError(
            f"{self.name}: item {index}: {found.strip(' ()')} given as image; a PIL image, or an array (H, W, C) "
            "or tensor (C, H, W) of uint8 or floats is needed"
        )


def declared_classes(dataset: object) -> tuple[str, ...]:
    """The names that the dataset, or the one it is a subset of, gives its classes; empty if it gives none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple):
        return ()
    return told_apart([str(name[0] if isinstance(name, tuple) and name else name) for name in names])


def _is_pixels(image: Tensor) -> bool:
    return image.dtype == torch.uint8 or image.is_floating_point()


def _listed_labels(dataset: Dataset[object]) -> NDArray[np.int64] | None:
    """The labels that the dataset lists beside its images, or None where it lists none that fit."""
    if isinstance(dataset, Subset):
        inner = _listed_labels(dataset.dataset)
        return None if inner is None else inner[np.asarray(dataset.indices, dtype=np.int64)]
    for attribute in ("targets", "labels", "y", "_labels"):  # the last one is torchvision's
        try:
            listed = np.asarray(getattr(dataset, attribute, None))
        except (TypeError, ValueError):  # ragged lists, tensors elsewhere than on the CPU
            continue
        if listed.shape == (len(dataset),) and np.issubdtype(listed.dtype, np.integer):  # type: ignore[arg-type]
            return as_labels(listed, len(listed), f"{type(dataset).__name__}.{attribute}")
    return None


def _listed_paths(dataset: object) -> tuple[Path, ...] | None:
    """The files that the dataset lists, as torchvision's datasets of files do; None where it lists none."""
    if isinstance(dataset, Subset):
        inner = _listed_paths(dataset.dataset)
        return None if inner is None else tuple(inner[index] for index in dataset.indices)
    for attribute in ("samples", "_samples", "_image_files", "_images"):
        listed = getattr(dataset, attribute, None)
        if isinstance(listed, list | tuple) and len(listed) == len(dataset) and listed:  # type: ignore[arg-type]
            paths = [each[0] if isinstance(each, tuple | list) and each else each for each in listed]
            if all(isinstance(path, str | os.PathLike) for path in paths):
                return tuple(Path(path) for path in paths)
    return None


def _from_array(array: NDArray[np.generic]) -> Tensor:
    """An array (H, W, C), (H, W) or, where that cannot be meant, (C, H, W) as a tensor (C, H, W)."""
    tensor = torch.from_numpy(np.array(array, order="C"))
    channels_first = array.ndim == 3 and array.shape[2] not in (1, 3) and array.shape[0] in (1, 3)
    return tensor if array.ndim != 3 or channels_first else tensor.permute(2, 0, 1)
