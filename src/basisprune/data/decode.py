"""Image files -> pixels."""

from __future__ import annotations

import io
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from basisprune.errors import DataError, pass_on
from basisprune.files import open_file

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""What Pillow may take a file for; left to itself, it would also start Ghostscript for what it takes for EPS."""
EXTENSIONS = (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
WHITES = (255, 4095, 65535)
"""What may count as white in an image of more than 8 bits: the largest value of 8, 12 and 16 bits."""
_MOST_PIXELS = 178_956_970  # from which on Pillow, by default, suspects a decompression bomb
_LONGEST = 10_000_000  # pixels of a side; Pillow has no memory for much longer rows
_LARGE, _alone = 1 << 26, threading.RLock()  # images of so many pixels are decoded one at a time
_BLOCK = 1 << 20  # values that are scaled at a time
_BITS_PER_SAMPLE = 258  # a tag of TIFF
_GLANCE = (32, 32)


@dataclass(frozen=True)
class Depth:
    """What an image of more than 8 bits tells of itself: the value that would be white by its brightest pixel.

    For integers that is the first of `WHITES` that is not exceeded, for floats it may be 1 as well.
    """

    white: int
    floats: bool = False


def decode(path: Path, size: tuple[int, int], white: int | None = None) -> Tensor:
    """The image of a file, upright, in colour and of the given (height, width): uint8 (3, *size).

    `white` is what counts as white in an image of more than 8 bits, by default what its brightest pixel suggests.
    Raises DataError, which names the file, for what is missing, damaged or no image.
    """
    try:
        file = open_file(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except (OSError, ValueError) as error:
        pass_on(error, path)
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    with file:
        return _decoded(file, path, size, white)


def decode_content(content: bytes, name: str, size: tuple[int, int], white: int | None = None) -> Tensor:
    """The image in the content of a file that is called so; otherwise as `decode`."""
    with io.BytesIO(content) as file:
        return _decoded(file, name, size, white)


def _decoded(file: BinaryIO, name: str | Path, size: tuple[int, int], white: int | None) -> Tensor:
    with _image_in(file, name) as image:
        deep = _deep_values(image, file)
        if deep is not None:
            return _to_tensor(_eight_bits(deep, white or depth_of(deep, image).white), size)
        # A JPEG is decoded at a fraction of its size where that is still twice what is wanted (along
        # either side, as it may yet be turned upright): several times faster for photographs.
        image.draft(None, (2 * max(size), 2 * max(size)))
        return to_pixels(image, size)


def glance(content: bytes, path: str | Path) -> tuple[Depth | None, Tensor]:
    """How deep the image in the content of a file is, None for 8 bits, and the image in 32 x 32 pixels.

    Raises DataError as `decode` does.
    """
    with io.BytesIO(content) as file, _image_in(file, path) as image:
        deep = _deep_values(image, file)
        if deep is not None:
            depth = depth_of(deep, image)
            return depth, _to_tensor(_eight_bits(deep, depth.white), _GLANCE)
        image.draft(None, _GLANCE)
        return None, to_pixels(image, _GLANCE)


def to_pixels(image: Image.Image, size: tuple[int, int] | None = None) -> Tensor:
    """The image upright and in colour: uint8 (3, height, width), resized to (height, width) if asked.

    >>> to_pixels(Image.new("1", (4, 2), 1)).shape
    torch.Size([3, 2, 4])
    """
    upright = ImageOps.exif_transpose(image)
    if _is_deep_grey(upright):
        values = np.asarray(upright)
        upright = _eight_bits(values, depth_of(values, image).white)
    return _to_tensor(upright, size)


def depth_of(values: NDArray[np.generic], image: Image.Image) -> Depth:
    """What the brightest of the values suggests as white; raises ValueError where nothing is known of their range.

    >>> depth_of(np.array([0, 3000], dtype=np.uint16), Image.new("I;16", (2, 1)))
    Depth(white=4095, floats=False)
    """
    seen = values[..., :3] if values.ndim == 3 else values  # how opaque it is says nothing
    low, high = float(seen.min()), float(seen.max())
    floats = np.issubdtype(values.dtype, np.floating)
    if not (0 <= low <= high <= WHITES[-1]):  # this way round, NaN fails too
        raise ValueError(
            f"pixels from {low:g} to {high:g} are of unknown range; convert the image to 8 or 16 bits, from 0 on"
        )
    if floats and high <= 1:
        return Depth(1, floats=True)
    declared = 2 ** max(getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (8,))) - 1
    least = declared if declared < WHITES[-1] else 0  # of 16 and 32 bits, often only some are used
    return Depth(next(white for white in WHITES if max(high, least) <= white), floats=floats)


@contextmanager
def _image_in(file: BinaryIO, path: str | Path) -> Iterator[Image.Image]:
    """The image in an open file; what goes wrong with it becomes a DataError that names the path."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            pixels = image.width * image.height
            if pixels > _MOST_PIXELS or max(image.size) > _LONGEST:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            with _alone if pixels > _LARGE else nullcontext():
                yield image
    except UnidentifiedImageError as error:
        kinds = ", ".join(FORMATS)
        raise DataError(f"{path}: not an image of a kind that is read ({kinds}); remove it or replace it") from error
    except Exception as error:  # the decoders behind PIL raise errors of a dozen kinds
        pass_on(error, path)
        raise DataError(
            f"{path}: the image is damaged or of an unknown kind ({type(error).__name__}: {error}); "
            "remove the file or replace it"
        ) from error


