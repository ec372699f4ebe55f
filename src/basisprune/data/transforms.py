"""Batches of pixels -> what a network reads: resized, changed at random if asked, normalised."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from basisprune.errors import ConfigError, DataError
from basisprune.signatures import checked
from basisprune.types import InputSpec

Policy = Literal["trivial", "rand"]
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as PIL makes grey of colour
INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
ROUNDING = 1e-4  # how far rounding may take a pixel out of [0, 1]
_ASPECT = 4 / 3  # of a crop, at most, as in torchvision


@checked
def prepare(
    images: Tensor,
    spec: InputSpec,
    *,
    prepared: bool = False,
    augmentation: Augment | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the batch as the network reads it: float32 (N, *spec.shape), normalised, in channels_last.

    Images are resized, then augmented, then normalised; grey becomes colour or colour grey as the spec asks.

    Args:
        images: Pixels (N, C, H, W): uint8 in 0..255 or floats in [0, 1].
        spec: The size and colours that the network reads.
        prepared: The images are normalised floats of the right size already; only their shape is checked.
        augmentation: How to change them at random.
        generator: The source of random numbers, by default PyTorch's global one.

    Raises:
        DataError: For images that do not fit.
        ConfigError: For an unknown `spec.interpolation`, or for changes of colour in normalised images.

    >>> spec = InputSpec(size=(2, 2), mean=(0.5,), std=(0.5,))
    >>> prepare(torch.tensor([[[[0, 0], [255, 255]]]], dtype=torch.uint8), spec).tolist()
    [[[[-1.0, -1.0], [1.0, 1.0]]]]
    """
    if images.ndim != 4:
        raise DataError(f"images: shape {tuple(images.shape)} given, (N, C, H, W) is needed")
    if prepared:
        if not images.is_floating_point():
            raise DataError(f"images: {images.dtype} given, prepared=True needs normalised floats")
        if images.shape[1:] != spec.shape:
            shape = tuple(images.shape[1:])
            raise DataError(
                f"images: {shape} given for each, prepared=True needs {spec.shape}; without it, pixels are resized"
            )
        ready = images.float()
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


def _unit_pixels(images: Tensor) -> Tensor:
    if images.dtype == torch.uint8:
        return images.float() / 255
    if not images.is_floating_point():
        raise DataError(f"images: {images.dtype} given, uint8 in 0..255 or floats in [0, 1] are needed")
    if images.numel() > 0:
        low, high = (bound.item() for bound in images.aminmax())
        if not (low >= -ROUNDING and high <= 1 + ROUNDING):  # this way round, NaN fails too
            raise DataError(
                f"images: floats from {low:.4g} to {high:.4g} found, pixels in [0, 1] (or uint8 in 0..255) are "
                "needed; if they are normalised already, pass prepared=True to load_data or have the dataset say it"
            )
    return images.float()


def _with_channels(pixels: Tensor, wanted: int) -> Tensor:
    given = pixels.shape[1]
    if given == wanted or (given, wanted) == (1, 3):
        return pixels
    if (given, wanted) == (3, 1):
        return (pixels * pixels.new_tensor(LUMA).view(-1, 1, 1)).sum(1, keepdim=True)
    raise DataError(f"images: {given} channels given, the network reads {wanted}; only 1 and 3 are converted")


def _resized(pixels: Tensor, spec: InputSpec) -> Tensor:
    if spec.interpolation not in INTERPOLATIONS:
        allowed = ", ".join(INTERPOLATIONS)
        raise ConfigError(f"interpolation: {spec.interpolation!r} given, allowed are {allowed}", where="InputSpec")
    height, width = pixels.shape[-2:]
    if (height, width) == tuple(spec.size):
        return pixels
    if spec.interpolation == "nearest":
        return F.interpolate(pixels, spec.size, mode="nearest-exact")
    shrinks = spec.size[0] < height or spec.size[1] < width
    resized = F.interpolate(pixels, spec.size, mode=spec.interpolation, align_corners=False, antialias=shrinks)
    # Bicubic overshoots at edges.
    return resized.clamp_(0, 1) if spec.interpolation == "bicubic" else resized


# ------------------------------------------------------------------------------------------- random changes


