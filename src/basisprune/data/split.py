"""Training, validation and test parts, drawn by seed and stratified by class; groups of images stay together."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from basisprune.callback import counted
from basisprune.data.arrays import Labels, refuse_alike
from basisprune.data.copies import looks_of, units_of
from basisprune.data.datasets import LabelledImages, base_of, in_units, take
from basisprune.data.decode import readable
from basisprune.errors import MOST_FAULTS, ConfigError, DataError
from basisprune.files import csv_rows, user_path

JUDGES = frozenset({"val", "confirm"})
_HEADER = ["file", "group"]
_MOST_BYTES = 128 << 20  # of a file of groups


@dataclass(frozen=True)
class Splits:
    """The parts of a dataset; all have the same classes.

    Every decision on the way to a small network is made on `val`. `confirm` holds validation images that are used only
    at the end, to certify the budget.

    >>> from basisprune.data import ArrayImages
    >>> images = ArrayImages(np.zeros((4, 8, 8), dtype=np.uint8), [0, 1, 0, 1])
    >>> Splits(images, None, None, images.classes).describe()
    'train: 4 images, 2 of each class'
    """

    train: LabelledImages
    val: LabelledImages | None
    test: LabelledImages | None
    classes: tuple[str, ...]
    confirm: LabelledImages | None = None

    def __post_init__(self) -> None:
        refuse_alike(self.classes)

    @classmethod
    def of(cls, parts: Mapping[str, LabelledImages], classes: tuple[str, ...] | None = None) -> Splits:
        """Return the splits with these parts by name; the classes are by default those of training."""
        known = parts["train"].classes if classes is None else classes
        return cls(parts["train"], parts.get("val"), parts.get("test"), known, parts.get("confirm"))

    @property
    def num_classes(self) -> int:
        return len(self.classes)

    @property
    def parts(self) -> dict[str, LabelledImages]:
        named = {"train": self.train, "val": self.val, "confirm": self.confirm, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    def with_parts(self, parts: Mapping[str, LabelledImages]) -> Splits:
        """Return splits of the same classes with these parts by name, and no others."""
        return Splits.of(parts, self.classes)

    def describe(self) -> str:
        """Return a line for each part: its name, its number of images, its smallest and largest class if any."""
        return "\n".join(self._describe(name, part) for name, part in self.parts.items())

    def _describe(self, name: str, part: LabelledImages) -> str:
        if not part.labelled:
            return f"{name}: {counted(len(part), 'image')} without labels"
        if not self.classes:
            return f"{name}: {len(part)} examples"
        counts = np.bincount(part.labels, minlength=self.num_classes)
        few, many = int(counts.argmin()), int(counts.argmax())
        if counts[few] == counts[many]:
            return f"{name}: {counted(len(part), 'image')}, {counts[few]} of each class"
        return (
            f"{name}: {counted(len(part), 'image')}, smallest class {self.classes[few]!r} ({counts[few]}), "
            f"largest {self.classes[many]!r} ({counts[many]})"
        )


def names_of(splits: Splits) -> dict[str, list[str]]:
    """Return the name of each image of each part: the path of its file, or its index in its dataset."""
    called: dict[int, str] = {}
    names: dict[str, list[str]] = {}
    for part, images in splits.parts.items():
        base, indices = base_of(images)
        first = called.setdefault(id(base), part)
        names[part] = [base.manifest_name(index, first) for index in indices.tolist()]
    return names


def reread(splits: Splits, *, size: tuple[int, int] | None = None, white: int | None = None) -> Splits:
    """Return the same images, read at another size or white level; None leaves either as it is."""
    bases = {id(base): base for base, _ in map(base_of, splits.parts.values())}
    others = {name: base.read_as(size, white) for name, base in bases.items()}

    def anew(part: LabelledImages) -> LabelledImages:
        base, indices = base_of(part)
        other = others[id(base)]
        return part if other is base else other if part is base else in_units(take(other, indices), part.units)

    return splits.with_parts({name: anew(part) for name, part in splits.parts.items()})


def white_of(splits: Splits) -> int | None:
    """Return the white level of its images of more than 8 bits, None if there are none."""
    whites = (getattr(base_of(part)[0], "white", None) for part in splits.parts.values())
    return next((white for white in whites if white is not None), None)


def split_indices(
    labels: Labels, fractions: Sequence[float], seed: int, units: Labels | None = None
) -> list[NDArray[np.int64]]:
    """Return the indices of the rest and of one part for each fraction: sorted, disjoint, together everything.

    Every class is divided by the fractions, to the nearest image. A fraction above zero gives each class an
    image in that part as long as the class has enough for one in every part; the rest is never left without.

    Images of one unit (`units` numbers them) go to one part: the largest units first, each to the part that it brings
    nearest to its share of the classes; single images even out the rest.

    >>> [len(part) for part in split_indices(np.array([0] * 40 + [1] * 3), [0.25, 0.1], seed=0)]
    [27, 11, 5]
    >>> parts = split_indices(np.zeros(9, dtype=np.int64), [0.3], seed=0, units=np.arange(9) // 3)
    >>> [len(part) for part in parts]
    [6, 3]
    """
    random = np.random.default_rng(seed)
    classes, labels = np.unique(labels, return_inverse=True)
    counts = np.bincount(labels, minlength=len(classes))
    taken = np.array([_sizes(count, fractions) for count in counts.tolist()], dtype=np.int64).reshape(len(classes), -1)
    wanted = np.column_stack([counts - taken.sum(1), taken])
    part_of = np.full(len(labels), -1)
    if units is not None and len(units) > 0:
        order = np.argsort(units, kind="stable")
        found = np.split(order, np.flatnonzero(np.diff(units[order])) + 1)
        if together := [members for members in found if len(members) > 1]:
            _place(together, labels, wanted, part_of, random)
    for label in range(len(classes)):
        members = random.permutation(np.flatnonzero((labels == label) & (part_of < 0)))
        placed = np.bincount(part_of[(labels == label) & (part_of >= 0)], minlength=wanted.shape[1])
        _, *others = _shared_out(len(members), wanted[label].tolist(), placed.tolist())
        for part, chosen in zip([*range(1, wanted.shape[1]), 0], np.split(members, np.cumsum(others)), strict=True):
            part_of[chosen] = part
    return [np.flatnonzero(part_of == part) for part in range(wanted.shape[1])]


def _sizes(count: int, fractions: Sequence[float]) -> list[int]:
    sizes: list[int] = []
    for position, fraction in enumerate(fractions):
        spare = count - 1 - sum(sizes)
        reserved = sum(later > 0 for later in fractions[position + 1 :])
        wanted = max(round(fraction * count), 1) if fraction > 0 else 0
        sizes.append(min(wanted, max(spare - reserved, 1), spare))
    return sizes


def _place(
    together: list[NDArray[np.int64]],
    labels: Labels,
    wanted: NDArray[np.int64],
    part_of: NDArray[np.int64],
    random: np.random.Generator,
) -> None:
    """Note in `part_of` where each unit goes, so that no part loses a class, and all are near to `wanted`."""
    has = np.zeros_like(wanted)
    single = np.ones(len(labels), dtype=bool)
    single[np.concatenate(together)] = False
    left = np.bincount(labels[single], minlength=len(wanted))  # units of each class that are still to be placed
    for members in together:
        left[np.unique(labels[members])] += 1
    shuffled = [together[place] for place in random.permutation(len(together))]
    for members in sorted(shuffled, key=len, reverse=True):
        here, counts = np.unique(labels[members], return_counts=True)
        left[here] -= 1
        ranks = []
        for part in np.flatnonzero(wanted.any(0)).tolist():
            after = has[here].copy()
            after[:, part] += counts
            lacking = (after == 0) & (wanted[here] > 0)
            lost = np.maximum(lacking.sum(1) - left[here], 0)
            bare = int((lacking[:, 0] & (left[here] == 0)).sum())  # classes that training would be without
            far = (((after - wanted[here]) ** 2).sum(1) / wanted[here].sum(1)).sum()
            unasked = int((wanted[here, part] == 0).sum())
            ranks.append((bare, int(lost.sum()), unasked, float(far), part))
        best = min(ranks)[-1]
        has[here, best] += counts
        part_of[members] = best


def _shared_out(count: int, wanted: list[int], placed: list[int]) -> list[int]:
    given = [0] * len(wanted)
    for part, asked in enumerate(wanted):  # one each, training first
        if asked > 0 and placed[part] == 0 and sum(given) < count:
            given[part] = 1
    for part, asked in enumerate(wanted[1:], 1):
        given[part] += min(max(asked - placed[part] - given[part], 0), count - sum(given))
    given[0] += count - sum(given)
    return given


def limit_indices(labels: Labels, limit: int, seed: int) -> NDArray[np.int64]:
    """Return the sorted indices of `limit` images, each class in its proportion and with at least one."""
    present = np.unique(labels)
    if limit < len(present):
        raise ConfigError(f"limit: {limit} given, at least {len(present)} is needed (classes)", where="load_data")
    random = np.random.default_rng(seed)
    # The k-th image of a class of n comes at the time k/n: all classes start at once and end at once.
    time = np.empty(len(labels))
    for label in present:
        members = random.permutation(np.flatnonzero(labels == label))
        time[members] = np.arange(len(members)) / len(members)
    return np.sort(np.argsort(time, kind="stable")[:limit])


def draw_missing(splits: Splits, fractions: tuple[float, float], *, seed: int, units: Labels, where: str) -> Splits:
    """Draw what is missing of (validation, test) from training, whose units stay together."""
    wanted = zip(("val", "test"), fractions, strict=True)
    missing = {name: fraction for name, fraction in wanted if name not in splits.parts and fraction > 0}
    rest, *drawn = split_indices(splits.train.labels, list(missing.values()), seed, units)
    parts = {**splits.parts, "train": take(splits.train, rest)}
    for name, indices in zip(missing, drawn, strict=True):
        if len(indices) == 0:
            raise DataError(
                f"{where}: no class has enough images to give one to the {name} part (copies of an image, and images "
                f"of one group, stay together); add images or pass {name}_fraction=0"
            )
        parts[name] = take(splits.train, indices)
    return splits.with_parts(parts)


def hold_out_confirmation(splits: Splits, share: float, seed: int, units: Labels | None = None) -> Splits:
    """Set that share of the validation images aside to confirm, stratified by class; units stay together."""
    if splits.val is None or splits.confirm is not None or share == 0:
        return splits
    search, confirm = split_indices(splits.val.labels, [share], seed, units)
    if len(confirm) == 0:
        return splits
    return replace(splits, val=take(splits.val, search), confirm=take(splits.val, confirm))


def hold_out(images: LabelledImages, share: float, seed: int) -> tuple[LabelledImages, LabelledImages]:
    """Return all other images, and that share of them, stratified by class; groups stay together.

    >>> from basisprune.data import ArrayImages
    >>> images = ArrayImages(np.zeros((20, 4, 4), dtype=np.uint8), [0, 1] * 10)
    >>> [len(part) for part in hold_out(images, 0.2, seed=0)]
    [16, 4]
    """
    units = None if images.groups is None else np.unique(images.groups, return_inverse=True)[1]
    rest, part = split_indices(images.labels, [share], seed, units)
    return take(images, rest), take(images, part)


def limited(splits: Splits, limit: int | None, seed: int) -> Splits:
    """Keep at most this many training images."""
    if limit is None or limit >= len(splits.train):
        return splits
    return replace(splits, train=take(splits.train, limit_indices(splits.train.labels, limit, seed)))


# ------------------------------------------------------------------------------------------- what stays together


def groups_of(splits: Splits, path: str | os.PathLike[str] | None) -> dict[str, str]:
    """Return the group of each image that has one, by its name: from the file, or else from the data itself."""
    names = names_of(splits)
    if path is not None:
        file = user_path(path, "groups")
        groups, known = read_groups(file), sorted(name for each in names.values() for name in each)
        if unknown := sorted(groups.keys() - set(known)):
            raise DataError.of(
                f"{file}: lists images that the data does not have; their names there start from its folder, as "
                f"{next(iter(known), '')}",
                unknown,
            )
        return groups
    return {
        name: group
        for part, images in splits.parts.items()
        for name, group in zip(names[part], images.groups or (), strict=images.groups is not None)
    }


def keys_of(splits: Splits, part: str, groups: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return what ties each image of a part to others: its content, its group, and its near copies."""
    rows = zip(looks_of(splits.parts[part]), names_of(splits)[part], strict=True)
    return [(look.sha256, groups.get(name, ""), look.cluster) for look, name in rows]


def units(splits: Splits, part: str, groups: Mapping[str, str]) -> Labels:
    """Return the units within which a part must not be divided: exact and near copies, and images of one group."""
    known = splits.parts[part].units
    return units_of(keys_of(splits, part, groups)) if known is None else known


def related(splits: Splits, groups: Mapping[str, str]) -> Splits:
    """Note in the parts that judge networks the units that they were drawn in."""
    judging = {name: in_units(splits.parts[name], units(splits, name, groups)) for name in JUDGES & splits.parts.keys()}
    return splits.with_parts({**splits.parts, **judging})


def read_groups(path: Path) -> dict[str, str]:
    """Read the group of each image from a CSV file of two columns, the image's name and its group."""
    groups: dict[str, str] = {}
    faults: list[str] = []
    with readable(path, OSError, UnicodeDecodeError, csv.Error, advice="; write it as file,group in UTF-8"):
        for place, (number, row) in enumerate(csv_rows(path, most=_MOST_BYTES)):
            if place == 0 and [cell.strip().casefold() for cell in row] == _HEADER:
                continue
            if len(row) != 2 or not all(cell.strip() for cell in row):
                faults.append(f"line {number}: {','.join(row)[:80]!r} found; file,group is needed")
            else:
                name, group = PurePosixPath(row[0].strip()).as_posix(), row[1].strip()
                if groups.setdefault(name, group) != group:
                    faults.append(f"line {number}: {name} is in group {group}, but in {groups[name]} before")
            if len(faults) == MOST_FAULTS:
                break
    if not groups and not faults:
        faults.append("no line file,group found")
    if faults:
        raise DataError.of(str(path), faults)
    return groups
