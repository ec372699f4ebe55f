"""Labelled images, in memory, in files or in somebody else's dataset."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset

from basisprune.data.arguments import check, image_size
from basisprune.data.arrays import Labels, as_labels, as_pixels, read_only
from basisprune.data.decode import decode, to_pixels
from basisprune.errors import DataError

Item = tuple[Tensor, int]
_MOST_CLASSES = 1_000_000


class LabelledImages(Dataset[Item]):
    """A dataset that yields (image, label) and knows all its labels and the names of its classes.

    An image is a tensor (C, H, W): uint8 in 0..255, or floats as the user's own dataset yields them. `labels`
    is a read-only int64 array; a label is an index into `classes`.
    """

    labels: Labels
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Item:
        raise NotImplementedError

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """The items of a whole batch; PyTorch's loaders ask for them all at once."""
        return [self[index] for index in indices]


class ArrayImages(LabelledImages):
    """Images in memory: uint8 (N, H, W) or (N, H, W, C), with a label each.

    Without names the classes are called "0", "1", ... up to the largest label.

    >>> images = ArrayImages(np.zeros((3, 8, 8, 3), dtype=np.uint8), [0, 2, 1])
    >>> len(images), images.classes, images[1][0].shape, images[1][1]
    (3, ('0', '1', '2'), torch.Size([3, 8, 8]), 2)
    """

    def __init__(
        self,
        images: NDArray[np.generic] | Tensor,
        labels: object,
        classes: Sequence[str] | None = None,
        *,
        name: str = "ArrayImages",
    ) -> None:
        self.images = as_pixels(images, name)
        self.labels = as_labels(labels, len(self.images), name)
        self.classes = _numbered(self.labels, name) if classes is None else tuple(classes)
        _check_range(self.labels, self.classes, name)

    def __getitem__(self, index: int) -> Item:
        return self.images[index], int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Item]:
        """The items of a whole batch, gathered at once."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        return list(zip(self.images[chosen].unbind(), self.labels[chosen.numpy()].tolist(), strict=True))


class FolderImages(LabelledImages):
    """Images in files, decoded when asked for: RGB, upright, resized to `size` (height, width).

    Raises DataError, which names the file, when an image turns out to be damaged or none.
    """

    def __init__(
        self,
        files: Iterable[tuple[str | Path, int]],
        classes: Sequence[str],
        size: tuple[int, int] = (224, 224),
    ) -> None:
        check("FolderImages", (image_size("size", size),))
        try:
            listed = [(Path(path), label) for path, label in files]
        except (TypeError, ValueError) as error:
            raise DataError(f"FolderImages: {error}; (path, label) is needed for each file") from error
        self.paths = tuple(path for path, _ in listed)
        self.labels = as_labels([label for _, label in listed], len(listed), "FolderImages")
        self.classes = tuple(classes)
        self.size = size
        _check_range(self.labels, self.classes, "FolderImages")

    def __getitem__(self, index: int) -> Item:
        return decode(self.paths[index], self.size), int(self.labels[index])


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
        return names if len(names) > self.labels.max(initial=-1) else _numbered(self.labels, self.name)

    def _read(self, index: int) -> tuple[object, int]:
        try:
            item = self.dataset[index]
        except (Exception, SystemExit) as error:
            if isinstance(error, IndexError) and index >= len(self):
                raise  # it ends a loop over the items
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


class Selection(LabelledImages):
    """Some images of another dataset, in the order given; see `take`."""

    def __init__(self, dataset: LabelledImages, indices: NDArray[np.int64]) -> None:
        self.dataset = dataset
        self.indices = indices
        self.labels = read_only(dataset.labels[indices])
        self.classes = dataset.classes

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
    if isinstance(dataset, Selection):
        return Selection(dataset.dataset, dataset.indices[chosen])
    return Selection(dataset, chosen)


def declared_classes(dataset: object) -> tuple[str, ...]:
    """The names that the dataset, or the one it is a subset of, gives its classes; empty if it gives none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple):
        return ()
    return tuple(str(name[0] if isinstance(name, tuple) else name) for name in names)


def _numbered(labels: Labels, name: str) -> tuple[str, ...]:
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


def _from_array(array: NDArray[np.generic]) -> Tensor:
    """An array (H, W, C), (H, W) or, where that cannot be meant, (C, H, W) as a tensor (C, H, W)."""
    tensor = torch.from_numpy(np.array(array, order="C"))
    channels_first = array.ndim == 3 and array.shape[2] not in (1, 3) and array.shape[0] in (1, 3)
    return tensor if array.ndim != 3 or channels_first else tensor.permute(2, 0, 1)
