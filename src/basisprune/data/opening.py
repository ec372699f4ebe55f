"""All images opened once, before anything is trained on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import numpy as np

from basisprune.data.datasets import LabelledImages, base_of, in_units, take
from basisprune.data.decode import Depth
from basisprune.data.groups import linked
from basisprune.data.kin import near_copies
from basisprune.data.looks import Look, random_numbers_kept
from basisprune.data.reading import Reading
from basisprune.data.split import Splits
from basisprune.errors import DataError
from basisprune.listener import Listener, Silence

BLOCK = 256
"""How many images are opened before somebody hears of it."""
_MOST_THREADS = 16
Found = TypeVar("Found")


def looks_of(part: LabelledImages) -> list[Look]:
    """What is known of each image of a part, all of which were looked at."""
    base, indices = base_of(part)
    return [base.looks[index] for index in indices.tolist()]


def look_at(parts: Iterable[LabelledImages], listener: Listener | None = None) -> None:
    """Looks at all images of the parts that were not looked at before; what it shows is kept by the datasets."""
    todo: dict[int, tuple[LabelledImages, list[int]]] = {}
    for part in parts:
        base, indices = base_of(part)
        known = todo.setdefault(id(base), (base, []))[1]
        known += [index for index in indices.tolist() if index not in base.looks]
    work = [(base, sorted(set(indices))) for base, indices in todo.values()]
    total, done = sum(len(missing) for _, missing in work), 0
    for base, missing in work:
        for index, found in for_each(base, missing, base.look):
            base.looks[index] = found
            done += 1
            if done % BLOCK == 0 or done == total:
                (listener or Silence()).opened(done, total)


def note_kin(splits: Splits) -> None:
    """Notes which images of all parts, each of which was looked at, are near copies of one another."""
    all_of = {
        (id(base), index): base for base, indices in map(base_of, splits.parts.values()) for index in indices.tolist()
    }
    looks = [base.looks[index] for (_, index), base in all_of.items()]
    roots = linked(len(looks), near_copies([look.thumbnail for look in looks]).tolist())
    several = np.bincount(roots, minlength=len(roots)) > 1
    for ((_, index), base), look, root in zip(all_of.items(), looks, roots.tolist(), strict=True):
        base.looks[index] = replace(look, kin=str(root) if several[root] else "")


def for_each(base: LabelledImages, indices: Sequence[int], work: Callable[[int], Found]) -> Iterator[tuple[int, Found]]:
    """What the work gives for each index, on several threads where the dataset allows it.

    The random numbers that a dataset may draw are not missed elsewhere.
    """
    with random_numbers_kept(), ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS)) as pool:
        for start in range(0, len(indices), BLOCK):
            block = indices[start : start + BLOCK]
            yield from zip(block, (pool.map if base.in_parallel else map)(work, block), strict=True)


def opened(splits: Splits, reading: Reading, where: str) -> Splits:
    """The splits without images that cannot be used, all of which are reported, and with one white for deep images.

    Raises DataError if a class loses all its images, for deep images of several kinds, and with `strict` for the first
    of these.
    """
    reading.hearer.say(f"{where}: opening {sum(map(len, splits.parts.values())):,} images")
    look_at(splits.parts.values(), reading.listener)
    note_kin(splits)
    looks = {name: looks_of(part) for name, part in splits.parts.items()}
    faults = list(dict.fromkeys(look.fault for each in looks.values() for look in each if look.fault))
    if faults:
        some = "1 image" if len(faults) == 1 else f"{len(faults)} images"
        reading.report(f"{where}: {some} left out, which cannot be used", faults)
        splits = splits.with_parts(
            {name: _sound(part, looks[name], f"{where}: {name}") for name, part in splits.parts.items()}
        )
    white = _white([look.depth for each in looks.values() for look in each], where)
    if white is None:
        return splits
    reading.hearer.say(f"{where}: has images of more than 8 bits, in which {white} is taken as white")
    return reread(splits, white=white)


def reread(splits: Splits, *, size: tuple[int, int] | None = None, white: int | None = None) -> Splits:
    """The same images read at another size, and with this white where they are deep; None leaves either as it is."""
    bases = {id(base): base for base, _ in map(base_of, splits.parts.values())}
    others = {name: base.read_as(size, white) for name, base in bases.items()}

    def anew(part: LabelledImages) -> LabelledImages:
        base, indices = base_of(part)
        other = others[id(base)]
        return part if other is base else other if part is base else in_units(take(other, indices), part.units)

    return splits.with_parts({name: anew(part) for name, part in splits.parts.items()})


def white_of(splits: Splits) -> int | None:
    """What counts as white in its deep images, None where it has none."""
    whites = (getattr(base_of(part)[0], "white", None) for part in splits.parts.values())
    return next((white for white in whites if white is not None), None)


def _sound(part: LabelledImages, looks: list[Look], where: str) -> LabelledImages:
    good = np.flatnonzero([not look.fault for look in looks])
    if len(good) == len(part):
        return part
    lost = np.setdiff1d(part.labels, part.labels[good])
    if len(lost) > 0:
        names = ", ".join(part.classes[label] for label in lost[:10])
        faults = [look.fault for look in looks if look.fault]
        raise DataError.of(f"{where}: no image of {names} can be used", faults)
    return take(part, good)


def _white(depths: Iterable[Depth | None], where: str) -> int | None:
    """The white of a dataset: that of its brightest deep image."""
    found = {depth for depth in depths if depth is not None}
    whites = {kind: max((each.white for each in found if each.floats == kind), default=None) for kind in (False, True)}
    integers, floats = whites[False], whites[True]
    if integers is not None and floats is not None and integers != floats:
        raise DataError(
            f"{where}: has images of integers up to {integers} and images of floats up to {floats}, so that what is "
            "white is not known; convert one kind to the other"
        )
    return integers if integers is not None else floats