def _deep_values(image: Image.Image, file: BinaryIO) -> NDArray[np.generic] | None:
    """The values of an upright image of more than 8 bits, (H, W) or (H, W, C); None for other images."""
    if _is_deep_grey(image):
        return np.asarray(ImageOps.exif_transpose(image))
    swapped = _with_bytes_swapped(image)
    if swapped is None:
        return None
    # Of 16 bits a colour Pillow keeps the upper byte; with the two bytes swapped, it keeps the lower one.
    values: NDArray[np.uint16] = np.asarray(ImageOps.exif_transpose(image)).astype(np.uint16)
    values *= 256
    with Image.open(file, formats=FORMATS) as again:
        again.tile = swapped  # type: ignore[assignment]
        values += np.asarray(ImageOps.exif_transpose(again))
    return values


def _with_bytes_swapped(image: Image.Image) -> list[object] | None:
    """How the parts of a colour image of 16 bits are decoded with the bytes of each value swapped, else None."""
    turned = {f"{mode};16{one}": f"{mode};16{other}" for mode in ("RGB", "RGBA") for one, other in ("BL", "LB")}
    swapped: list[object] = []
    for codec, extents, offset, options in getattr(image, "tile", ()):
        raw = options[0] if isinstance(options, tuple) and options else options
        if raw not in turned:
            return None
        new = (turned[raw], *options[1:]) if isinstance(options, tuple) else turned[raw]
        swapped.append((codec, extents, offset, new))
    return swapped or None


def _is_deep_grey(image: Image.Image) -> bool:
    return image.mode == "F" or image.mode.startswith("I")


def _eight_bits(values: NDArray[np.generic], white: int) -> Image.Image:
    scaled = np.empty(values.shape, dtype=np.uint8)
    rows = max(_BLOCK // max(math.prod(values.shape[1:]), 1), 1)
    for first in range(0, len(values), rows):  # as floats, a large image would take many times its memory
        block = values[first : first + rows].astype(np.float32) * (255 / white) + 0.5
        scaled[first : first + rows] = np.clip(block, 0, 255, out=block)
    return Image.fromarray(scaled)


def _to_tensor(image: Image.Image, size: tuple[int, int] | None) -> Tensor:
    rgb = _to_rgb(image)
    if size is not None and rgb.size != (size[1], size[0]):
        rgb = rgb.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def _to_rgb(image: Image.Image) -> Image.Image:
    """An image of 8 bits in RGB; what is transparent is seen on white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")
