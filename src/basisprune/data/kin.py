"""Near copies: images that show the same, re-encoded, resized, shifted a little or with other bits.

Each image is known by a thumbnail. Those that look alike by the magnitudes of its low frequencies, which shifts do
not change, are compared pixel by pixel. They count as copies only if they differ by far less than the images of the
data do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

Numbers = npt.NDArray[np.float32]
Thumbnails = npt.NDArray[np.uint8]
Pairs = npt.NDArray[np.int64]
SIDE = 32
_COLOURS, _LOW = 8, 8  # the side of the thumbnail in colour, and how many frequencies are compared
_LENGTH = SIDE * SIDE + 3 * _COLOURS * _COLOURS
_SMALLEST = 8  # side of an image
_SHIFT = 3  # pixels of the thumbnail
_ALIKE, _SAME = 0.04, 0.02  # of the energy of an image: what two may differ by at first sight, and pixel by pixel
_COLOUR_STEP = 12.0  # of 255: how far colours may be apart
_FLAT = 2.0  # of 255: an image of less contrast has only exact copies
_FEW = 20  # images, of which the mean tells nothing
_CELL, _PROBES, _NEAREST = 1024, 3, 8
_BLOCK = 2048


def thumbnail(image: object) -> bytes:
    """The image (C, H, W) in 8 bits, small: grey, and smaller still in colour; empty for what is no image."""
    if not isinstance(image, Tensor) or image.ndim != 3 or min(image.shape[1:]) < _SMALLEST or len(image) == 0:
        return b""
    pixels = image.detach().cpu()[:3].float()
    if image.is_floating_point():
        inside = float(pixels.min()) >= 0 and float(pixels.max()) <= 1
        pixels = 255 * pixels if inside else 128 + 40 * pixels  # prepared for a network
    colours = (pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1))[None]
    small, smaller = adaptive_avg_pool2d(colours.mean(1), SIDE), adaptive_avg_pool2d(colours, _COLOURS)
    flat = torch.cat([small.flatten(), smaller.flatten()]).nan_to_num().clamp(0, 255).round()
    return flat.to(torch.uint8).numpy().tobytes()


def near_copies(thumbnails: Sequence[bytes]) -> Pairs:
    """Pairs (m, 2) of places of images that are near copies, which link all that are; an empty thumbnail has none.

    >>> image = torch.rand(3, 40, 40)
    >>> near_copies([thumbnail(image), b"", thumbnail(image * 0.99)]).tolist()
    [[0, 2]]
    """
    known: dict[bytes, int] = {}
    same = [(known.setdefault(each, place), place) for place, each in enumerate(thumbnails) if each]
    pairs = [np.array([pair for pair in same if pair[0] != pair[1]], dtype=np.int64).reshape(-1, 2)]
    places = np.array(sorted(known.values()), dtype=np.int64)
    if len(places) == 0:
        return pairs[0]
    seen = np.frombuffer(b"".join(thumbnails[place] for place in places), np.uint8).reshape(len(places), _LENGTH)
    energy, spectra = _described(seen)
    clear = energy >= _FLAT**2
    flat = places[~clear]
    pairs[0] = pairs[0][~np.isin(pairs[0][:, 0], flat)]
    usable = np.flatnonzero(clear)
    for some in _alike(spectra[usable], energy[usable]) if len(usable) else ():
        found = usable[some]
        pairs.append(places[found[_shows_the_same(seen, energy, found)]])
    return np.concatenate(pairs)


def _grey(seen: Thumbnails) -> Numbers:
    """The thumbnails in grey, a little blurred, so that shifts by a part of a pixel change less."""
    found: Numbers = seen[:, : SIDE * SIDE].reshape(-1, SIDE, SIDE).astype(np.float32)
    for _ in range(2):
        padded = np.pad(found, ((0, 0), (1, 1), (0, 0)), mode="edge")
        found = (padded[:, :-2] / 4 + padded[:, 1:-1] / 2 + padded[:, 2:] / 4).transpose(0, 2, 1).astype(np.float32)
    return found


def _described(seen: Thumbnails) -> tuple[Numbers, Numbers]:
    """For each thumbnail its energy per pixel, around its own mean or the mean image, and its low frequencies.

    What all images have in common, as a background, does not make two of them alike.
    """
    energies, spectra = [], []
    mean = np.mean(seen[:, : SIDE * SIDE], axis=0, dtype=np.float64).reshape(SIDE, SIDE).astype(np.float32)
    for start in range(0, len(seen), _BLOCK):
        block = _grey(seen[start : start + _BLOCK])
        own = block.var((1, 2))
        energies.append(np.minimum(own, np.square(block - mean).mean((1, 2))) if len(seen) >= _FEW else own)
        waves = np.abs(np.fft.rfft2(block - block.mean((1, 2), keepdims=True))) * (2**0.5 / SIDE**2)
        rows = np.r_[0:_LOW, -_LOW + 1 : 0]
        spectra.append(waves[:, rows, :_LOW].reshape(len(block), -1).astype(np.float32))
    return np.concatenate(energies), np.concatenate(spectra)


def _alike(spectra: Numbers, energy: Numbers) -> Iterator[Pairs]:
    """Pairs of images of which the frequencies hardly differ, some for each image among those of its neighbourhood."""
    count = len(spectra)
    centres = spectra[np.random.default_rng(0).permutation(count)[: max(count // _CELL, 1)]]
    probes = min(_PROBES, len(centres))
    near = np.concatenate(
        [
            np.argpartition(_distances(spectra[start : start + _BLOCK], centres), probes - 1, axis=1)[:, :probes]
            for start in range(0, count, _BLOCK)
        ]
    )
    home = np.concatenate(
        [_distances(spectra[start : start + _BLOCK], centres).argmin(1) for start in range(0, count, _BLOCK)]
    )
    for cell in range(len(centres)):
        members, asking = np.flatnonzero(home == cell), np.flatnonzero((near == cell).any(1))
        for start in range(0, len(asking) if len(members) else 0, _BLOCK):
            mine = asking[start : start + _BLOCK]
            apart = _distances(spectra[mine], spectra[members])
            apart[mine[:, None] == members[None]] = np.inf
            nearest = np.argpartition(apart, min(_NEAREST, len(members)) - 1, axis=1)[:, :_NEAREST]
            close = np.take_along_axis(apart, nearest, axis=1) <= _ALIKE * energy[mine, None]
            rows, columns = np.nonzero(close)
            yield np.unique(np.sort(np.stack([mine[rows], members[nearest[rows, columns]]], axis=1), axis=1), axis=0)


def _distances(one: Numbers, other: Numbers) -> Numbers:
    squares = np.square(one).sum(1)[:, None] + np.square(other).sum(1)[None] - 2 * one @ other.T
    found: Numbers = np.maximum(squares, 0)
    return found


def _shows_the_same(seen: Thumbnails, energy: Numbers, pairs: Pairs) -> npt.NDArray[np.bool_]:
    """Which of the pairs are copies, one perhaps shifted."""
    found = np.zeros(len(pairs), dtype=np.bool_)
    for start in range(0, len(pairs), _BLOCK):
        some = pairs[start : start + _BLOCK]
        (first, second), limit = (seen[some[:, side]] for side in (0, 1)), energy[some].min(1) * _SAME
        colour = np.abs(first[:, SIDE * SIDE :].astype(np.float32) - second[:, SIDE * SIDE :]).mean(1)
        one, other = _grey(first), _grey(second)
        least = np.full(len(some), np.inf, dtype=np.float32)
        for down, right in product(range(-_SHIFT, _SHIFT + 1), repeat=2):
            least = np.minimum(least, _unexplained(_window(one, down, right), _window(other, -down, -right)))
        found[start : start + _BLOCK] = (least <= limit) & (colour <= _COLOUR_STEP)
    return found


def _unexplained(one: Numbers, other: Numbers) -> Numbers:
    """The mean square of what two images differ by, without what a shift by a part of a pixel explains."""
    apart, mean = one - other, (one + other) / 2
    down, right = np.gradient(mean, axis=(1, 2))
    each = [(first * second).mean((1, 2)) for first, second in ((down, down), (right, right), (down, right))]
    with_down, with_right = ((apart * slope).mean((1, 2)) for slope in (down, right))
    volume = np.maximum(each[0] * each[1] - each[2] ** 2, 1e-9)
    shifts = (
        (each[1] * with_down - each[2] * with_right) / volume,
        (each[0] * with_right - each[2] * with_down) / volume,
    )
    by_down, by_right = (np.clip(shift, -1, 1)[:, None, None] for shift in shifts)
    found: Numbers = np.square(apart - by_down * down - by_right * right).mean((1, 2))
    return found


def _window(images: Numbers, down: int, right: int) -> Numbers:
    """What is left of the images if the other is shifted against them."""
    rows, columns = (slice(1 + max(by, 0), SIDE - 1 + min(by, 0)) for by in (down, right))
    return images[:, rows, columns]