@dataclass(frozen=True)
class Augment:
    """How training images are changed at random; by default not at all.

    Args:
        shift: Fraction of height and width, uniform in ±shift and drawn apart for each.
        flip: Mirror left and right with probability one half.
        rotation: Degrees, uniform in ±rotation.
        crop: The smallest fraction of an image's area that is cut out and enlarged (torchvision's RandomResizedCrop).
        colour: How far brightness, contrast and saturation may go from 1 (its ColorJitter).
        policy: Its TrivialAugmentWide ("trivial") or RandAugment ("rand").
        mixup: Parameter of the Beta distribution by which the images and labels of a batch are blended.
        cutmix: The same for patches of images; with both, each batch is blended by either.

    >>> Augment(shift=0.15, flip=True)
    Augment(shift=0.15, flip=True, rotation=0.0)
    >>> Augment(flip=True, crop=0.5, policy="trivial")
    Augment(shift=0.0, flip=True, rotation=0.0, crop=0.5, policy='trivial')
    """

    shift: float = 0.0
    flip: bool = False
    rotation: float = 0.0
    crop: float = 1.0
    colour: float = 0.0
    policy: Policy | None = None
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        ranges = {
            "shift": (0 <= _number(self.shift) < 1, "a fraction of the image size in [0, 1) is needed"),
            "flip": (isinstance(self.flip, bool), "True or False is needed"),
            "rotation": (0 <= _number(self.rotation) <= 180, "degrees in [0, 180] are needed"),
            "crop": (0 < _number(self.crop) <= 1, "a fraction of the image's area in (0, 1] is needed"),
            "colour": (0 <= _number(self.colour) <= 1, "a number in [0, 1] is needed"),
            "policy": (self.policy in (None, *get_args(Policy)), f"allowed are None, {', '.join(get_args(Policy))}"),
            "mixup": (0 <= _number(self.mixup) < math.inf, "a number that is not negative is needed"),
            "cutmix": (0 <= _number(self.cutmix) < math.inf, "a number that is not negative is needed"),
        }
        faults = [f"{name}: {getattr(self, name)!r} given, {rule}" for name, (fits, rule) in ranges.items() if not fits]
        if faults:
            raise ConfigError.of("Augment", faults)

    def __repr__(self) -> str:
        always = ("shift", "flip", "rotation")
        values = [(field, getattr(self, field.name)) for field in fields(self)]
        shown = [f"{field.name}={value!r}" for field, value in values if field.name in always or value != field.default]
        return f"Augment({', '.join(shown)})"

    @property
    def moves(self) -> bool:
        return bool(self.shift or self.flip or self.rotation or self.crop < 1)

    @property
    def paints(self) -> bool:
        return bool(self.colour or self.policy)

    @property
    def blends(self) -> bool:
        return bool(self.mixup or self.cutmix)


def augment(images: Tensor, settings: Augment, generator: torch.Generator | None = None) -> Tensor:
    """Return the images (N, C, H, W), each changed at random; the same tensor if there is nothing to do.

    The images are floats, in [0, 1] if their colours change too; areas from outside get the colour of the border
    (with a policy: black). Random numbers come from a CPU generator (None: PyTorch's global one), the same on every
    device.

    >>> images = torch.rand(2, 3, 8, 8)
    >>> augment(images, Augment()) is images
    True
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise DataError(
            f"augment: a {images.dtype} tensor of shape {tuple(images.shape)} given, "
            "a float tensor (N, C, H, W) is needed; convert pixels with images.float() / 255"
        )
    if len(images) == 0:
        return images
    if settings.moves:
        images = _moved(images, settings, generator)
    if settings.colour:
        draws = torch.rand(3, len(images), generator=generator).to(images.device, images.dtype)
        images = paint(images, *(1 + settings.colour * (2 * draws - 1)))
    if settings.policy is not None:
        images = _by_policy(images, settings.policy, generator)
    return images


def _moved(images: Tensor, settings: Augment, generator: torch.Generator | None) -> Tensor:
    draws = torch.rand(4, len(images), generator=generator).to(images.device, images.dtype)
    flip = (draws[0] < 0.5) & settings.flip
    if settings.shift == 0 and settings.rotation == 0 and settings.crop == 1:
        return torch.where(flip.view(-1, 1, 1, 1), images.flip(3), images)
    around_zero, window = 2 * draws[1:] - 1, None
    if settings.crop < 1:
        window = _windows(torch.rand(4, len(images), generator=generator), settings.crop)
        window = window.to(images.device, images.dtype)
    shift, degrees = settings.shift * around_zero[:2].T, settings.rotation * around_zero[2]
    return move(images, shift=shift, degrees=degrees, flip=flip, window=window)


def _windows(draws: Tensor, smallest: float) -> Tensor:
    area = smallest + (1 - smallest) * draws[0]
    aspect = _ASPECT ** (2 * draws[1] - 1)
    size = torch.stack([(area * aspect).sqrt(), (area / aspect).sqrt()]).clamp(max=1)
    return torch.cat([(1 - size) * (2 * draws[2:] - 1), size]).T


def move(images: Tensor, *, shift: Tensor, degrees: Tensor, flip: Tensor, window: Tensor | None = None) -> Tensor:
    """Flip the images, then rotate them about their centre, then shift, then crop; sample once (bilinear).

    `shift` (N, 2) holds fractions of the width (to the right) and of the height (downwards); `degrees` (N,) turn
    counterclockwise. `window` (N, 4) is the crop: x and y of its centre, from -1 to 1, and its sides as fractions.

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
    if window is not None:
        offset = offset + linear @ window[:, :2].unsqueeze(2)
        linear = linear * window[:, 2:].unsqueeze(1)
    grid = F.affine_grid(torch.cat([linear, offset], dim=2), list(images.shape), align_corners=False)
    moved = F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)
    return _laid_out(moved, like=images)


