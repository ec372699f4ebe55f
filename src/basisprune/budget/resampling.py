"""Tests and intervals of the loss in any metric of classes, by drawing the images, or their units, again.

Images that are independent are drawn as they would be if the true loss were the one that is tested: their weights are
tilted until that is their loss (Efron, Canadian Journal of Statistics 9, 1981; Davison and Hinkley, Bootstrap Methods
and their Application, 1997, section 4.4). So the spread is the one under the hypothesis, as in a score test.

Of images that belong together, such as copies or those of one patient or scene, what is drawn independently is a unit.
So each enters the test as one, with the mean of its images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from basisprune.budget.evidence import NORMAL, Evidence, deviations, falls_to
from basisprune.budget.means import BoundedMean, WorstMean
from basisprune.budget.metrics import ClassMetric, gradient_of, of_counts, value_of
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


@dataclass(frozen=True, eq=False)
class Answers:
    """The classes of images, and what two networks say; `before` are None where the loss is the metric, negated."""

    metric: ClassMetric
    before: Predictions | None
    after: Predictions

    @property
    def drop(self) -> float:
        """The loss in the metric."""
        return -value_of(self.metric, self.after) + (0.0 if self.before is None else value_of(self.metric, self.before))

    @property
    def draws(self) -> int:
        """How often images are drawn, in blocks."""
        return (_DRAWS if isinstance(self.metric, str) else _CALLS) // _BLOCK

    @cached_property
    def triples(self) -> Classes:
        """The label of each image, the answer before, and the answer after."""
        first = self.after if self.before is None else self.before
        return np.stack([self.after.labels, first.classes, self.after.classes], axis=1)

    def mistakes(self) -> Iterator[tuple[int, int]]:
        """Yield each class with the one that its images are most often taken for; any other where they never are."""
        classes = np.unique(self.triples[:, 0])
        for label in classes:
            answers = self.triples[self.triples[:, 0] == label, 1:]
            wrong = answers[answers != label]
            others = [int(np.bincount(wrong).argmax())] if len(wrong) else [*map(int, classes[classes != label])]
            yield int(label), (others or [int(label) + 1])[0]

    def cells(self, added: list[tuple[int, int, int]]) -> tuple[Classes, Classes]:
        """Return all triples that there are, sorted, and the place of each image and of each one that is added."""
        every = np.concatenate([self.triples, np.array(added, dtype=np.int64)])
        cells, places = np.unique(every, axis=0, return_inverse=True)
        return cells, places.ravel()

    def lost(self, cells: Classes, counts: Rows) -> Rows:
        """Return the loss for each row of counts of the cells."""
        labels, before, after = cells.T
        lost = -self._values(labels, after, counts)
        return lost if self.before is None else lost + self._values(labels, before, counts)

    def _values(self, labels: Classes, answers: Classes, counts: Rows) -> Rows:
        if isinstance(self.metric, str):
            return of_counts(self.metric, labels, answers, counts)
        found = []
        for drawn in counts.astype(np.int64):
            said = np.repeat(answers, drawn)
            found.append(value_of(self.metric, Predictions(said, np.ones(len(said)), np.repeat(labels, drawn))))
        return np.array(found)

    def in_whole_numbers(self, counts: Rows) -> Rows:
        """Return counts that a function can be called with."""
        return counts if isinstance(self.metric, str) else np.rint(_FINE * counts)


def resample(metric: ClassMetric, before: Predictions | None, after: Predictions) -> Resampled:
    """Draw the images again, within each class and both networks' answers together.

    To each class, half an image that only the first gets right is added, and half a one that only the second does, as
    to Agresti and Min's interval: few images without a change do not prove that there is none.
    """
    answers = Answers(metric, before, after)
    added = [each for label, other in answers.mistakes() for each in ((label, label, other), (label, other, label))]
    cells, places = answers.cells(added)
    weights = np.append(np.ones(len(answers.triples)), np.full(len(added), _PSEUDO))
    return Resampled(answers, answers.drop, cells, np.bincount(places, weights).astype(np.float64))


def clustered(
    metric: ClassMetric, before: Predictions | None, after: Predictions
) -> BoundedMean | WorstMean | Reweighted:
    """Compare the networks on images of which some belong together."""
    answers, units = Answers(metric, before, after), after.units
    assert units is not None
    if metric not in ("accuracy", "worst-class"):
        return Reweighted(answers, answers.drop, units)
    lost = (0.0 if before is None else before.hits) - after.hits.astype(np.float64)
    ends, weights = (0.0 if before is None else 1.0, -1.0), weights_of(units)
    if metric == "accuracy":
        return BoundedMean(sums(lost * weights, units), *ends)
    classes = []
    for label in np.unique(after.labels):  # of which a unit may have any part
        mine = after.labels == label
        loss, part = (sums(values[mine], units[mine]) for values in (lost * weights, weights))
        classes.append(BoundedMean(loss, *ends, part))
    return WorstMean(answers.drop, tuple(classes))


@dataclass(frozen=True, eq=False)
class Resampled(Evidence):
    """A loss in a metric, on images that might have been others of the same kind; see `resample`.

    `cells` (label, answer before, answer after) are sorted, and `weights` say how often each is there. With a `sign` of
    -1 it is a gain.
    """

    answers: Answers
    drop: float
    cells: Classes
    weights: Rows
    sign: int = 1

    @property
    def reversed(self) -> Resampled:
        return replace(self, drop=-self.drop, sign=-self.sign)

    def p_value(self, margin: float) -> float:
        draws = self._losses(self._at(margin))
        return (1 + int((draws <= self.drop + 1e-12).sum())) / (1 + len(draws))

    def upper(self, confidence: float) -> float:
        wanted = NORMAL.inv_cdf(1 - confidence)
        margin = self.drop - wanted * self.spread
        for _ in range(_STEPS):  # in standard deviations, the p-value is close to linear in the margin
            found = NORMAL.inv_cdf(min(max(self.p_value(margin), _LEAST), 1 - _LEAST))
            step = (found - wanted) * self.spread
            margin = max(margin + step, self.drop)
            if abs(step) < 0.02 * self.spread:
                break
        return margin

    def expected_score(self, margin: float, times: float) -> float:
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
        """Scale the weights to 1 in total for each class."""
        labels = self.cells[:, 0]
        shares: Rows = weights / np.bincount(labels, weights)[labels]
        return shares

    @cached_property
    def _pull(self) -> Rows:
        """How much the loss grows with an image of each cell."""
        counts = self._shares(self.weights) * self._sizes
        labels, before, after = self.cells.T
        lost = -gradient_of(self.answers.metric, labels, after, counts)
        if self.answers.before is not None:
            lost = lost + gradient_of(self.answers.metric, labels, before, counts)
        return self.sign * lost

    def _at(self, margin: float) -> Rows:
        """Return the shares, tilted until their loss is the margin, or as far as that goes."""

        def gain(strength: float) -> float:
            counts = self.answers.in_whole_numbers((self._tilted(strength) * self._sizes)[None])
            return -self.sign * float(self.answers.lost(self.cells, counts)[0])

        steepest = _STEEPEST / max(float(np.ptp(self._pull)), 1e-12)
        return self._tilted(falls_to(-margin, gain, -steepest, steepest, _HALVINGS))

    def _tilted(self, strength: float) -> Rows:
        labels, exponents = self.cells[:, 0], strength * self._pull
        highest = np.full(int(labels.max()) + 1, -np.inf)
        np.maximum.at(highest, labels, exponents)
        return self._shares(self.weights * np.exp(exponents - highest[labels]))

    def _losses(self, shares: Rows) -> Rows:
        """Return the losses on images that are drawn by these shares, of each class as many as there are."""
        random, labels = np.random.default_rng(0), self.cells[:, 0]
        classes = np.split(np.arange(len(labels)), np.flatnonzero(np.diff(labels)) + 1)
        found = []
        for _ in range(self.answers.draws):
            counts = np.zeros((_BLOCK, len(labels)))
            for mine in classes:
                counts[:, mine] = random.multinomial(int(self._sizes[mine[0]]), shares[mine], size=_BLOCK)
            found.append(self.sign * self.answers.lost(self.cells, counts))
        return np.concatenate(found)


@dataclass(frozen=True, eq=False)
class Reweighted(Evidence):
    """A loss in any metric of classes, of units that are weighted at random, as in `BoundedMean`.

    To each class, a unit is added that only the first network gets right, weighted likewise; only the second one if it
    `is_gain`.
    """

    answers: Answers
    drop: float
    units: Units
    is_gain: bool = False

    @property
    def reversed(self) -> Reweighted:
        return replace(self, drop=-self.drop, is_gain=not self.is_gain)

    def p_value(self, margin: float) -> float:
        return (1 + int((self._losses >= margin - 1e-12).sum())) / (1 + len(self._losses))

    def upper(self, confidence: float) -> float:
        return float(np.quantile(self._losses, confidence, method="higher"))

    def expected_score(self, margin: float, times: float) -> float:
        mean = self.drop + (float(self._losses.mean()) - self.drop) / times
        return deviations(mean - margin, float(self._losses.std()) / times**0.5)

    @cached_property
    def _losses(self) -> Rows:
        answers, added = self.answers, []
        for label, other in answers.mistakes():
            right, wrong = (other, label) if self.is_gain else (label, other)
            added.append((label, wrong if answers.before is None else right, wrong))
        cells, places = answers.cells(added)
        weights = np.append(weights_of(self.units), np.ones(len(added)))
        _, units = np.unique(self.units, return_inverse=True)
        members = np.append(units.ravel(), units.max() + 1 + np.arange(len(added)))
        random, found = np.random.default_rng(0), []
        for _ in range(answers.draws):
            drawn = random.exponential(size=(_BLOCK, int(members.max()) + 1))[:, members] * weights
            counts = np.stack([np.bincount(places, each, minlength=len(cells)) for each in drawn]).astype(np.float64)
            found.append(answers.lost(cells, answers.in_whole_numbers(counts)))
        losses = np.sort(np.concatenate(found))
        return -losses[::-1] if self.is_gain else losses
