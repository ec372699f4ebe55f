"""How far the loss in any metric can be trusted: a bootstrap of the images that both networks saw.

The images are drawn as they would be if the true loss were the one that is tested: their weights are tilted until that
is their loss (Efron, Canadian Journal of Statistics 9, 1981; Davison and Hinkley, Bootstrap Methods and their
Application, 1997, section 4.4). So the spread is the one under the hypothesis, as in a score test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import NormalDist

import numpy as np

from basisprune.tasks import Predictions
from basisprune.training.intervals import deviations
from basisprune.training.metrics import Classes, ClassMetric, Counts, gradient_of, of_counts, value_of

DRAWS, CALLS = 2000, 500  # for the named metrics, and for a function, which is called twice for each
_BLOCK = 100  # draws at a time, which bounds the memory
_PSEUDO = 0.5
_FINE = 20  # images for each one that there is, where a function is asked about weights
_HALVINGS, _STEPS = 30, 6
_STEEPEST = 60.0  # the most that weights are tilted by, as a logarithm
_LEAST = 1e-4
_NORMAL = NormalDist()


@dataclass(frozen=True, eq=False)
class Resampled:
    """A loss in a metric, on images that might have been others of the same kind; see `resample`.

    `cells` (label, answer before, answer after) are sorted, and `weights` say how often each is there. With a `sign` of
    -1 it is a gain.
    """

    metric: ClassMetric
    drop: float
    cells: Classes
    weights: Counts
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
        one_sided = (1 + confidence) / 2
        gain = replace(self, drop=-self.drop, sign=-self.sign)
        return -gain.upper(one_sided), self.upper(one_sided)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many images."""
        return deviations(self.drop - margin, self.spread / math.sqrt(times))

    @cached_property
    def spread(self) -> float:
        """The standard deviation of the loss."""
        return float(self._losses(self._shares(self.weights)).std())

    @cached_property
    def _sizes(self) -> Counts:
        """For each cell, the number of images of its class."""
        labels = self.cells[:, 0]
        sizes: Counts = np.rint(np.bincount(labels, self.weights) - 2 * _PSEUDO)[labels]
        return sizes

    def _shares(self, weights: Counts) -> Counts:
        """The weights, which are 1 in total for each class."""
        labels = self.cells[:, 0]
        shares: Counts = weights / np.bincount(labels, weights)[labels]
        return shares

    @cached_property
    def _pull(self) -> Counts:
        """How much the loss grows with an image of each cell."""
        counts = self._shares(self.weights) * self._sizes
        labels, before, after = self.cells.T
        lost = -gradient_of(self.metric, labels, after, counts)
        if self.is_paired:
            lost = lost + gradient_of(self.metric, labels, before, counts)
        return self.sign * lost

    def _at(self, margin: float) -> Counts:
        """The shares, tilted until their loss is the margin, or as far as that goes."""
        high = _STEEPEST / max(float(np.ptp(self._pull)), 1e-12)
        low = -high
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if self._loss_of(self._tilted(middle)) < margin else (low, middle)
        return self._tilted(high)

    def _tilted(self, strength: float) -> Counts:
        labels, exponents = self.cells[:, 0], strength * self._pull
        highest = np.full(int(labels.max()) + 1, -np.inf)
        np.maximum.at(highest, labels, exponents)
        return self._shares(self.weights * np.exp(exponents - highest[labels]))

    def _loss_of(self, shares: Counts) -> float:
        """The loss on images of these shares."""
        counts = (shares * self._sizes)[None]
        return float(self._measured(counts if isinstance(self.metric, str) else np.rint(_FINE * counts))[0])

    def _losses(self, shares: Counts) -> Counts:
        """The losses on images that are drawn by these shares, of each class as many as there are."""
        random, labels = np.random.default_rng(0), self.cells[:, 0]
        classes = np.split(np.arange(len(labels)), np.flatnonzero(np.diff(labels)) + 1)
        found = []
        for _ in range((DRAWS if isinstance(self.metric, str) else CALLS) // _BLOCK):
            counts = np.zeros((_BLOCK, len(labels)))
            for mine in classes:
                counts[:, mine] = random.multinomial(int(self._sizes[mine[0]]), shares[mine], size=_BLOCK)
            found.append(self._measured(counts))
        return np.concatenate(found)

    def _measured(self, counts: Counts) -> Counts:
        """The loss for each row, which says how many images of each cell there are."""
        labels, before, after = self.cells.T
        lost = -values_of(self.metric, labels, after, counts)
        if self.is_paired:
            lost = lost + values_of(self.metric, labels, before, counts)
        return self.sign * lost


def resample(metric: ClassMetric, before: Predictions | None, after: Predictions) -> Resampled:
    """The loss in the metric from one network to the other; without `before`, the metric itself, negated.

    Images are drawn within each class, both networks' answers together. To each class, half an image that only the
    first gets right is added, and half a one that only the second does, as to Agresti and Min's interval: few images
    without a change do not prove that there is none.
    """
    drop = -value_of(metric, after) + (0.0 if before is None else value_of(metric, before))
    return Resampled(metric, drop, *_cells(before, after), is_paired=before is not None)


def _cells(before: Predictions | None, after: Predictions) -> tuple[Classes, Counts]:
    """All (label, answer before, answer after) that there are, with how often; pseudo-images included."""
    first = after.classes if before is None else before.classes
    triples = np.stack([after.labels, first, after.classes], axis=1)
    added = []
    for label in np.unique(after.labels):
        other = mistaken_for(int(label), after.labels, (first, after.classes))
        added += [(label, label, other), (label, other, label)]
    cells, places = np.unique(np.concatenate([triples, np.array(added, dtype=np.int64)]), axis=0, return_inverse=True)
    weights = np.concatenate([np.ones(len(triples)), np.full(len(added), _PSEUDO)])
    counts: Counts = np.bincount(places.ravel(), weights, minlength=len(cells)).astype(np.float64)
    return cells.astype(np.int64), counts


def mistaken_for(label: int, labels: Classes, parts: tuple[Classes, Classes]) -> int:
    """The class that images of this one are most often taken for in the parts; any other where they never are."""
    answers = np.concatenate([part[labels == label] for part in parts])
    wrong = answers[answers != label]
    if len(wrong):
        return int(np.bincount(wrong).argmax())
    return next((int(other) for other in np.unique(labels) if other != label), label + 1)


def values_of(metric: ClassMetric, labels: Classes, answers: Classes, counts: Counts) -> Counts:
    """The metric for each row of counts."""
    if isinstance(metric, str):
        return of_counts(metric, labels, answers, counts)
    found = []
    for drawn in counts.astype(np.int64):
        said = np.repeat(answers, drawn)
        found.append(value_of(metric, Predictions(said, np.ones(len(said)), np.repeat(labels, drawn))))
    return np.array(found)
