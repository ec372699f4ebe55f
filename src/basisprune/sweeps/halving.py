"""Successive halving: which of several backbones go on after a short training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from basisprune.errors import ConfigError


@dataclass(frozen=True)
class Halving:
    """How backbones are dropped: all train for `first` epochs, the better half goes on with twice as many.

    That ends when at most `keep` are left. All that are left are compressed.
    """

    first: int = 1
    keep: int = 3

    def __post_init__(self) -> None:
        faults = [f"{name}: {value} given; at least 1 is needed" for name, value in vars(self).items() if value < 1]
        if faults:
            raise ConfigError.of("Halving", faults)

    def rungs(self, backbones: int) -> list[tuple[int, int]]:
        """The epochs of each round, and how many go on after it.

        >>> Halving(keep=2).rungs(9)
        [(1, 5), (2, 3), (4, 2)]
        >>> Halving(keep=2).rungs(2)
        []
        """
        found: list[tuple[int, int]] = []
        while backbones > self.keep:
            backbones = max(math.ceil(backbones / 2), self.keep)
            found.append((self.first << len(found), backbones))
        return found


@dataclass(frozen=True)
class Probed:
    """A backbone after a short training: its accuracy on the validation images, and its size."""

    name: str
    accuracy: float
    size: float


def best_of(probed: Sequence[Probed], count: int) -> list[str]:
    """The names of so many that go on: the most accurate first, and of two that are equally accurate the smaller.

    >>> best_of([Probed("a", 0.90, 50), Probed("b", 0.95, 80), Probed("c", 0.80, 5), Probed("d", 0.95, 99)], 3)
    ['b', 'd', 'a']
    """
    return [each.name for each in sorted(probed, key=lambda each: (-each.accuracy, each.size))[:count]]
