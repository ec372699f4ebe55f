"""Arrays that users hand us -> pixels and labels that can be trusted."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from basisprune.errors import DataError

Labels = NDArray[np.int64]
_LARGEST_LABEL = np.iinfo(np.int64).max


def as_pixels(images: NDArray[np.generic] | Tensor, where: str) -> Tensor:
    """The images (N, H, W) or (N, H, W, C) as a uint8 tensor (N, C, H, W); C is 1 or 3.

    Integers within 0..255 are converted. Raises DataError, starting with `where`, for everything else.

    >>> as_pixels(np.zeros((5, 28, 28), dtype=np.int32), "x_train").shape
    torch.Size([5, 1, 28, 28])
    """
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
    if np.issubdtype(array.dtype, np.floating):
        if np.isnan(array).any():
            raise DataError(f"{where}: images with NaN given, uint8 pixels in 0..255 are needed")
        low, high = array.min(), array.max()
        scaled = "(images * 255)" if high <= 1 else "images"
        raise DataError(
            f"{where}: {array.dtype} images from {low:.4g} to {high:.4g} given, uint8 pixels in 0..255 are "
            f"needed; convert pixels with {scaled}.round().astype('uint8')"
        )
    if not np.issubdtype(array.dtype, np.integer):
        raise DataError(f"{where}: {array.dtype} images given, uint8 pixels in 0..255 are needed")
    low, high = array.min(), array.max()
    if low < 0 or high > 255:
        raise DataError(
            f"{where}: {array.dtype} images from {low} to {high} given, pixels in 0..255 are needed; "
            "scale them and convert them to uint8"
        )
    return array.astype(np.uint8)


def as_labels(labels: object, count: int, where: str) -> Labels:
    """The labels of `count` images, (N,) or (N, 1), as a read-only int64 array (N,).

    >>> as_labels([[1], [0]], 2, "y_train")
    array([1, 0])
    """
    try:
        array = np.asarray(labels)
    except (TypeError, ValueError) as error:  # lists of different lengths, tensors elsewhere than on the CPU
        raise DataError(f"{where}: labels that are no array given ({error})") from error
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise DataError(
            f"{where}: labels of shape {array.shape} given, (N,) or (N, 1) is needed; "
            "turn one-hot labels into integers with labels.argmax(1)"
        )
    if len(array) != count:
        raise DataError(f"{where}: {len(array)} labels given for {count} images; there must be one for each")
    if not np.issubdtype(array.dtype, np.integer) and len(array) > 0:
        raise DataError(f"{where}: {array.dtype} labels given (the first is {array[0]!r}), integers are needed")
    if len(array) > 0 and array.max() > _LARGEST_LABEL:
        raise DataError(f"{where}: the label {array.max()} given, at most {_LARGEST_LABEL} can be distinguished")
    return read_only(array)


def read_only(labels: NDArray[np.generic]) -> Labels:
    """A copy of the labels that nobody changes."""
    copy = labels.astype(np.int64)
    copy.flags.writeable = False
    return copy
