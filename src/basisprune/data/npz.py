"""Arrays in a .npz file, as Keras lays them out -> datasets."""

from __future__ import annotations

import math
import os
import zipfile
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from numpy.typing import NDArray

from basisprune.data.arrays import Labels, as_labels
from basisprune.data.datasets import ArrayImages
from basisprune.data.split import Splits
from basisprune.errors import DataError, pass_on
from basisprune.files import open_file

KEYS = ("x_train", "y_train", "x_val", "y_val", "x_test", "y_test", "groups", "groups_val")

_UNPACKED, _MOST_TIMES = 1 << 30, 100  # bytes that any file may have when unpacked, and how much larger others may get
_GROUPS = {"train": "groups", "val": "groups_val"}

Arrays = dict[str, NDArray[np.generic]]


def read_npz(path: Path) -> Splits:
    """The parts in the file: x_train, y_train, x_test, y_test, and x_val, y_val if they are there.

    Images are (N, H, W) or (N, H, W, C) in 0..255, labels any integers: the classes are those of y_train,
    sorted and named by their numbers. `groups` and `groups_val`, if they are there, name the group of each image of
    x_train and x_val. Nothing is ever unpickled. Raises DataError, which names the file and the array, for everything
    that does not fit.
    """
    arrays = _read_arrays(path)
    parts = [part for part in ("train", "val", "test") if f"x_{part}" in arrays]
    labels = {part: as_labels(arrays[f"y_{part}"], len(arrays[f"x_{part}"]), f"{path}: y_{part}") for part in parts}
    numbers = np.unique(labels["train"])
    classes = tuple(str(number) for number in numbers)
    datasets = {
        part: ArrayImages(
            arrays[f"x_{part}"],
            _as_indices(labels[part], numbers, f"{path}: y_{part}"),
            classes,
            groups=arrays.get(_GROUPS.get(part, "")),
            name=f"{path}: x_{part}",
        )
        for part in parts
    }
    return Splits(datasets["train"], datasets.get("val"), datasets["test"], classes)


def _read_arrays(path: Path) -> Arrays:
    try:
        with open_file(path) as stream:
            _check_headers(path, stream)
            stream.seek(0)
            file = np.load(stream, allow_pickle=False)
            return {key: _read_array(file, key, path) for key in KEYS if key in file.files}
    except DataError:
        raise
    except Exception as error:  # archives are damaged in many ways
        pass_on(error, path)
        if isinstance(error, OSError):
            raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
        raise DataError(f"{path}: not a .npz file, or damaged ({error}); write it with numpy.savez") from error


def _check_headers(path: Path, stream: BinaryIO) -> None:
    """Raises DataError for arrays that are not of the size that they claim, or do not fit into memory.

    Reading would take the memory that a header asks for before it looks at what there is.
    """
    if stream.read(len(MAGIC_PREFIX)) == MAGIC_PREFIX:
        raise DataError(f"{path}: a single array given, a .npz with x_train, y_train, ... is needed")
    with zipfile.ZipFile(stream) as archive:
        held = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        _check_keys(path, set(held))
        total = 0
        for key in KEYS:
            if key in held:
                with archive.open(held[key]) as member:
                    claimed, body = _claimed_bytes(member), held[key].file_size - member.tell()
                if claimed is not None and claimed != body:
                    raise DataError(f"{path}: {key} claims {claimed:,} bytes and has {body:,}; write it anew")
                total += body
    if total > _UNPACKED and total > _MOST_TIMES * (size := os.fstat(stream.fileno()).st_size):
        raise DataError(
            f"{path}: its arrays need {total:,} bytes, and the file has {size:,}; write it with numpy.savez"
        )
    if total > (memory := _memory()):
        raise DataError(f"{path}: its arrays need {total:,} bytes, and this machine has {memory:,}; use class folders")


def _claimed_bytes(member: IO[bytes]) -> int | None:
    """The size of the array by its header; None for pickled objects, which have none and are refused later."""
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


def _check_keys(path: Path, keys: set[str]) -> None:
    needed = {"x_train", "y_train", "x_test", "y_test"}
    if keys & {"x_val", "y_val"}:
        needed |= {"x_val", "y_val"}
    if needed - keys:
        raise DataError(
            f"{path}: {', '.join(sorted(needed - keys))} missing (found: {', '.join(sorted(keys)) or 'nothing'}); "
            "x_train, y_train, x_test and y_test are needed, x_val and y_val may be added"
        )


def _as_indices(labels: Labels, numbers: Labels, where: str) -> Labels:
    unknown = np.setdiff1d(labels, numbers)
    if len(unknown) > 0:
        raise DataError(
            f"{where}: has the labels {', '.join(map(str, unknown[:10]))}, which y_train lacks; "
            "every class needs training images"
        )
    return np.searchsorted(numbers, labels)
