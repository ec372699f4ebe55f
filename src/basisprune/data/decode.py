"""Image files -> pixels, and what opening an image shows: a hash of its content, its depth, a thumbnail, faults."""

from __future__ import annotations

import hashlib
import io
import math
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from basisprune.errors import BasisPruneError, DataError, pass_on
from basisprune.files import read_bytes

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""The formats that Pillow may detect; left to itself, it would also start Ghostscript for EPS files."""
EXTENSIONS = (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
WHITES = (255, 4095, 65535)
"""Possible white levels of images of more than 8 bits: the largest values of 8, 12 and 16 bits."""
SIDE, COLOUR_SIDE = 32, 8
"""Pixels along a side of a thumbnail, in grey and in colour."""
_MOST_PIXELS = 178_956_970  # from which on Pillow, by default, suspects a decompression bomb
_LONGEST = 10_000_000  # pixels of a side; Pillow has no memory for much longer rows
_LARGE, _alone = 1 << 26, threading.RLock()  # larger images are decoded one at a time
_BLOCK = 1 << 20  # values that are scaled at a time
_BITS_PER_SAMPLE = 258  # a tag of TIFF
_SMALLEST = 8  # side of an image that has a thumbnail

_Version = tuple[str, int, int, int]
_looks: dict[_Version, Look] = {}


@dataclass(frozen=True)
class Depth:
    """The white level of an image of more than 8 bits: the first of `WHITES` that it fits; of floats, also 1."""

    white: int
    floats: bool = False


@dataclass(frozen=True)
class Look:
    """What opening an image shows; the hash is empty if its content varies, and near copies share a `cluster`."""

    sha256: str = ""
    depth: Depth | None = None
    fault: str = ""
    thumbnail: bytes = field(default=b"", repr=False)
    cluster: str = ""


@contextmanager
def readable(where: object, *kinds: type[Exception], advice: str = "") -> Iterator[None]:
    """Raise errors of these kinds, by default those of files, as a DataError that names the place."""
    caught = kinds or (OSError, ValueError)
    try:
        yield
    except BasisPruneError:
        raise
    except caught as error:
        pass_on(error, where)
        said = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise DataError(f"{where}: cannot be read ({said}){advice}") from error


def decode_content(content: bytes, name: str | Path, size: tuple[int, int], white: int | None = None) -> Tensor:
    """Decode the content of an image file, upright, in colour and resized to (height, width): uint8 (3, *size).

    `white` is the white level of images of more than 8 bits. Raises DataError, which calls it `name`, if it is damaged.
    """
    return _decoded(content, name, size, white, draft=2)[1]


def decode(path: Path, size: tuple[int, int], white: int | None = None) -> Tensor:
    """Decode an image file as `decode_content` does."""
    with readable(path):
        content = read_bytes(path)
    return decode_content(content, path, size, white)


def _decoded(
    content: bytes, name: str | Path, size: tuple[int, int], white: int | None = None, *, draft: int = 1
) -> tuple[Depth | None, Tensor]:
    with io.BytesIO(content) as file, _image_in(file, name) as image:
        deep = _deep_values(image, file)
        if deep is not None:
            depth = Depth(white) if white else depth_of(deep, image)
            return depth, _to_tensor(_eight_bits(deep, depth.white), size)
        # A JPEG is decoded at a fraction of its size where that is still twice what is wanted (along
        # either side, as it may yet be turned upright): several times faster for photographs.
        image.draft(None, (draft * max(size), draft * max(size)))
        return None, to_pixels(image, size)


def to_pixels(image: Image.Image, size: tuple[int, int] | None = None) -> Tensor:
    """Return the image upright and in colour: uint8 (3, height, width), resized to (height, width) if asked.

    >>> to_pixels(Image.new("1", (4, 2), 1)).shape
    torch.Size([3, 2, 4])
    """
    upright = ImageOps.exif_transpose(image)
    if _is_deep_grey(upright):
        values = np.asarray(upright)
        upright = _eight_bits(values, depth_of(values, image).white)
    return _to_tensor(upright, size)


def depth_of(values: NDArray[np.generic], image: Image.Image) -> Depth:
    """Return the white level that the brightest value suggests; raise ValueError if the range is unknown.

    >>> depth_of(np.array([0, 3000], dtype=np.uint16), Image.new("I;16", (2, 1)))
    Depth(white=4095, floats=False)
    """
    seen = values[..., :3] if values.ndim == 3 else values  # how opaque it is says nothing
    low, high = float(seen.min()), float(seen.max())
    floats = np.issubdtype(values.dtype, np.floating)
    if not (0 <= low <= high <= WHITES[-1]):  # this way round, NaN fails too
        raise ValueError(f"pixels from {low:g} to {high:g} are of unknown range; convert the image to 8 or 16 bits")
    if floats and high <= 1:
        return Depth(1, floats=True)
    declared = 2 ** max(getattr(image, "tag_v2", {}).get(_BITS_PER_SAMPLE, (8,))) - 1
    least = declared if declared < WHITES[-1] else 0  # of 16 and 32 bits, often only some are used
    return Depth(next(white for white in WHITES if max(high, least) <= white), floats=floats)


@contextmanager
def _image_in(file: BinaryIO, path: str | Path) -> Iterator[Image.Image]:
    """Open the image in a file; raise what goes wrong with it as a DataError that names the path."""
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
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        over = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", over.size, "white"), over)
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    if size is not None and rgb.size != (size[1], size[0]):
        rgb = rgb.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


# ------------------------------------------------------------------------------------------- looking at an image


def look_at_content(content: bytes, name: str | Path) -> Look:
    """Decode the content of an image file and return what it shows; a damaged one has a fault."""
    sha256 = hashlib.sha256(content).hexdigest()
    try:
        depth, image = _decoded(content, name, (SIDE, SIDE))
    except DataError as error:
        return Look(sha256, fault=str(error))
    return Look(sha256, depth, thumbnail=thumbnail(image))


def look_at_file(path: Path) -> Look:
    """Look at an image file; a process reads a file again only if it has changed."""
    try:
        with readable(path):
            version = _version(path)
            if version not in _looks:
                _looks[version] = look_at_content(read_bytes(path), path)
            return _looks[version]
    except DataError as error:
        return Look(fault=str(error))


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content; raise DataError that names a file which cannot be read."""
    with readable(path):
        known = _looks.get(_version(path))
        return hashlib.sha256(read_bytes(path)).hexdigest() if known is None else known.sha256


