"""How far the loss in the accuracy of the worst class can be trusted: a test for each class, all of which must pass.

The worst class of a few images is partly the unlucky one, so that the difference of the two worst is biased, and no
bootstrap tells. What is tested here does not ask which one it is. The worst class has lost more than the margin only
if some class is now below every class before by more than that: each class has to show that it is not the one, by
its own loss or by being clearly better than another was (an intersection-union test; Berger, Technometrics 24, 1982).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from basisprune.tasks import Predictions
from basisprune.training.intervals import Paired, deviations, falls_to, lower_accuracy, tail, wilson_interval

_OWN = 0.9  # the part of the error that a class's own loss may take; the rest is for comparisons with other classes
_NORMAL, _LEAST = NormalDist(), 1e-12
Numbers = npt.NDArray[np.float64]


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

    def _against_others(self, margin: float) -> Numbers:
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
        one_sided = (1 + confidence) / 2
        swapped = tuple(Paired(pair.won, pair.lost, pair.images) for pair in self.pairs)
        return -WorstLoss(swapped, self.after, self.before).upper(one_sided), self.upper(one_sided)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many images."""
        pairs = tuple(pair.on(times * pair.images) for pair in self.pairs)
        chance = WorstLoss(pairs, self.before, self.after).p_value(margin)
        return _NORMAL.inv_cdf(min(max(chance, _LEAST), 1 - _LEAST))


@dataclass(frozen=True)
class WorstHits:
    """The accuracy of the worst class on its own, as a loss below zero: images that are right, of all, by class."""

    classes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, after: Predictions) -> WorstHits:
        """The counts of a network."""
        each = [after.hits[after.labels == label] for label in np.unique(after.labels)]
        return cls(tuple((int(hits.sum()), len(hits)) for hits in each))

    @property
    def drop(self) -> float:
        """The accuracy of the worst class, negated."""
        hits, images = self._worst
        return -hits / images

    def p_value(self, margin: float) -> float:
        """The chance, at most, of so many hits if the true accuracy of some class is -`margin`; exact."""
        return max(tail(hits, images, -margin) for hits, images in self.classes)

    def upper(self, confidence: float) -> float:
        """The negated accuracy that no class falls below, with this confidence for each."""
        return -min(lower_accuracy(hits, images, confidence) for hits, images in self.classes)

    def interval(self, _confidence: float = 0.95) -> tuple[float, float]:
        """The 95 % interval of the class that is worst here, negated; not corrected for that choice."""
        low, high = wilson_interval(*self._worst)
        return -high, -low

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the worst class is expected to be below -`margin` on `times` as many images."""
        hits, images = self._worst
        return deviations(-hits / images - margin, math.sqrt(max(-margin * (1 + margin), 0.0) / (times * images)))

    @property
    def _worst(self) -> tuple[int, int]:
        return min(self.classes, key=lambda each: each[0] / each[1])
