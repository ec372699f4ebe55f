"""Image files -> pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from basisprune.errors import DataError
from basisprune.files import open_file

FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
"""What Pillow may take a file for; left to itself, it would also start Ghostscript for what it takes for EPS."""
EXTENSIONS = (".bmp", ".gif", ".jfif", ".jpe", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_MOST_PIXELS = 178_956_970  # from which on Pillow, by default, suspects a decompression bomb


def decode(path: Path, size: tuple[int, int]) -> Tensor:
    """The image of a file, upright, in colour and of the given (height, width): uint8 (3, *size).

    Raises DataError, which names the file, for what is missing, damaged or no image.
    """
    try:
        file = open_file(path)
    except FileNotFoundError as error:
        raise DataError(f"{path}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    try:
        with file, Image.open(file, formats=FORMATS) as image:
            if image.width * image.height > _MOST_PIXELS:
                raise ValueError(f"{image.width} x {image.height} pixels are too many")
            # A JPEG is decoded at a fraction of its size where that is still twice what is wanted (along
            # either side, as it may yet be turned upright): several times faster for photographs.
            image.draft(None, (2 * max(size), 2 * max(size)))
            return to_pixels(image, size)
    except UnidentifiedImageError as error:
        kinds = ", ".join(FORMATS)
        raise DataError(f"{path}: not an image of a kind that is read ({kinds}); remove it or replace it") from error
    except Exception as error:  # the decoders behind PIL raise errors of a dozen kinds
        raise DataError(
            f"{path}: the image is damaged or of an unknown kind ({type(error).__name__}: {error}); "
            "remove the file or replace it"
        ) from error


def to_pixels(image: Image.Image, size: tuple[int, int] | None = None) -> Tensor:
    """The image upright and in colour: uint8 (3, height, width), resized to (height, width) if asked.

    >>> to_pixels(Image.new("1", (4, 2), 1)).shape
    torch.Size([3, 2, 4])
    """
    rgb = _to_rgb(ImageOps.exif_transpose(image))
    if size is not None and rgb.size != (size[1], size[0]):
        rgb = rgb.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(rgb)).permute(2, 0, 1).contiguous()


def _to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB; what is transparent is seen on white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode == "F":
        raise ValueError("pixels are floats of unknown range; convert the image to 8 or 16 bits")
    if image.mode.startswith("I"):  # PIL would cut 16 bits off at 255 instead of scaling them down
        deep = np.asarray(image)
        if deep.min() < 0 or deep.max() > 65535:
            raise ValueError("pixels of 32 bits are of unknown range; convert the image to 8 or 16 bits")
        return Image.fromarray((deep // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "RGBa", "LA", "La", "PA") or "transparency" in image.info:
        over = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return image.convert("RGB")
