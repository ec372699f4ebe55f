"""Arrays, labels and class names that users hand over, in memory or in a .npz file, checked before they are used."""

from __future__ import annotations

import math
import os
import unicodedata
import zipfile
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import IO, BinaryIO, TypeVar

import numpy as np
import torch
from numpy.lib.format import MAGIC_PREFIX
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Subset

from basisprune.data.decode import readable
from basisprune.errors import DataError
from basisprune.files import open_file

Labels = NDArray[np.int64]
Arrays = dict[str, NDArray[np.generic]]
_Listed = TypeVar("_Listed")
KEYS = ("x_train", "y_train", "x_val", "y_val", "x_test", "y_test", "groups", "groups_val")
"""The arrays that are read from a .npz file."""
_LARGEST_LABEL = np.iinfo(np.int64).max
_MOST_CLASSES = 1_000_000
_UNSEEN = ("Cf", "Cc")  # marks of format, and control characters
_UNPACKED, _MOST_TIMES = 1 << 30, 100  # bytes that any file may unpack to, and how much larger others may get


def as_pixels(images: NDArray[np.generic] | Tensor, where: str) -> Tensor:
    """Return images (N, H, W) or (N, H, W, C) as a uint8 tensor (N, C, H, W); C is 1 or 3."""
    if not isinstance(images, Tensor | np.ndarray):
        raise DataError(f"{where}: {type(images).__name__} given as images, an array or a tensor is needed")
    array = images.detach().cpu().numpy() if isinstance(images, Tensor) else images
    if array.ndim == 3:
        array = array[..., None]
    if array.ndim != 4 or array.shape[3] not in (1, 3) or 0 in array.shape:
        raise DataError(
            f"{where}: images of shape {tuple(images.shape)} given, (N, H, W) or (N, H, W, C) with C 1 or 3 and "
            "no empty side is needed; an array (N, C, H, W) becomes one by images.transpose(0, 2, 3, 1)"
        )
    pixels = _as_uint8(array, where).transpose(0, 3, 1, 2)
    return torch.from_numpy(np.require(pixels, requirements=["C", "W"]))


def _as_uint8(array: NDArray[np.generic], where: str) -> NDArray[np.uint8]:
    if array.dtype == np.uint8:
        return array.astype(np.uint8, copy=False)
    if array.dtype.kind not in "iuf":
        raise DataError(f"{where}: {array.dtype} images given, uint8 pixels in 0..255 are needed")
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise DataError(f"{where}: images with NaN given, uint8 pixels in 0..255 are needed")
    low, high = array.min(), array.max()
    if array.dtype.kind != "f" and low >= 0 and high <= 255:
        return array.astype(np.uint8)
    scaled = "(images * 255)" if high <= 1 else "images"
    raise DataError(
        f"{where}: {array.dtype} images from {low:.4g} to {high:.4g} given, uint8 pixels in 0..255 are needed; "
        f"scale them and convert them with {scaled}.round().astype('uint8')"
    )


def as_labels(labels: object, count: int, where: str) -> Labels:
    """Return the labels of `count` images, (N,) or (N, 1), as a read-only int64 array (N,).

    >>> as_labels([[1], [0]], 2, "y_train")
    array([1, 0])
    """
    array = _as_array(labels, "labels", where)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(f"{where}: labels of shape {array.shape} given, (N,) or (N, 1) is needed; try labels.argmax(1)")
    if len(array) != count:
        raise DataError(f"{where}: {len(array)} labels given for {count} images; there must be one for each")
    if not np.issubdtype(array.dtype, np.integer) and len(array) > 0:
        raise DataError(f"{where}: {array.dtype} labels given (the first is {array[0]!r}), integers are needed")
    if len(array) > 0 and array.max() > _LARGEST_LABEL:
        raise DataError(f"{where}: the label {array.max()} given, at most {_LARGEST_LABEL} can be distinguished")
    return read_only(array)


def as_groups(groups: object, count: int, where: str) -> tuple[str, ...]:
    """Return the group of each of `count` images as text; raise DataError unless each has a text or a number."""
    array = _as_array(groups, "groups", where)
    if array.shape != (count,) or array.dtype.kind not in "iuU":
        raise DataError(
            f"{where}: groups {array.dtype} {array.shape} given for {count} images, not a text or number each"
        )
    return tuple(map(str, array.tolist()))


