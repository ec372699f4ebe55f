"""Near copies: images that show the same, re-encoded, resized, shifted a little or with other bits.

Each image is known by its thumbnail. Those whose low frequencies have similar magnitudes, which shifts do not change,
are compared pixel by pixel, and count as copies only if they differ by far less than the images of the data do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from basisprune.callback import Callback, NullCallback
from basisprune.data.arrays import Labels
from basisprune.data.datasets import LabelledImages, base_of
from basisprune.data.decode import COLOUR_SIDE, SIDE, Look, random_numbers_kept

Numbers = npt.NDArray[np.float32]
Thumbnails = npt.NDArray[np.uint8]
Pairs = npt.NDArray[np.int64]
Result = TypeVar("Result")
OPENED_AT_ONCE = 256
"""How many images are opened between two reports of progress."""
_MOST_THREADS = 16
_LOW = 8  # how many frequencies are compared
_LENGTH = SIDE * SIDE + 3 * COLOUR_SIDE * COLOUR_SIDE
_SHIFT = 3  # pixels of the thumbnail
_ALIKE, _SAME = 0.04, 0.02  # of the energy of an image: what two may differ by at first sight, and pixel by pixel
_COLOUR_STEP = 12.0  # of 255: how far colours may be apart
_FLAT = 2.0  # of 255: an image of less contrast has only exact copies
_FEW = 20  # images, of which the mean tells nothing
_CELL, _PROBES, _NEAREST = 1024, 3, 8
_BLOCK = 2048


def look_at(parts: Iterable[LabelledImages], callback: Callback | None = None) -> None:
    """Open all images of the parts that were not opened before; their datasets keep what they show."""
    todo: dict[int, tuple[LabelledImages, set[int]]] = {}
    for part in parts:
        base, indices = base_of(part)
        missing = todo.setdefault(id(base), (base, set()))[1]
        missing.update(index for index in indices.tolist() if index not in base.looks)
    total, done = sum(len(missing) for _, missing in todo.values()), 0
    for base, missing in todo.values():
        for index, found in for_each(base, sorted(missing), base.look):
            base.looks[index] = found
            done += 1
            if done % OPENED_AT_ONCE == 0 or done == total:
                (callback or NullCallback()).opened(done, total)


def looks_of(part: LabelledImages) -> list[Look]:
    """Return what each image of a part has shown; all must have been opened."""
    base, indices = base_of(part)
    return [base.looks[index] for index in indices.tolist()]


def for_each(
    base: LabelledImages, indices: Sequence[int], work: Callable[[int], Result]
) -> Iterator[tuple[int, Result]]:
    """Yield each index with its result, on several threads where the dataset allows it; random states are restored."""
    with random_numbers_kept(), ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
        for start in range(0, len(indices), OPENED_AT_ONCE):
            block = indices[start : start + OPENED_AT_ONCE]
            yield from zip(block, (pool.map if base.in_parallel else map)(work, block), strict=True)


def note_near_copies(parts: Iterable[LabelledImages]) -> None:
    """Note which images of all parts, each of which was opened, are near copies of one another."""
    places = {(id(base), index): base for base, indices in map(base_of, parts) for index in indices.tolist()}
    looks = [base.looks[index] for (_, index), base in places.items()]
    roots = linked(len(looks), near_copies([look.thumbnail for look in looks]))
    several = np.bincount(roots, minlength=len(roots)) > 1
    for ((_, index), base), look, root in zip(places.items(), looks, roots.tolist(), strict=True):
        base.looks[index] = replace(look, cluster=str(root) if several[root] else "")


def units_of(keys: Sequence[Sequence[str]]) -> Labels:
    """Number the images: the same number for two that share a key, directly or over others; an empty key is none.

    >>> units_of([("a", "x"), ("b", ""), ("c", "x"), ("c", "y"), ("d", "y")])
    array([0, 1, 0, 0, 0])
    """
    first: dict[tuple[int, str], int] = {}
    pairs = [
        (first.setdefault((kind, key), index), index)
        for index, each in enumerate(keys)
        for kind, key in enumerate(each)
        if key
    ]
    return linked(len(keys), np.array(pairs, dtype=np.int64).reshape(-1, 2))


def linked(count: int, pairs: Pairs) -> Labels:
    """Return for each of `count` the first of all that the pairs (m, 2) link it with, directly or over others."""
    links = coo_array((np.ones(len(pairs), dtype=np.bool_), (pairs[:, 0], pairs[:, 1])), shape=(count, count))
    components = connected_components(links, directed=False)[1]
    _, first, inverse = np.unique(components, return_index=True, return_inverse=True)
    return first[inverse]


# ------------------------------------------------------------------------------------------- near copies


def near_copies(thumbnails: Sequence[bytes]) -> Pairs:
    """Return pairs (m, 2) of images that are near copies, which link all that are; an empty thumbnail has none."""
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
    found: Numbers = seen[:, : SIDE * SIDE].reshape(-1, SIDE, SIDE).astype(np.float32)
    for _ in range(2):
        padded = np.pad(found, ((0, 0), (1, 1), (0, 0)), mode="edge")
        found = (padded[:, :-2] / 4 + padded[:, 1:-1] / 2 + padded[:, 2:] / 4).transpose(0, 2, 1).astype(np.float32)
    return found


def _described(seen: Thumbnails) -> tuple[Numbers, Numbers]:
    """Return each thumbnail's energy per pixel and its low frequencies."""
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
    """Yield pairs of images whose frequencies hardly differ, a few for each image within its neighbourhood."""
    count = len(spectra)
    centres = spectra[np.random.default_rng(0).permutation(count)[: max(count // _CELL, 1)]]
    probes = min(_PROBES, len(centres))
    blocks = []
    for start in range(0, count, _BLOCK):
        apart = _distances(spectra[start : start + _BLOCK], centres)
        blocks.append((np.argpartition(apart, probes - 1, axis=1)[:, :probes], apart.argmin(1)))
    near, home = map(np.concatenate, zip(*blocks, strict=True))
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
    rows, columns = (slice(1 + max(by, 0), SIDE - 1 + min(by, 0)) for by in (down, right))
    return images[:, rows, columns]
