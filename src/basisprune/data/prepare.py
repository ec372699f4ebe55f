"""Batches of pixels -> what a network wants to read."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from basisprune.data.arguments import check, of_type
from basisprune.data.augment import Augment, augment
from basisprune.errors import ConfigError, DataError
from basisprune.types import InputSpec

LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as PIL makes grey of colour
INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
ROUNDING = 1e-4  # how far rounding may take a pixel out of [0, 1]


def prepare(
    images: Tensor,
    spec: InputSpec,
    *,
    prepared: bool = False,
    augmentation: Augment | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The batch as the network wants it: float32 (N, *spec.shape), normalised, in channels_last.

    `images` (N, C, H, W) are uint8 in 0..255 or floats in [0, 1]; grey becomes colour or colour grey as the
    spec asks. They are resized, then augmented, then normalised. With `prepared` they are normalised floats
    of the right size already; only their shape is checked. The input is not modified. Blending images is left to
    `blend`.

    Raises DataError for images that do not fit, ConfigError for an unknown `spec.interpolation`, or for other
    colours in images that are normalised.

    >>> spec = InputSpec(size=(2, 2), mean=(0.5,), std=(0.5,))
    >>> prepare(torch.tensor([[[[0, 0], [255, 255]]]], dtype=torch.uint8), spec).tolist()
    [[[[-1.0, -1.0], [1.0, 1.0]]]]
    """
    check("prepare", (of_type("spec", spec, InputSpec, "an InputSpec"),))
    if not isinstance(images, Tensor):
        raise DataError(f"images: {type(images).__name__} given, a tensor (N, C, H, W) is needed")
    if images.ndim != 4:
        raise DataError(f"images: shape {tuple(images.shape)} given, (N, C, H, W) is needed")
    if prepared:
        ready = _checked_prepared(images, spec).float()
        # Moving pixels commutes with normalising them, since what moves in from outside is the border.
        if augmentation is not None:
            if augmentation.paints:
                raise ConfigError("augmentation: colour and policy need pixels, but prepared=True given")
            ready = augment(ready, augmentation, generator)
    else:
        pixels = _resized(_with_channels(_unit_pixels(images), spec.channels), spec)
        if augmentation is not None:
            pixels = augment(pixels, augmentation, generator)
        mean, std = (pixels.new_tensor(values).view(-1, 1, 1) for values in (spec.mean, spec.std))
        ready = (pixels - mean) / std  # broadcasts grey to as many channels as the spec has
    return ready.contiguous(memory_format=torch.channels_last)


def _checked_prepared(images: Tensor, spec: InputSpec) -> Tensor:
    if not images.is_floating_point():
        raise DataError(
            f"images: {images.dtype} given with prepared=True, normalised floats are needed; "
            "leave prepared=False for pixels"
        )
    if images.shape[1:] != spec.shape:
        raise DataError(
            f"images: shape {tuple(images.shape)} given with prepared=True, "
            f"(N, {', '.join(map(str, spec.shape))}) is needed; leave prepared=False to have pixels resized"
        )
    return images


def _unit_pixels(images: Tensor) -> Tensor:
    """The images as float32 in [0, 1]."""
    if images.dtype == torch.uint8:
        return images.float() / 255
    if not images.is_floating_point():
        raise DataError(f"images: {images.dtype} given, uint8 in 0..255 or floats in [0, 1] are needed")
    if images.numel() > 0:
        low, high = (bound.item() for bound in images.aminmax())
        if not (low >= -ROUNDING and high <= 1 + ROUNDING):  # this way round, NaN fails too
            raise DataError(
                f"images: floats from {low:.4g} to {high:.4g} found, pixels in [0, 1] (or uint8 in 0..255) are "
                "needed; pass prepared=True if the images are normalised already"
            )
    return images.float()


def _with_channels(pixels: Tensor, wanted: int) -> Tensor:
    """The pixels with the wanted channels; grey stays grey until it is normalised, to resize it only once."""
    given = pixels.shape[1]
    if given == wanted or (given, wanted) == (1, 3):
        return pixels
    if (given, wanted) == (3, 1):
        return (pixels * pixels.new_tensor(LUMA).view(-1, 1, 1)).sum(1, keepdim=True)
    raise DataError(
        f"images: {given} channels given, the network reads {wanted}; "
        "only grey (1) and colour (3) are turned into each other"
    )


def _resized(pixels: Tensor, spec: InputSpec) -> Tensor:
    if spec.interpolation not in INTERPOLATIONS:
        raise ConfigError.of(
            "InputSpec",
            [f"interpolation: {spec.interpolation!r} given, one of {', '.join(INTERPOLATIONS)} is needed"],
        )
    height, width = pixels.shape[-2:]
    if (height, width) == tuple(spec.size):
        return pixels
    if spec.interpolation == "nearest":
        return F.interpolate(pixels, spec.size, mode="nearest-exact")
    shrinks = spec.size[0] < height or spec.size[1] < width
    resized = F.interpolate(pixels, spec.size, mode=spec.interpolation, align_corners=False, antialias=shrinks)
    # Bicubic overshoots at edges.
    return resized.clamp_(0, 1) if spec.interpolation == "bicubic" else resized
