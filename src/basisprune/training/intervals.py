"""How far an accuracy, or the loss of accuracy on the same images, can be trusted: score intervals and tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy import special

Bools: TypeAlias = npt.NDArray[np.bool_]
_HALVINGS = 60


@dataclass(frozen=True)
class Paired:
    """How two networks differ on the same images: the second loses so many of them, and wins so many.

    The tests and intervals are those of Tango's score (Statistics in Medicine 17, 1998): the variance is the one under
    the hypothesis that is tested, so that no change at all is not taken for certainty. At a margin of 0 the test is
    McNemar's. Counts need not be whole, for what is expected of other images.

    >>> pair = Paired(lost=60, won=20, images=1000)
    >>> pair.drop, [round(end, 4) for end in pair.interval()]
    (0.04, [0.0231, 0.0584])
    """

    lost: float
    won: float
    images: float

    @classmethod
    def of(cls, before: Bools, after: Bools) -> Paired:
        """The counts of two networks, from which images each classifies correctly."""
        return cls(int((before & ~after).sum()), int((~before & after).sum()), len(before))

    @property
    def drop(self) -> float:
        """The accuracy lost."""
        return (self.lost - self.won) / self.images

    @property
    def differing(self) -> float:
        """The share of images that only one of the two networks classifies correctly."""
        return (self.lost + self.won) / self.images

    def score(self, margin: float) -> float:
        """How many standard deviations the drop is above `margin`, between -1 and 1, if that is the true one."""
        distance = self.lost - self.won - self.images * margin
        variance = self.images * (2 * self._won_if(margin) + margin * (1 - margin))
        return deviations(distance, math.sqrt(max(variance, 0.0)))

    def _won_if(self, margin: float) -> float:
        """The most likely share of images won if the true drop is `margin`: Tango's equations 25 and 26."""
        linear = (2 * self.images - self.lost + self.won) * margin - self.lost - self.won
        constant = self.won * margin * (1 - margin)
        root = (math.sqrt(max(linear * linear + 8 * self.images * constant, 0.0)) - linear) / (4 * self.images)
        return max(root, -margin, 0.0)

    def p_value(self, margin: float) -> float:
        """The chance of a drop as small as this, or smaller, if the true one is `margin`.

        >>> round(Paired(lost=20, won=15, images=1000).p_value(0.01), 3)
        0.203
        """
        return NormalDist().cdf(self.score(margin))

    def upper(self, confidence: float = 0.95) -> float:
        """The drop that the true one does not exceed, with this one-sided confidence.

        >>> round(Paired(lost=0, won=0, images=270).upper(), 4)
        0.0099
        """
        wanted = -NormalDist().inv_cdf(confidence)
        return falls_to(wanted, self.score, self.drop, 1.0)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the drop; it contains exactly the drops that a two-sided test does not reject."""
        one_sided = (1 + confidence) / 2
        return -Paired(self.won, self.lost, self.images).upper(one_sided), self.upper(one_sided)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the drop is expected to be above the margin on `times` as many images."""
        return self.on(times * self.images).score(margin)

    def on(self, images: float) -> Paired:
        """The same differences, as expected on another number of images."""
        return Paired(self.lost * images / self.images, self.won * images / self.images, images)


def deviations(distance: float, spread: float) -> float:
    """A distance in standard deviations.

    >>> deviations(-1.0, 0.5), deviations(-1.0, 0.0), deviations(0.0, 0.0)
    (-2.0, -inf, 0.0)
    """
    if spread > 0:
        return distance / spread
    return math.copysign(math.inf, distance) if distance else 0.0


def falls_to(value: float, falling: Callable[[float], float], low: float, high: float) -> float:
    """Where a falling function has that value, to the last digit that counts."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return high


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Return the 95% interval of an accuracy by Wilson's score.

    >>> [round(bound, 3) for bound in wilson_interval(90, 100)]
    [0.826, 0.945]
    """
    z = 1.959964
    share = hits / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def tail(hits: int, count: int, share: float) -> float:
    """Return the exact chance of at least this many hits among `count` images if the true accuracy is `share`.

    >>> round(tail(9, 10, 0.5), 6) == round(11 / 1024, 6)
    True
    """
    return 1.0 if hits <= 0 else float(special.bdtrc(hits - 1, count, min(max(share, 0.0), 1.0)))


def lower_accuracy(hits: int, count: int, confidence: float = 0.95) -> float:
    """Return the accuracy that the true one exceeds with this one-sided confidence (Clopper and Pearson).

    >>> round(lower_accuracy(100, 100), 4)
    0.9705
    """
    return 0.0 if hits <= 0 else float(special.betaincinv(hits, count - hits + 1, 1 - confidence))
