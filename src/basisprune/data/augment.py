"""Random shifts, flips and rotations of whole batches of pixels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from basisprune.errors import ConfigError, DataError


@dataclass(frozen=True)
class Augment:
    """How far training images are moved at random; by default not at all.

    `shift` is a fraction of height and width (uniform in ±shift, drawn apart for each), `flip` mirrors left
    and right with probability one half, `rotation` is in degrees (uniform in ±rotation).

    >>> Augment(shift=0.15, flip=True)
    Augment(shift=0.15, flip=True, rotation=0.0)
    """

    shift: float = 0.0
    flip: bool = False
    rotation: float = 0.0

    def __post_init__(self) -> None:
        faults = []
        if not _is_number(self.shift) or not 0 <= self.shift < 1:
            faults.append(f"shift: {self.shift!r} given, a fraction of the image size in [0, 1) is needed")
        if not isinstance(self.flip, bool):
            faults.append(f"flip: {self.flip!r} given, True or False is needed")
        if not _is_number(self.rotation) or not 0 <= self.rotation <= 180:
            faults.append(f"rotation: {self.rotation!r} given, degrees in [0, 180] are needed")
        if faults:
            raise ConfigError.of("Augment", faults)


def augment(images: Tensor, settings: Augment, generator: torch.Generator | None = None) -> Tensor:
    """The images (N, C, H, W), each moved at random; the same tensor if there is nothing to do.

    The images are floats; what moves in from outside has the colour of the border. The random numbers come
    from a CPU generator (None: PyTorch's global one), the same for the same state on every device.

    >>> images = torch.rand(2, 3, 8, 8)
    >>> augment(images, Augment()) is images
    True
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise DataError(
            f"augment: a {images.dtype} tensor of shape {tuple(images.shape)} given, "
            "a float tensor (N, C, H, W) is needed; convert pixels with images.float() / 255"
        )
    if settings == Augment():
        return images
    draws = torch.rand(4, len(images), generator=generator).to(images.device, images.dtype)
    flip = (draws[0] < 0.5) & settings.flip
    if settings.shift == 0 and settings.rotation == 0:
        return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)
    around_zero = 2 * draws[1:] - 1
    return move(images, shift=settings.shift * around_zero[:2].T, degrees=settings.rotation * around_zero[2], flip=flip)


def move(images: Tensor, *, shift: Tensor, degrees: Tensor, flip: Tensor) -> Tensor:
    """The images flipped, then rotated about their centre, then shifted, sampled once (bilinear).

    `shift` (N, 2) holds fractions of the width (to the right) and of the height (downwards); `degrees` (N,)
    turn counterclockwise; `flip` (N,) is boolean.

    >>> image = torch.tensor([[[[1.0, 2.0, 3.0]]]])
    >>> third, zero, no = torch.tensor([[1 / 3, 0.0]]), torch.zeros(1), torch.tensor([False])
    >>> move(image, shift=third, degrees=zero, flip=no).round(decimals=3).tolist()
    [[[[1.0, 1.0, 2.0]]]]
    """
    height, width = images.shape[-2:]
    radians = torch.deg2rad(degrees)
    cos, sin = radians.cos(), radians.sin()
    side = torch.where(flip, -1.0, 1.0).to(images.dtype)
    # From a place in the result back to its place in the image. Coordinates run from -1 to 1 along either
    # side, so that a rotation in pixels has the aspect ratio in its off-diagonal.
    rows = [side * cos, -side * sin * (height / width), sin * (width / height), cos]
    linear = torch.stack(rows, dim=1).view(-1, 2, 2)
    offset = linear @ (-2 * shift).unsqueeze(2)
    grid = F.affine_grid(torch.cat([linear, offset], dim=2), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    if images.is_contiguous(memory_format=torch.channels_last):
        return moved.contiguous(memory_format=torch.channels_last)
    return moved


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