def image_hash(image: object) -> str:
    """Return the SHA-256 of a tensor, an array or a PIL image, with its type and shape.

    >>> image_hash(torch.zeros(2, 2)) == image_hash(np.zeros((2, 2), dtype=np.float32)) != image_hash(torch.ones(2, 2))
    True
    """
    array = np.ascontiguousarray(image.detach().cpu().numpy() if isinstance(image, Tensor) else np.asarray(image))
    mode = image.mode if isinstance(image, Image.Image) else ""
    digest = hashlib.sha256(f"{mode} {array.dtype.str} {array.shape}".encode())
    digest.update(array.tobytes())
    return digest.hexdigest()


def thumbnail(image: object) -> bytes:
    """Return the image (C, H, W) in 8 bits: small in grey, smaller in colour; empty for anything else."""
    if not isinstance(image, Tensor) or image.ndim != 3 or min(image.shape[1:]) < _SMALLEST or len(image) == 0:
        return b""
    pixels = image.detach().cpu()[:3].float()
    if image.is_floating_point():
        inside = float(pixels.min()) >= 0 and float(pixels.max()) <= 1
        pixels = 255 * pixels if inside else 128 + 40 * pixels  # normalised for a network
    colours = (pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1))[None]
    small, smaller = adaptive_avg_pool2d(colours.mean(1), SIDE), adaptive_avg_pool2d(colours, COLOUR_SIDE)
    flat = torch.cat([small.flatten(), smaller.flatten()]).nan_to_num().clamp(0, 255).round()
    return flat.to(torch.uint8).numpy().tobytes()


@contextmanager
def random_numbers_kept(seed: int | None = None) -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch afterwards; inside, seed them if asked."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed)
                torch.default_generator.manual_seed(seed)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _version(path: Path) -> _Version:
    known = os.stat(path)
    return os.fspath(path), known.st_ino, known.st_size, known.st_mtime_ns