def _as_array(values: object, what: str, where: str) -> NDArray[np.generic]:
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:  # lists of different lengths, tensors elsewhere than on the CPU
        raise DataError(f"{where}: {what} that are no array given ({error})") from error


def read_only(labels: NDArray[np.generic]) -> Labels:
    """Return a read-only copy of the labels."""
    copy = labels.astype(np.int64)
    copy.flags.writeable = False
    return copy


def as_indices(labels: Sequence[Hashable], classes: Sequence[Hashable], where: str) -> Labels:
    """Return each label as the place of its class; raise DataError for classes that training lacks."""
    places = {name: place for place, name in enumerate(classes)}
    unknown = sorted({str(label) for label in labels if label not in places})
    if unknown:
        raise DataError(f"{where}: has the labels {', '.join(unknown[:10])}, which training lacks; add some to it")
    return np.array([places[label] for label in labels], dtype=np.int64)


def check_labels(labels: Labels, classes: Sequence[str], where: str) -> None:
    """Raise DataError for the first label that is no index into `classes`."""
    wrong = np.flatnonzero((labels < 0) | (labels >= len(classes)))
    if len(wrong) > 0:
        raise DataError(f"{where}: item {wrong[0]}: label {labels[wrong[0]]} given, 0..{len(classes) - 1} is allowed")


def numbered_classes(labels: Labels, where: str) -> tuple[str, ...]:
    """Return the classes "0", "1", ... up to the largest label."""
    largest = int(labels.max(initial=-1))
    if largest >= _MOST_CLASSES:
        raise DataError(f"{where}: the label {largest} given, at most {_MOST_CLASSES - 1} is allowed; number from 0 on")
    return tuple(str(number) for number in range(largest + 1))


def class_names(labels: Sequence[str]) -> tuple[str, ...]:
    """Return the classes of labels in text: sorted as numbers if all are, else as names.

    >>> class_names(["10", "9", "9"]), class_names(["bee", "ant"])
    (('9', '10'), ('ant', 'bee'))
    """
    found = set(labels)
    are_numbers = all(text.isascii() and text.isdigit() and text == str(int(text[:20])) for text in found)
    return tuple(sorted(found, key=int) if are_numbers else sorted(found))


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return distinct names: repeated ones, as ImageNet's two cranes, get their number.

    >>> distinct_names(["crane", "owl", "crane"])
    ('crane', 'owl', 'crane (2)')
    """
    made: dict[str, None] = {}
    taken = set(names)
    for number, name in enumerate(names):
        other = name
        while other in made or (other != name and other in taken):
            other = f"{other} ({number})"
        made[other] = None
    return tuple(made)


def refuse_alike(names: Sequence[str]) -> None:
    """Raise DataError for two names that are equal or look equal: by Unicode form, white space or unseen letters.

    >>> refuse_alike(["A", "a"])
    >>> refuse_alike(["bee", "bee "])
    Traceback (most recent call last):
    basisprune.errors.DataError: the classes 'bee' and 'bee ' look alike; rename one of them
    """
    seen: dict[str, str] = {}
    for name in names:
        visible = "".join(letter for letter in name if letter.isspace() or unicodedata.category(letter) not in _UNSEEN)
        key = " ".join(unicodedata.normalize("NFC", visible).split())
        if key in seen:
            raise DataError(f"the classes {seen[key]!a} and {name!a} look alike; rename one of them")
        seen[key] = name


def declared_classes(dataset: object) -> tuple[str, ...]:
    """Return the names that the dataset, or the one it is a subset of, gives its classes; empty if none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    names = getattr(dataset, "classes", None)
    if not isinstance(names, list | tuple):
        return ()
    return distinct_names([str(name[0] if isinstance(name, tuple) and name else name) for name in names])


def listed(dataset: object, find: Callable[[object], Sequence[_Listed] | None]) -> Sequence[_Listed] | None:
    """Return what a dataset lists for each item, seen through subsets."""
    if isinstance(dataset, Subset):
        inner = listed(dataset.dataset, find)
        return None if inner is None else [inner[index] for index in dataset.indices]
    return find(dataset)


def labels_in(dataset: object) -> list[int] | None:
    """Return the labels that a dataset lists beside its images; None if it lists none that fit."""
    for attribute in ("targets", "labels", "y", "_labels"):  # the last one is torchvision's
        try:
            listed = np.asarray(getattr(dataset, attribute, None))
        except (TypeError, ValueError):  # ragged lists, tensors elsewhere than on the CPU
            continue
        if listed.shape == (len(dataset),) and np.issubdtype(listed.dtype, np.integer):  # type: ignore[arg-type]
            found: list[int] = listed.tolist()
            return found
    return None


