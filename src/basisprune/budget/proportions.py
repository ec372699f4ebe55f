"""Tests and intervals of an accuracy, of the accuracy of the worst class, and of what is lost of them.

A loss of accuracy on the same images is tested by Tango's score. The worst class of a few images is partly the unlucky
one, so that the difference of the two worst is biased, and no bootstrap tells. What is tested does not ask which one it
is: the worst class has lost more than the margin only if some class is now below every class before by more than that.
Each class has to show that it is not the one, by its own loss or by being clearly better than another was (an
intersection-union test; Berger, Technometrics 24, 1982).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np
from scipy import special, stats

from basisprune.tasks import Predictions
from basisprune.tasks.classification import Bools
from basisprune.tasks.outcomes import Rows

_HALVINGS = 60
_OWN = 0.9  # the part of the error that a class's own loss may take; the rest is for comparisons with other classes
_NORMAL, _LEAST = NormalDist(), 1e-12


class Bounded(Protocol):
    """A loss with an upper bound."""

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""


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


def two_sided(loss: Bounded, gain: Bounded, confidence: float) -> tuple[float, float]:
    """Return the two-sided interval of a loss, from it and its negative."""
    one_sided = (1 + confidence) / 2
    return -gain.upper(one_sided), loss.upper(one_sided)


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Return the 95% interval of an accuracy by Wilson's score.

    >>> [round(bound, 3) for bound in wilson_interval(90, 100)]
    [0.826, 0.945]
    """
    low, high = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    return float(low), float(high)


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
        return _NORMAL.cdf(self.score(margin))

    def upper(self, confidence: float = 0.95) -> float:
        """The drop that the true one does not exceed, with this one-sided confidence.

        >>> round(Paired(lost=0, won=0, images=270).upper(), 4)
        0.0099
        """
        wanted = -_NORMAL.inv_cdf(confidence)
        return falls_to(wanted, self.score, self.drop, 1.0)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the drop; it contains exactly the drops that a two-sided test does not reject."""
        return two_sided(self, self.reversed, confidence)

    @property
    def reversed(self) -> Paired:
        """The difference the other way round."""
        return Paired(self.won, self.lost, self.images)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the drop is expected to be above the margin on `times` as many images."""
        return self.on(times * self.images).score(margin)

    def on(self, images: float) -> Paired:
        """The same differences, as expected on another number of images."""
        return Paired(self.lost * images / self.images, self.won * images / self.images, images)


@dataclass(frozen=True)
class WorstLoss:
    """The loss of the accuracy of the worst class; `pairs` are the images that each class lost and won.

    `before` and `after` are the accuracies of the classes, in the same order.
    """

    pairs: tuple[Paired, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    @classmethod
    def of(cls, before: Predictions, after: Predictions) -> WorstLoss:
        """The loss from one network to the other."""
        one, two = before.hits, after.hits
        classes = [after.labels == label for label in np.unique(after.labels)]
        return cls(
            tuple(Paired.of(one[mine], two[mine]) for mine in classes),
            tuple(float(one[mine].mean()) for mine in classes),
            tuple(float(two[mine].mean()) for mine in classes),
        )

    @property
    def drop(self) -> float:
        """The accuracy that the worst class lost; it may be another class now."""
        return min(self.before) - min(self.after)

    def p_value(self, margin: float) -> float:
        """The chance, at most, of a loss as small as this if the true one is `margin`."""
        own = np.array([pair.p_value(margin) if -1 < margin < 1 else float(margin <= -1) for pair in self.pairs])
        return float(np.minimum(np.minimum(own / _OWN, self._against_others(margin)), 1.0).max())

    def _against_others(self, margin: float) -> Rows:
        """For each class, whether it is better now than another was, less the margin: the p-value, corrected."""
        if len(self.pairs) == 1:
            return np.ones(1)
        images = np.array([pair.images for pair in self.pairs])
        # One image right and one wrong are added to each, as in Agresti and Caffo's interval.
        was, now = ((images * np.array(share) + 1) / (images + 2) for share in (self.before, self.after))
        spread = np.add.outer(now * (1 - now) / (images + 2), was * (1 - was) / (images + 2))
        scores = (np.subtract.outer(-now, -was) - margin) / np.sqrt(spread)
        np.fill_diagonal(scores, np.inf)  # which are not independent
        factor = (len(images) - 1) / (1 - _OWN)
        return np.array([factor * _NORMAL.cdf(float(score)) for score in scores.min(1)])

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""
        return falls_to(1 - confidence, self.p_value, -1.0, 1.0)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the loss; it is wider than need be."""
        gain = WorstLoss(tuple(pair.reversed for pair in self.pairs), self.after, self.before)
        return two_sided(self, gain, confidence)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many images."""
        pairs = tuple(pair.on(times * pair.images) for pair in self.pairs)
        chance = WorstLoss(pairs, self.before, self.after).p_value(margin)
        return _NORMAL.inv_cdf(min(max(chance, _LEAST), 1 - _LEAST))


@dataclass(frozen=True)
class Hits:
    """An accuracy on its own, as a loss below zero: for each class the images that are right, and all of them.

    It is that of the worst class, or of all images as one class.
    """

    classes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, after: Predictions, *, by_class: bool) -> Hits:
        """The counts of a network, for each class or for all images together."""
        each = [after.hits[after.labels == label] for label in np.unique(after.labels)] if by_class else [after.hits]
        return cls(tuple((int(hits.sum()), len(hits)) for hits in each))

    @property
    def drop(self) -> float:
        """The accuracy, negated."""
        hits, images = self._worst
        return -hits / images

    def p_value(self, margin: float) -> float:
        """The chance, at most, of so many hits if the true accuracy of some class is -`margin`; exact."""
        return max(tail(hits, images, -margin) for hits, images in self.classes)

    def upper(self, confidence: float) -> float:
        """The negated accuracy that no class falls below, with this confidence for each."""
        return -min(lower_accuracy(hits, images, confidence) for hits, images in self.classes)

    def interval(self, _confidence: float = 0.95) -> tuple[float, float]:
        """The 95% interval of the class that is worst here, negated; not corrected for that choice."""
        low, high = wilson_interval(*self._worst)
        return -high, -low

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the accuracy is expected to be below -`margin` on `times` as many images."""
        hits, images = self._worst
        return deviations(-hits / images - margin, math.sqrt(max(-margin * (1 + margin), 0.0) / (times * images)))

    @property
    def _worst(self) -> tuple[int, int]:
        return min(self.classes, key=lambda each: each[0] / each[1])
