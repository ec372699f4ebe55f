"""Tests and intervals of a mean of independent units, of whatever numbers, and of the metric of any task.

A unit is an example, or all examples that belong together: copies of an image, or images of one patient, burst or
scene. If it is known how bad one unit can be, the test is Gaffke's (Three test statistics for a nonparametric one-sided
hypothesis on the mean of a nonnegative variable, 2005; Learned-Miller and Thomas, arXiv:1905.06208, 2019). The units
are weighted at random, by a Dirichlet distribution, together with one more unit that loses everything; what counts is
how often the weighted mean reaches the margin. It holds for any number of units. For two different values it is Clopper
and Pearson's exact test; for others validity is a conjecture, of which no counterexample is known.

Where a metric is a mean, the number of a unit is its own; elsewhere its jackknife value (see `Outcomes.each`), which
can lose the range of the metric, or as much as the farthest one is off, of either network or of the loss: then the test
is an approximation.

Where it is not known how bad a unit can be, nothing can be certified, and a paired t-test describes the loss. To the
variance of the mean, that of a single unit is added which changes by as much as the farthest one is off (as score
intervals add examples; Agresti and Coull, American Statistician 52, 1998).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from basisprune.budget.proportions import deviations, two_sided
from basisprune.tasks.outcomes import Outcomes, Rows

Complex = npt.NDArray[np.complex128]
_NORMAL = NormalDist()
_HALVINGS = 60
_STEP = 0.08  # of the integral, whose error falls exponentially with it
_NEGLIGIBLE = -45.0  # as a logarithm
_BLOCK = 1 << 12
_Z = 1.645  # of the added variance, whatever the confidence


def mean_loss(before: Outcomes | None, after: Outcomes) -> BoundedMean | PairedValues:
    """Return the loss in the metric of the task; without `before`, the metric itself, negated."""
    task, known = after.task, PairedValues.of(before, after)
    if not task.is_bounded:
        return known
    if task.metric is None:
        low, high = task.range or (0.0, 0.0)
        worst, best = (-low, -high) if before is None else (high - low, low - high)
        return BoundedMean(known.values, worst, best)
    most = known.farthest if task.range is None else max(known.farthest, task.range[1] - task.range[0])
    if task.influence is not None:
        most = max(most, task.influence(after.rows))
    off = most * len(known.values) / len(after)  # blocks have several units, of which one is far off
    return BoundedMean(known.values - known.values.mean() + known.drop, known.drop + off, known.drop - off)


@dataclass(frozen=True, eq=False)
class BoundedMean:
    """The mean loss of units that were drawn independently; none loses more than `worst` or less than `best`.

    With `shares`, the part of each unit that counts, it is the sum of `values` divided by the sum of these parts, such
    as the loss of one class.

    >>> pair = BoundedMean(np.array([1.0] * 3 + [0.0] * 7), worst=1, best=0)
    >>> round(pair.drop, 2), round(pair.upper(0.95), 4)  # Clopper and Pearson's bound
    (0.3, 0.6066)
    """

    values: Rows
    worst: float
    best: float
    shares: Rows | None = None

    @property
    def drop(self) -> float:
        """The mean loss."""
        return float(self.values.sum() / self._parts.sum())

    @property
    def _parts(self) -> Rows:
        return np.ones(len(self.values)) if self.shares is None else self.shares

    def p_value(self, margin: float) -> float:
        """The chance, at most, of a loss as small as this if the true one is `margin`."""
        return self._chance(margin)

    def _chance(self, margin: float, times: float = 1.0) -> float:
        """Return the p-value if each unit had been seen that many times."""
        if margin > self.worst:
            return 0.0
        terms = np.append(self.values - margin * self._parts, self.worst - margin)
        return chance_above_zero(terms, np.append(np.full(len(self.values), times), 1.0))

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""
        wanted = _NORMAL.inv_cdf(1 - confidence)

        def above(margin: float) -> float:  # in normal scores, which are close to linear
            return _score(self.p_value(margin)) - wanted

        if above(self.worst) >= 0:
            return self.worst
        if above(self.drop) <= 0:
            return self.drop
        return float(optimize.brentq(above, self.drop, self.worst, xtol=1e-9 * (self.worst - self.best)))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the loss."""
        gain = BoundedMean(-self.values, -self.best, -self.worst, self.shares)
        return two_sided(self, gain, confidence)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many units."""
        return _score(self._chance(margin, times))


def _score(chance: float) -> float:
    return _NORMAL.inv_cdf(min(max(chance, 1e-300), 1 - 1e-15))


def chance_above_zero(terms: Rows, shapes: Rows) -> float:
    """The chance that the sum of independent gamma variables of these shapes, each times its number, is at least 0.

    It is an integral of the moment generating function along a line through its saddle point, which gives small chances
    with all their digits.

    >>> round(chance_above_zero(np.array([1.0, -1.0, -1.0]), np.ones(3)), 12)
    0.25
    """
    if terms.max() <= 0:
        return float(not terms.any())
    if terms.min() >= 0:
        return 1.0
    each, places = np.unique(terms / terms.max(), return_inverse=True)
    counts = np.bincount(places.ravel(), shapes).astype(np.float64)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        slope = float((counts * each / (1 - each * middle)).sum()) - 1 / middle
        low, high = (middle, high) if slope < 0 else (low, middle)
    scale = 1 / math.sqrt(float((counts * np.square(each / (1 - each * low))).sum()) + 1 / low**2)
    highest, furthest = _heights(each, counts, low, scale, np.zeros(1))[0].real, 2.0
    while _heights(each, counts, low, scale, np.array([furthest]))[0].real > highest + _NEGLIGIBLE:
        furthest *= 1.25
    steps = np.arange(0.0, furthest, _STEP)
    heights = np.exp(_heights(each, counts, low, scale, steps)).real
    heights[0] /= 2
    return float(min(max(heights.sum() * scale * _STEP / math.pi, 0.0), 1.0))


def _heights(each: Rows, counts: Rows, saddle: float, scale: float, steps: Rows) -> Complex:
    """The logarithm of what is integrated: ever further from the saddle point, so that slow decay takes few steps."""
    line = saddle + 1j * scale * np.sinh(steps)
    logs: Complex = np.log(np.cosh(steps)) - np.log(line)
    for start in range(0, len(each), _BLOCK):
        some = slice(start, start + _BLOCK)
        logs = logs - np.log(1 - np.multiply.outer(line, each[some])) @ counts[some]
    return logs


@dataclass(frozen=True, eq=False)
class PairedValues:
    """A loss in a metric: `drop`, what each of the units says of it, and by how much one more may be off."""

    drop: float
    values: Rows
    farthest: float

    @classmethod
    def of(cls, before: Outcomes | None, after: Outcomes) -> PairedValues:
        """The loss from one network to the other; without `before`, the metric itself, negated."""
        values = -after.each if before is None else before.each - after.each
        drop = -after.value if before is None else before.value - after.value
        known = [values, after.each] if before is None else [values, before.each, after.each]
        farthest = max(float(np.abs(each - each.mean()).max()) for each in known)
        return cls(drop, values, farthest)

    @cached_property
    def spread(self) -> float:
        """The standard deviation of the loss."""
        count = len(self.values)
        variance = float(np.var(self.values, ddof=1)) / count if count > 1 else math.inf
        return math.sqrt(variance + (_Z * self.farthest / count) ** 2)

    @cached_property
    def _skew(self) -> float:
        """How much longer the tail of large losses is than the other; 0 if it is not."""
        apart = self.values - self.values.mean()
        size = float(np.square(apart).mean())
        return max(float((apart**3).mean()) / size**1.5, 0.0) if size > 0 else 0.0

    def p_value(self, margin: float) -> float:
        """The chance of a loss as small as this if the true one is `margin`.

        A few large losses make a mean look smaller than it is as often as not, for which Hall's transformation makes up
        (Journal of the Royal Statistical Society B 54, 1992).
        """
        score, bend, shift = deviations(self.drop - margin, self.spread), *self._bend
        if bend and math.isfinite(score):
            score = ((1 + bend * score) ** 3 - 1) / (3 * bend) + shift
        return float(special.stdtr(self._freedom, score))

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""
        score, bend, shift = -float(special.stdtrit(self._freedom, confidence)), *self._bend
        if bend:
            score = (float(np.cbrt(1 + 3 * bend * (score - shift))) - 1) / bend
        return self.drop - score * self.spread

    @property
    def _bend(self) -> tuple[float, float]:
        root = math.sqrt(len(self.values))
        return self._skew / (3 * root), self._skew / (6 * root)

    @property
    def _freedom(self) -> int:
        return max(len(self.values) - 1, 1)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the loss."""
        return two_sided(self, PairedValues(-self.drop, -self.values, self.farthest), confidence)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many examples."""
        return deviations(self.drop - margin, self.spread / math.sqrt(times))
