"""Tests and intervals of the loss in any metric of classes, by drawing the images, or their units, again.

Images that are independent are drawn as they would be if the true loss were the one that is tested: their weights are
tilted until that is their loss (Efron, Canadian Journal of Statistics 9, 1981; Davison and Hinkley, Bootstrap Methods
and their Application, 1997, section 4.4). So the spread is the one under the hypothesis, as in a score test.

Of images that belong together, such as copies or those of one patient or scene, what is drawn independently is a unit.
So each enters the test as one, with the mean of its images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from basisprune.budget.means import BoundedMean
from basisprune.budget.metrics import ClassMetric, gradient_of, of_counts, value_of
from basisprune.budget.proportions import deviations, two_sided
from basisprune.tasks import Predictions
from basisprune.tasks.classification import Classes
from basisprune.tasks.outcomes import Rows, Units, sums, weights_of

_DRAWS, _CALLS = 2000, 500  # for the named metrics, and for a function, which is called twice for each
_BLOCK = 100  # draws at a time, which bounds the memory
_PSEUDO = 0.5
_FINE = 20  # images for each one that there is, where a function is asked about weights
_HALVINGS, _STEPS = 30, 6
_STEEPEST = 60.0  # the most that weights are tilted by, as a logarithm
_LEAST = 1e-4
_NORMAL = NormalDist()


def resample(metric: ClassMetric, before: Predictions | None, after: Predictions) -> Resampled:
    """The loss in the metric from one network to the other; without `before`, the metric itself, negated.

    Images are drawn within each class, both networks' answers together. To each class, half an image that only the
    first gets right is added, and half a one that only the second does, as to Agresti and Min's interval: few images
    without a change do not prove that there is none.
    """
    return Resampled(metric, drop_of(metric, before, after), *_cells(before, after), is_paired=before is not None)


def clustered(
    metric: ClassMetric, before: Predictions | None, after: Predictions
) -> BoundedMean | WorstMean | Reweighted:
    """The loss in the metric from one network to the other; without `before`, the metric itself, negated."""
    drop = drop_of(metric, before, after)
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


def _of_class(label: int, labels: Classes, lost: Rows, units: Units, ends: tuple[float, float]) -> BoundedMean:
    """The loss of a class, of which a unit may have any part."""
    mine, weights = labels == label, weights_of(units)[labels == label]
    return BoundedMean(sums(lost[mine] * weights, units[mine]), *ends, sums(weights, units[mine]))


@dataclass(frozen=True, eq=False)
class Resampled:
    """A loss in a metric, on images that might have been others of the same kind; see `resample`.

    `cells` (label, answer before, answer after) are sorted, and `weights` say how often each is there. With a `sign` of
    -1 it is a gain.
    """

    metric: ClassMetric
    drop: float
    cells: Classes
    weights: Rows
    is_paired: bool
    sign: int = 1

    def p_value(self, margin: float) -> float:
        """The chance of a loss as small as this if the true one is `margin`."""
        draws = self._losses(self._at(margin))
        return (1 + int((draws <= self.drop + 1e-12).sum())) / (1 + len(draws))

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""
        wanted = _NORMAL.inv_cdf(1 - confidence)
        margin = self.drop - wanted * self.spread
        for _ in range(_STEPS):  # in standard deviations, the p-value is close to linear in the margin
            found = _NORMAL.inv_cdf(min(max(self.p_value(margin), _LEAST), 1 - _LEAST))
            step = (found - wanted) * self.spread
            margin = max(margin + step, self.drop)
            if abs(step) < 0.02 * self.spread:
                break
        return margin

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the loss."""
        return two_sided(self, replace(self, drop=-self.drop, sign=-self.sign), confidence)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many images."""
        return deviations(self.drop - margin, self.spread / math.sqrt(times))

    @cached_property
    def spread(self) -> float:
        """The standard deviation of the loss."""
        return float(self._losses(self._shares(self.weights)).std())

    @cached_property
    def _sizes(self) -> Rows:
        """For each cell, the number of images of its class."""
        labels = self.cells[:, 0]
        sizes: Rows = np.rint(np.bincount(labels, self.weights) - 2 * _PSEUDO)[labels]
        return sizes

    def _shares(self, weights: Rows) -> Rows:
        """The weights, which are 1 in total for each class."""
        labels = self.cells[:, 0]
        shares: Rows = weights / np.bincount(labels, weights)[labels]
        return shares

    @cached_property
    def _pull(self) -> Rows:
        """How much the loss grows with an image of each cell."""
        counts = self._shares(self.weights) * self._sizes
        labels, before, after = self.cells.T
        lost = -gradient_of(self.metric, labels, after, counts)
        if self.is_paired:
            lost = lost + gradient_of(self.metric, labels, before, counts)
        return self.sign * lost

    def _at(self, margin: float) -> Rows:
        """The shares, tilted until their loss is the margin, or as far as that goes."""
        high = _STEEPEST / max(float(np.ptp(self._pull)), 1e-12)
        low = -high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._loss_of(self._tilted(middle)) < margin else (low, middle)
        return self._tilted(high)

    def _tilted(self, strength: float) -> Rows:
        labels, exponents = self.cells[:, 0], strength * self._pull
        highest = np.full(int(labels.max()) + 1, -np.inf)
        np.maximum.at(highest, labels, exponents)
        return self._shares(self.weights * np.exp(exponents - highest[labels]))

    def _loss_of(self, shares: Rows) -> float:
        """The loss on images of these shares."""
        counts = (shares * self._sizes)[None]
        return float(self._measured(counts if isinstance(self.metric, str) else np.rint(_FINE * counts))[0])

    def _losses(self, shares: Rows) -> Rows:
        """The losses on images that are drawn by these shares, of each class as many as there are."""
        random, labels = np.random.default_rng(0), self.cells[:, 0]
        classes = np.split(np.arange(len(labels)), np.flatnonzero(np.diff(labels)) + 1)
        found = []
        for _ in range((_DRAWS if isinstance(self.metric, str) else _CALLS) // _BLOCK):
            counts = np.zeros((_BLOCK, len(labels)))
            for mine in classes:
                counts[:, mine] = random.multinomial(int(self._sizes[mine[0]]), shares[mine], size=_BLOCK)
            found.append(self._measured(counts))
        return np.concatenate(found)

    def _measured(self, counts: Rows) -> Rows:
        """Return the loss for each row, which says how many images of each cell there are."""
        return self.sign * lost_in(self.metric, self.cells, counts, is_paired=self.is_paired)


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
    def _losses(self) -> Rows:
        return self._drawn(won=False)

    def _drawn(self, *, won: bool) -> Rows:
        """The losses, sorted, with units added that lose or, if `won`, gain all."""
        cells, places, weights = self._cells(won=won)
        random, (_, units) = np.random.default_rng(0), np.unique(self.units, return_inverse=True)
        extra = len(places) - len(units)
        members = np.append(units.ravel(), units.max() + 1 + np.arange(extra))
        found = []
        for _ in range((_DRAWS if isinstance(self.metric, str) else _CALLS) // _BLOCK):
            drawn = random.exponential(size=(_BLOCK, int(members.max()) + 1))[:, members] * weights
            counts = np.stack([np.bincount(places, each, minlength=len(cells)) for each in drawn]).astype(np.float64)
            found.append(self._measured(cells, counts))
        return np.sort(np.concatenate(found))

    def _cells(self, *, won: bool) -> tuple[Classes, Classes, Rows]:
        """The different (label, first answer, answer), which of them each image is, and its weight in its unit."""
        triples = np.stack([self.labels, self.first, self.answers], axis=1)
        added = []
        for label in np.unique(self.labels):
            other = _mistaken_for(int(label), self.labels, (self.first, self.answers))
            right, wrong = (other, label) if won else (label, other)
            added.append((label, right if self.is_paired else wrong, wrong))
        cells, places = np.unique(np.concatenate([triples, np.array(added)]), axis=0, return_inverse=True)
        return cells.astype(np.int64), places.ravel(), np.append(weights_of(self.units), np.ones(len(added)))

    def _measured(self, cells: Classes, counts: Rows) -> Rows:
        if not isinstance(self.metric, str):
            counts = np.rint(_FINE * counts)
        return lost_in(self.metric, cells, counts, is_paired=self.is_paired)


def drop_of(metric: ClassMetric, before: Predictions | None, after: Predictions) -> float:
    """Return the loss in the metric; without `before`, the metric itself, negated."""
    return -value_of(metric, after) + (0.0 if before is None else value_of(metric, before))


def lost_in(metric: ClassMetric, cells: Classes, counts: Rows, *, is_paired: bool) -> Rows:
    """Return the loss for each row of counts of the cells (label, answer before, answer after)."""
    labels, before, after = cells.T
    lost = -values_of(metric, labels, after, counts)
    return lost + values_of(metric, labels, before, counts) if is_paired else lost


def values_of(metric: ClassMetric, labels: Classes, answers: Classes, counts: Rows) -> Rows:
    """The metric for each row of counts."""
    if isinstance(metric, str):
        return of_counts(metric, labels, answers, counts)
    found = []
    for drawn in counts.astype(np.int64):
        said = np.repeat(answers, drawn)
        found.append(value_of(metric, Predictions(said, np.ones(len(said)), np.repeat(labels, drawn))))
    return np.array(found)


def _cells(before: Predictions | None, after: Predictions) -> tuple[Classes, Rows]:
    """All (label, answer before, answer after) that there are, with how often; pseudo-images included."""
    first = after.classes if before is None else before.classes
    triples = np.stack([after.labels, first, after.classes], axis=1)
    added = []
    for label in np.unique(after.labels):
        other = _mistaken_for(int(label), after.labels, (first, after.classes))
        added += [(label, label, other), (label, other, label)]
    cells, places = np.unique(np.concatenate([triples, np.array(added, dtype=np.int64)]), axis=0, return_inverse=True)
    weights = np.concatenate([np.ones(len(triples)), np.full(len(added), _PSEUDO)])
    counts: Rows = np.bincount(places.ravel(), weights, minlength=len(cells)).astype(np.float64)
    return cells.astype(np.int64), counts


def _mistaken_for(label: int, labels: Classes, parts: tuple[Classes, Classes]) -> int:
    """The class that images of this one are most often taken for in the parts; any other where they never are."""
    answers = np.concatenate([part[labels == label] for part in parts])
    wrong = answers[answers != label]
    if len(wrong):
        return int(np.bincount(wrong).argmax())
    return next((int(other) for other in np.unique(labels) if other != label), label + 1)
