"""Training, validation and test parts, drawn by seed and stratified by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from basisprune.data.arrays import Labels
from basisprune.data.datasets import LabelledImages, take
from basisprune.errors import ConfigError, DataError


@dataclass(frozen=True)
class Splits:
    """The parts of a dataset; all have the same classes.

    Every decision on the way to a small network is made on `val`. `confirm` are validation images that nothing looks at
    before the end, when the budget is certified on them.
    """

    train: LabelledImages
    val: LabelledImages | None
    test: LabelledImages | None
    classes: tuple[str, ...]
    confirm: LabelledImages | None = None

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.classes)

    @property
    def parts(self) -> dict[str, LabelledImages]:
        """The parts that there are, by name, training first."""
        named = {"train": self.train, "val": self.val, "confirm": self.confirm, "test": self.test}
        return {name: part for name, part in named.items() if part is not None}

    def describe(self) -> str:
        """One line for each part: its name, its number of images, its smallest and largest class."""
        return "\n".join(self._describe(name, part) for name, part in self.parts.items())

    def _describe(self, name: str, part: LabelledImages) -> str:
        counts = np.bincount(part.labels, minlength=self.num_classes)
        few, many = int(counts.argmin()), int(counts.argmax())
        return (
            f"{name}: {len(part)} images, smallest class {self.classes[few]!r} ({counts[few]}), "
            f"largest {self.classes[many]!r} ({counts[many]})"
        )


def split_indices(labels: Labels, fractions: Sequence[float], seed: int) -> list[NDArray[np.int64]]:
    """The indices of the rest and of one part for each fraction: sorted, disjoint, together everything.

    Every class is divided by the fractions, to the nearest image. A fraction above zero gives each class an
    image in that part as long as the class has enough for one in every part; the rest is never left without.

    >>> [len(part) for part in split_indices(np.array([0] * 40 + [1] * 3), [0.25, 0.1], seed=0)]
    [27, 11, 5]
    """
    random = np.random.default_rng(seed)
    parts: list[list[int]] = [[] for _ in range(len(fractions) + 1)]
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        ends = np.cumsum(_sizes(len(members), fractions))
        *taken, rest = np.split(members, ends)
        for part, indices in zip(parts, [rest, *taken], strict=True):
            part.extend(indices.tolist())
    return [np.array(sorted(part), dtype=np.int64) for part in parts]


def _sizes(count: int, fractions: Sequence[float]) -> list[int]:
    """How many of `count` images go to each part, so that one stays and later parts get one if they can."""
    sizes: list[int] = []
    for position, fraction in enumerate(fractions):
        spare = count - 1 - sum(sizes)
        reserved = sum(later > 0 for later in fractions[position + 1 :])
        wanted = max(round(fraction * count), 1) if fraction > 0 else 0
        sizes.append(min(wanted, max(spare - reserved, 1), spare))
    return sizes


def limit_indices(labels: Labels, limit: int, seed: int) -> NDArray[np.int64]:
    """The sorted indices of `limit` images, each class in its proportion and with at least one.

    Smaller limits choose among what larger ones choose. Raises ConfigError if there are more classes.

    >>> labels = np.array([0] * 8 + [1] * 4)
    >>> labels[limit_indices(labels, limit=6, seed=0)]
    array([0, 0, 0, 0, 1, 1])
    """
    present = np.unique(labels)
    if limit < len(present):
        raise ConfigError.of(
            "load_data", [f"limit: {limit} given, at least {len(present)} is needed, one for each class"]
        )
    random = np.random.default_rng(seed)
    # The k-th image of a class of n comes at the time k/n: all classes start at once and end at once.
    time = np.empty(len(labels))
    for label in present:
        members = random.permutation(np.flatnonzero(labels == label))
        time[members] = np.arange(len(members)) / len(members)
    return np.sort(np.argsort(time, kind="stable")[:limit])


def fill(splits: Splits, fractions: tuple[float, float], *, seed: int, limit: int | None, where: str) -> Splits:
    """The splits with what is missing of (validation, test) taken from training, which is then limited."""
    val_fraction, test_fraction = (
        0.0 if part is not None else fraction
        for part, fraction in zip((splits.val, splits.test), fractions, strict=True)
    )
    train, val, test = split_indices(splits.train.labels, [val_fraction, test_fraction], seed)
    for name, fraction, indices in (("val", val_fraction, val), ("test", test_fraction, test)):
        if fraction > 0 and len(indices) == 0:
            raise DataError(
                f"{where}: no class has enough images to give one to the {name} part; "
                f"add images or pass {name}_fraction=0"
            )
    if limit is not None and limit < len(train):
        train = train[limit_indices(splits.train.labels[train], limit, seed)]
    return replace(
        splits,
        train=take(splits.train, train),
        val=take(splits.train, val) if val_fraction > 0 else splits.val,
        test=take(splits.train, test) if test_fraction > 0 else splits.test,
    )
