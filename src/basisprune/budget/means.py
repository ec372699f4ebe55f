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

import numpy as np
import numpy.typing as npt
from scipy import optimize, special

from basisprune.budget.evidence import NORMAL, Evidence, deviations, falls_to
from basisprune.tasks.outcomes import Outcomes, Rows

Complex = npt.NDArray[np.complex128]
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
class BoundedMean(Evidence):
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

    @cached_property
    def drop(self) -> float:
        return float(self.values.sum() / self._parts.sum())

    @property
    def reversed(self) -> BoundedMean:
        return BoundedMean(-self.values, -self.best, -self.worst, self.shares)

    @property
    def _parts(self) -> Rows:
        return np.ones(len(self.values)) if self.shares is None else self.shares

    def p_value(self, margin: float, times: float = 1.0) -> float:
        """Return the chance, at most, of a loss as small as this; if each unit had been seen that many times."""
        if margin > self.worst:
            return 0.0
        terms = np.append(self.values - margin * self._parts, self.worst - margin)
        return chance_above_zero(terms, np.append(np.full(len(self.values), times), 1.0))

    def upper(self, confidence: float) -> float:
        wanted = NORMAL.inv_cdf(1 - confidence)

        def above(margin: float) -> float:  # in normal scores, which are close to linear
            return self.expected_score(margin, 1.0) - wanted

        if above(self.worst) >= 0:
            return self.worst
        if above(self.drop) <= 0:
            return self.drop
        return float(optimize.brentq(above, self.drop, self.worst, xtol=1e-9 * (self.worst - self.best)))

    def expected_score(self, margin: float, times: float) -> float:
        return NORMAL.inv_cdf(min(max(self.p_value(margin, times), 1e-300), 1 - 1e-15))


@dataclass(frozen=True)
class WorstMean(Evidence):
    """The loss of the accuracy of the worst class: each has to show that it did not lose as much.

    If the worst class lost more than the margin, then the one that is worst now did, by itself. The interval is wider
    than need be.
    """

    drop: float
    classes: tuple[BoundedMean, ...]

    @property
    def reversed(self) -> WorstMean:
        return WorstMean(-self.drop, tuple(each.reversed for each in self.classes))

    def p_value(self, margin: float) -> float:
        return max(each.p_value(margin) for each in self.classes)

    def upper(self, confidence: float) -> float:
        return max(each.upper(confidence) for each in self.classes)

    def expected_score(self, margin: float, times: float) -> float:
        return max(each.expected_score(margin, times) for each in self.classes)


def chance_above_zero(terms: Rows, shapes: Rows) -> float:
    """Return the chance that a sum of independent gamma variables of these shapes, each times its term, is at least 0.

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
    # The bisection runs from the right, so that it ends left of the pole at 1.
    low = -falls_to(0.0, lambda left: float((counts * each / (1 + each * left)).sum()) + 1 / left, -1.0, 0.0)
    scale = 1 / math.sqrt(float((counts * np.square(each / (1 - each * low))).sum()) + 1 / low**2)

    def heights(steps: Rows) -> Complex:  # as logarithms, ever further apart, so that slow decay takes few steps
        line = low + 1j * scale * np.sinh(steps)
        logs: Complex = np.log(np.cosh(steps)) - np.log(line)
        for start in range(0, len(each), _BLOCK):
            some = slice(start, start + _BLOCK)
            logs = logs - np.log(1 - np.multiply.outer(line, each[some])) @ counts[some]
        return logs

    highest, furthest = heights(np.zeros(1))[0].real, 2.0
    while heights(np.array([furthest]))[0].real > highest + _NEGLIGIBLE:
        furthest *= 1.25
    found = np.exp(heights(np.arange(0.0, furthest, _STEP))).real
    found[0] /= 2
    return float(min(max(found.sum() * scale * _STEP / math.pi, 0.0), 1.0))


@dataclass(frozen=True, eq=False)
class PairedValues(Evidence):
    """A loss in a metric: `drop`, what each of the units says of it, and by how much one more may be off."""

    drop: float
    values: Rows
    farthest: float

    @classmethod
    def of(cls, before: Outcomes | None, after: Outcomes) -> PairedValues:
        """Compare two networks; without `before`, the loss is the metric itself, negated."""
        values = -after.each if before is None else before.each - after.each
        drop = -after.value if before is None else before.value - after.value
        known = [values, after.each] if before is None else [values, before.each, after.each]
        return cls(drop, values, max(float(np.abs(each - each.mean()).max()) for each in known))

    @property
    def reversed(self) -> PairedValues:
        return PairedValues(-self.drop, -self.values, self.farthest)

    @cached_property
    def spread(self) -> float:
        """The standard deviation of the loss."""
        count = len(self.values)
        variance = float(np.var(self.values, ddof=1)) / count if count > 1 else math.inf
        return math.sqrt(variance + (_Z * self.farthest / count) ** 2)

    @cached_property
    def _skew(self) -> float:
        """The skewness by the root of the count; 0 unless the tail of large losses is the longer one."""
        apart = self.values - self.values.mean()
        size = float(np.square(apart).mean())
        return max(float((apart**3).mean()) / size**1.5, 0.0) / math.sqrt(len(apart)) if size > 0 else 0.0

    def p_value(self, margin: float) -> float:
        """Return the chance of a loss as small as this if the true one is `margin`.

        A few large losses make a mean look smaller than it is as often as not, for which Hall's transformation makes up
        (Journal of the Royal Statistical Society B 54, 1992).
        """
        score, bend = deviations(self.drop - margin, self.spread), self._skew / 3
        if bend and math.isfinite(score):
            score = ((1 + bend * score) ** 3 - 1) / (3 * bend) + bend / 2
        return float(special.stdtr(self._freedom, score))

    def upper(self, confidence: float) -> float:
        score, bend = -float(special.stdtrit(self._freedom, confidence)), self._skew / 3
        if bend:
            score = (float(np.cbrt(1 + 3 * bend * (score - bend / 2))) - 1) / bend
        return self.drop - score * self.spread

    @property
    def _freedom(self) -> int:
        return max(len(self.values) - 1, 1)

    def expected_score(self, margin: float, times: float) -> float:
        return deviations(self.drop - margin, self.spread / math.sqrt(times))