def paths_in(dataset: object) -> list[Path] | None:
    """Return the files that a dataset lists, as torchvision's datasets of files do; None if it lists none."""
    for attribute in ("samples", "_samples", "_image_files", "_images"):
        listed = getattr(dataset, attribute, None)
        if isinstance(listed, list | tuple) and len(listed) == len(dataset) and listed:  # type: ignore[arg-type]
            paths = [each[0] if isinstance(each, tuple | list) and each else each for each in listed]
            if all(isinstance(path, str | os.PathLike) for path in paths):
                return [Path(path) for path in paths]
    return None


def from_array(array: NDArray[np.generic]) -> Tensor:
    """Return an array (H, W, C), (H, W) or, where that cannot be meant, (C, H, W) as a tensor (C, H, W)."""
    tensor = torch.from_numpy(np.array(array, order="C"))
    channels_first = array.ndim == 3 and array.shape[2] not in (1, 3) and array.shape[0] in (1, 3)
    return tensor if array.ndim != 3 or channels_first else tensor.permute(2, 0, 1)


# ------------------------------------------------------------------------------------------- .npz files


def read_arrays(path: Path) -> Arrays:
    """Return the arrays of `KEYS` in a .npz file; nothing is ever unpickled."""
    # Archives are damaged in many ways.
    with readable(path, Exception, advice="; write it with numpy.savez"), open_file(path) as stream:
        _check_headers(path, stream)
        stream.seek(0)
        file = np.load(stream, allow_pickle=False)
        return {key: _read_array(file, key, path) for key in KEYS if key in file.files}


def _check_headers(path: Path, stream: BinaryIO) -> None:
    """Raise DataError unless arrays have the size that they claim and fit into memory."""
    if stream.read(len(MAGIC_PREFIX)) == MAGIC_PREFIX:
        raise DataError(f"{path}: a single array given, a .npz with x_train, y_train, ... is needed")
    total = 0
    with zipfile.ZipFile(stream) as archive:
        held = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if len(held) < len(archive.infolist()):
            raise DataError(f"{path}: holds several arrays of one name; save it again")
        _check_keys(path, set(held))
        for key in (key for key in KEYS if key in held):
            with archive.open(held[key]) as member:
                claimed, body = _claimed_bytes(member), held[key].file_size - member.tell()
            if claimed is not None and claimed != body:
                raise DataError(f"{path}: {key} claims {claimed:,} bytes and has {body:,}; save it again")
            total += body
    if total > _UNPACKED and total > _MOST_TIMES * (size := os.fstat(stream.fileno()).st_size):
        raise DataError(f"{path}: its arrays need {total:,} bytes, and the file has {size:,}; save it again")
    if total > (memory := _memory()):
        raise DataError(f"{path}: its arrays need {total:,} bytes, and this machine has {memory:,}; use class folders")


def _check_keys(path: Path, keys: set[str]) -> None:
    pairs = [{f"x_{part}", f"y_{part}"} for part in ("train", "val", "test")]
    needed = set().union(pairs[0], *(pair for pair in pairs if pair & keys))
    if needed - keys:
        raise DataError(
            f"{path}: {', '.join(sorted(needed - keys))} missing (found: {', '.join(sorted(keys)) or 'nothing'}); "
            "x_train and y_train are needed; x_val, y_val, x_test and y_test may be added in pairs"
        )


def _claimed_bytes(member: IO[bytes]) -> int | None:
    version = np.lib.format.read_magic(member)
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in headers:
        raise ValueError(f"version {version} of its arrays is not known")
    shape, _, dtype = headers[version](member)
    return None if dtype.hasobject else math.prod(shape) * dtype.itemsize


def _memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 1 << 40


def _read_array(file: np.lib.npyio.NpzFile, key: str, path: Path) -> NDArray[np.generic]:
    try:
        array: NDArray[np.generic] = file[key]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise DataError(
            f"{path}: {key} holds pickled objects, which are never loaded; save plain uint8 images of one size "
            "and integer labels"
        ) from error
    if array.ndim == 0:
        raise DataError(f"{path}: {key} is a single number, an array with a row for each image is needed")
    return array
