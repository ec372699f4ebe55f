"""How far a loss can be trusted on images of which some belong together: copies, or those of one patient or scene.

What is drawn independently is a unit of such images. So each enters the test as one, with the mean of its images.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from basisprune.tasks import Predictions
from basisprune.tasks.outcomes import Rows as Numbers
from basisprune.tasks.outcomes import Units, sums, weights_of
from basisprune.training.bootstrap import CALLS, DRAWS, mistaken_for, values_of
from basisprune.training.bounded_mean import BoundedMean
from basisprune.training.intervals import deviations
from basisprune.training.metrics import Classes, ClassMetric, value_of

_BLOCK = 100  # draws at a time, which bounds the memory
_FINE = 20  # images for each one that there is, where a function is asked about weights


def clustered(
    metric: ClassMetric, before: Predictions | None, after: Predictions
) -> BoundedMean | WorstMean | Reweighted:
    """The loss in the metric from one network to the other; without `before`, the metric itself, negated."""
    drop = -value_of(metric, after) + (0.0 if before is None else value_of(metric, before))
    units = after.units
    assert units is not None
    lost = (0.0 if before is None else before.hits) - after.hits.astype(np.float64)
    ends = (0.0, -1.0) if before is None else (1.0, -1.0)
    if metric == "accuracy":
        return BoundedMean(sums(lost * weights_of(units), units), *ends)
    if metric == "worst-class":
        return WorstMean(
            drop, tuple(_of_class(label, after.labels, lost, units, ends) for label in np.unique(after.labels))
        )
    first = after.classes if before is None else before.classes
    return Reweighted(metric, drop, after.labels, first, after.classes, units, is_paired=before is not None)


def _of_class(label: int, labels: Classes, lost: Numbers, units: Units, ends: tuple[float, float]) -> BoundedMean:
    """The loss of a class, of which a unit may have any part."""
    mine, weights = labels == label, weights_of(units)[labels == label]
    return BoundedMean(sums(lost[mine] * weights, units[mine]), *ends, sums(weights, units[mine]))


@dataclass(frozen=True)
class WorstMean:
    """The loss of the accuracy of the worst class: each has to show that it did not lose as much.

    If the worst class lost more than the margin, then the one that is worst now did, by itself.
    """

    drop: float
    classes: tuple[BoundedMean, ...]

    def p_value(self, margin: float) -> float:
        """The chance, at most, of a loss as small as this if the true one is `margin`."""
        return max(each.p_value(margin) for each in self.classes)

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""
        return max(each.upper(confidence) for each in self.classes)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the loss; it is wider than need be."""
        ends = [each.interval(confidence) for each in self.classes]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many units."""
        return max(each.expected_score(margin, times) for each in self.classes)


@dataclass(frozen=True, eq=False)
class Reweighted:
    """A loss in any metric of classes, of units that are weighted at random, as in `BoundedMean`.

    To each class, a unit is added that only the first network gets right, weighted likewise. `first` and `answers` are
    the classes that the two networks name.
    """

    metric: ClassMetric
    drop: float
    labels: Classes
    first: Classes
    answers: Classes
    units: Units
    is_paired: bool

    def p_value(self, margin: float) -> float:
        """The chance of a loss as small as this if the true one is `margin`."""
        return (1 + int((self._losses >= margin - 1e-12).sum())) / (1 + len(self._losses))

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""
        return float(np.quantile(self._losses, confidence, method="higher"))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the loss."""
        share = (1 - confidence) / 2
        return float(np.quantile(self._drawn(won=True), share, method="lower")), self.upper(1 - share)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many units."""
        mean = self.drop + (float(self._losses.mean()) - self.drop) / times
        return deviations(mean - margin, float(self._losses.std()) / times**0.5)

    @cached_property
    def _losses(self) -> Numbers:
        return self._drawn(won=False)

    def _drawn(self, *, won: bool) -> Numbers:
        """The losses, sorted, with units added that lose or, if `won`, gain all."""
        cells, places, weights = self._cells(won=won)
        random, (_, units) = np.random.default_rng(0), np.unique(self.units, return_inverse=True)
        extra = len(places) - len(units)
        members = np.append(units.ravel(), units.max() + 1 + np.arange(extra))
        found = []
        for _ in range((DRAWS if isinstance(self.metric, str) else CALLS) // _BLOCK):
            drawn = random.exponential(size=(_BLOCK, int(members.max()) + 1))[:, members] * weights
            counts = np.stack([np.bincount(places, each, minlength=len(cells)) for each in drawn]).astype(np.float64)
            found.append(self._measured(cells, counts))
        return np.sort(np.concatenate(found))

    def _cells(self, *, won: bool) -> tuple[Classes, npt.NDArray[np.int64], Numbers]:
        """The different (label, first answer, answer), which of them each image is, and its weight in its unit."""
        triples = np.stack([self.labels, self.first, self.answers], axis=1)
        added = []
        for label in np.unique(self.labels):
            other = mistaken_for(int(label), self.labels, (self.first, self.answers))
            right, wrong = (other, label) if won else (label, other)
            added.append((label, right if self.is_paired else wrong, wrong))
        cells, places = np.unique(np.concatenate([triples, np.array(added)]), axis=0, return_inverse=True)
        return cells.astype(np.int64), places.ravel(), np.append(weights_of(self.units), np.ones(len(added)))

    def _measured(self, cells: Classes, counts: Numbers) -> Numbers:
        labels, before, after = cells.T
        if not isinstance(self.metric, str):
            counts = np.rint(_FINE * counts)
        lost = -values_of(self.metric, labels, after, counts)
        return lost + values_of(self.metric, labels, before, counts) if self.is_paired else lost