def paint(images: Tensor, brightness: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Change the colours of images (N, C, H, W) in [0, 1] by one factor each (N,), as torchvision does it.

    Brightness blends an image with black, contrast with its mean grey, saturation each pixel with its own grey.
    Grey images have no saturation.

    >>> one, half = torch.ones(1), torch.full((1,), 0.5)
    >>> paint(torch.tensor([0.2, 0.6]).view(1, 1, 1, 2), one, half, one).flatten()
    tensor([0.3000, 0.5000])
    """
    brightness, contrast, saturation = (factor.view(-1, 1, 1, 1) for factor in (brightness, contrast, saturation))
    images = (images * brightness).clamp(0, 1)
    mean = _grey(images).mean((1, 2, 3), keepdim=True)
    images = (mean + (images - mean) * contrast).clamp(0, 1)
    if images.shape[1] != 3:
        return images
    grey = _grey(images)
    return (grey + (images - grey) * saturation).clamp(0, 1)


def _grey(images: Tensor) -> Tensor:
    grey: Tensor = v2.functional.rgb_to_grayscale(images) if images.shape[1] == 3 else images
    return grey


def _by_policy(images: Tensor, policy: Policy, generator: torch.Generator | None) -> Tensor:
    if images.shape[1] not in (1, 3):
        raise DataError(f"augment: policy {policy!r} knows grey and colour images; {images.shape[1]} channels given")
    kind = v2.TrivialAugmentWide if policy == "trivial" else v2.RandAugment
    transform = kind(interpolation=InterpolationMode.BILINEAR)
    pixels = (images * 255).round_().to(torch.uint8)
    with _seeded_by(generator):
        changed: Tensor = torch.stack([transform(image) for image in pixels]).to(images.dtype) / 255
    return _laid_out(changed, like=images)


def blend(
    images: Tensor, labels: Tensor, settings: Augment, *, classes: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Blend the images (N, C, H, W) with one another; return them and the share (N, classes) of each class.

    With nothing to blend, these are the same images and one-hot labels. Blending comes after normalising, with which
    it commutes.

    >>> blend(torch.rand(2, 3, 8, 8), torch.tensor([0, 2]), Augment(), classes=3)[1]
    tensor([[1., 0., 0.],
            [0., 0., 1.]])
    """
    if not settings.blends:
        return images, F.one_hot(labels, classes).to(images.dtype)
    with _seeded_by(generator):
        by_mixup = torch.rand(()).item() < 0.5 if settings.mixup and settings.cutmix else settings.mixup > 0
        kind, alpha = (v2.MixUp, settings.mixup) if by_mixup else (v2.CutMix, settings.cutmix)
        blended, shares = kind(alpha=alpha, num_classes=classes)(images, labels)
    return _laid_out(blended, like=images), shares


@contextmanager
def _seeded_by(generator: torch.Generator | None) -> Iterator[None]:
    seed = int(torch.randint(2**62, (), generator=generator))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _laid_out(result: Tensor, *, like: Tensor) -> Tensor:
    last = like.is_contiguous(memory_format=torch.channels_last)
    return result.contiguous(memory_format=torch.channels_last) if last else result


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
