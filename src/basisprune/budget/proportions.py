"""Tests and intervals of an accuracy, of the accuracy of the worst class, and of what is lost of them.

A loss of accuracy on the same images is tested by Tango's score. The worst class of a few images is partly the unlucky
one, so that the difference of the two worst is biased, and no bootstrap tells. What is tested does not ask which one it
is: the worst class has lost more than the margin only if some class is now below every class before by more than that.
Each class has to show that it is not the one, by its own loss or by being clearly better than another was (an
intersection-union test; Berger, Technometrics 24, 1982).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special, stats

from basisprune.budget.evidence import NORMAL, Evidence, deviations, falls_to
from basisprune.tasks import Predictions
from basisprune.tasks.classification import Bools
from basisprune.tasks.outcomes import Rows

_OWN = 0.9  # the part of the error that a class's own loss may take; the rest is for comparisons with other classes
_LEAST = 1e-12


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """Return the 95% interval of an accuracy by Wilson's score.

    >>> [round(bound, 3) for bound in wilson_interval(90, 100)]
    [0.826, 0.945]
    """
    low, high = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    return float(low), float(high)


@dataclass(frozen=True)
class Paired(Evidence):
    """How two networks differ on the same images: how many the second loses, and how many it wins.

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
        """Count from which images each network classifies correctly."""
        return cls(int((before & ~after).sum()), int((~before & after).sum()), len(before))

    @cached_property
    def drop(self) -> float:
        return (self.lost - self.won) / self.images

    @property
    def reversed(self) -> Paired:
        return Paired(self.won, self.lost, self.images)

    def score(self, margin: float) -> float:
        """Return how many standard deviations the drop is above `margin`, between -1 and 1, if that is the true one."""
        distance = self.lost - self.won - self.images * margin
        variance = self.images * (2 * self._won_if(margin) + margin * (1 - margin))
        return deviations(distance, math.sqrt(max(variance, 0.0)))

    def _won_if(self, margin: float) -> float:
        """Return the most likely share of images won if the true drop is `margin`: Tango's equations 25 and 26."""
        linear = (2 * self.images - self.lost + self.won) * margin - self.lost - self.won
        constant = self.won * margin * (1 - margin)
        root = (math.sqrt(max(linear * linear + 8 * self.images * constant, 0.0)) - linear) / (4 * self.images)
        return max(root, -margin, 0.0)

    def p_value(self, margin: float) -> float:
        return NORMAL.cdf(self.score(margin))

    def upper(self, confidence: float = 0.95) -> float:
        """Return the drop that the true one does not exceed, with this one-sided confidence.

        >>> round(Paired(lost=0, won=0, images=270).upper(), 4)
        0.0099
        """
        return falls_to(-NORMAL.inv_cdf(confidence), self.score, self.drop, 1.0)

    def expected_score(self, margin: float, times: float) -> float:
        return self.on(times * self.images).score(margin)

    def on(self, images: float) -> Paired:
        """Return the same differences, as expected on another number of images."""
        return Paired(self.lost * images / self.images, self.won * images / self.images, images)


@dataclass(frozen=True)
class WorstLoss(Evidence):
    """The loss of the accuracy of the worst class; `pairs` are the images that each class lost and won.

    `before` and `after` are the accuracies of the classes, in the same order. The interval is wider than need be.
    """

    pairs: tuple[Paired, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]

    @classmethod
    def of(cls, before: Predictions, after: Predictions) -> WorstLoss:
        """Compare two networks on the same images."""
        classes = [after.labels == label for label in np.unique(after.labels)]
        pairs = (Paired.of(before.hits[mine], after.hits[mine]) for mine in classes)
        shares = (tuple(float(each.hits[mine].mean()) for mine in classes) for each in (before, after))
        return cls(tuple(pairs), *shares)

    @cached_property
    def drop(self) -> float:
        return min(self.before) - min(self.after)

    @property
    def reversed(self) -> WorstLoss:
        return WorstLoss(tuple(pair.reversed for pair in self.pairs), self.after, self.before)

    def p_value(self, margin: float) -> float:
        own = np.array([pair.p_value(margin) if -1 < margin < 1 else float(margin <= -1) for pair in self.pairs])
        return float(np.minimum(np.minimum(own / _OWN, self._against_others(margin)), 1.0).max())

    def _against_others(self, margin: float) -> Rows:
        """For each class, test whether it is better now than another was, less the margin; p-values, corrected."""
        if len(self.pairs) == 1:
            return np.ones(1)
        images = np.array([pair.images for pair in self.pairs])
        # One image right and one wrong are added to each, as in Agresti and Caffo's interval.
        was, now = ((images * np.array(share) + 1) / (images + 2) for share in (self.before, self.after))
        spread = np.add.outer(now * (1 - now) / (images + 2), was * (1 - was) / (images + 2))
        scores = (np.subtract.outer(-now, -was) - margin) / np.sqrt(spread)
        np.fill_diagonal(scores, np.inf)  # which are not independent
        found: Rows = (len(images) - 1) / (1 - _OWN) * special.ndtr(scores.min(1))
        return found

    def upper(self, confidence: float) -> float:
        return falls_to(1 - confidence, self.p_value, -1.0, 1.0)

    def expected_score(self, margin: float, times: float) -> float:
        pairs = tuple(pair.on(times * pair.images) for pair in self.pairs)
        chance = WorstLoss(pairs, self.before, self.after).p_value(margin)
        return NORMAL.inv_cdf(min(max(chance, _LEAST), 1 - _LEAST))


@dataclass(frozen=True)
class Hits(Evidence):
    """An accuracy on its own, as a loss below zero: for each class the images that are right, and all of them.

    It is that of the worst class, or of all images as one class. The tests are exact for each class.
    """

    classes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, after: Predictions, *, by_class: bool) -> Hits:
        """Count for each class or for all images together."""
        each = [after.hits[after.labels == label] for label in np.unique(after.labels)] if by_class else [after.hits]
        return cls(tuple((int(hits.sum()), len(hits)) for hits in each))

    @cached_property
    def drop(self) -> float:
        hits, images = self._worst
        return -hits / images

    @property
    def reversed(self) -> Hits:
        raise NotImplementedError("an accuracy has Wilson's interval")

    def p_value(self, margin: float) -> float:
        share = min(max(-margin, 0.0), 1.0)
        return float(max(special.bdtrc(hits - 1, images, share) if hits else 1.0 for hits, images in self.classes))

    def upper(self, confidence: float) -> float:
        """Return the negated accuracy that no class falls below, by Clopper and Pearson's bound for each.

        >>> round(Hits(((100, 100),)).upper(0.95), 4)
        -0.9705
        """
        bounds = (special.betaincinv(hits, n - hits + 1, 1 - confidence) if hits else 0.0 for hits, n in self.classes)
        return -float(min(bounds))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:  # noqa: ARG002
        """Return the 95% interval of the class that is worst here, negated; not corrected for that choice."""
        low, high = wilson_interval(*self._worst)
        return -high, -low

    def expected_score(self, margin: float, times: float) -> float:
        hits, images = self._worst
        return deviations(-hits / images - margin, math.sqrt(max(-margin * (1 + margin), 0.0) / (times * images)))

    @property
    def _worst(self) -> tuple[int, int]:
        return min(self.classes, key=lambda each: each[0] / each[1])
