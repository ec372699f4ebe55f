"""How far the loss in the metric of any task can be trusted: a paired t-test of what each example says.

Where the metric is a mean, that is the example's own number; elsewhere its jackknife value (see `Outcomes.each`).
Examples that hardly change do not prove that none would: to the variance of the mean, that of a single example is added
which changes by as much as the farthest one is off, of either network or of the loss (as score intervals add examples;
Agresti and Coull, American Statistician 52, 1998). Without it, rare classes that are rarely hurt pass far too often.
Where an example can lose everything, those that do may be so rare that none is seen: a loss is not ruled out while that
is likely (for a small one, it takes three examples for each time that it goes into one).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from basisprune.tasks.base import Rows
from basisprune.training.intervals import deviations, wilson_interval
from basisprune.training.outcomes import Outcomes
from basisprune.training.predict import Predictions

_NORMAL = NormalDist()
_MANY = 2000  # degrees of freedom from which on Student's t is taken for normal
_Z = 1.645  # of the added variance, whatever the confidence


@dataclass(frozen=True, eq=False)
class PairedValues:
    """A loss in a metric: `drop`, what each of the examples says of it, and by how much one more may be off.

    `worst` is the most that an example can lose, where that is known.
    """

    drop: float
    values: Rows
    farthest: float
    worst: float | None = None

    @classmethod
    def of(cls, before: Outcomes | None, after: Outcomes) -> PairedValues:
        """The loss from one network to the other; without `before`, the metric itself, negated."""
        values = -after.each if before is None else before.each - after.each
        drop = -after.value if before is None else before.value - after.value
        known = [values, after.each] if before is None else [values, before.each, after.each]
        farthest = max(float(np.abs(each - each.mean()).max()) for each in known)
        bounded = after.task.is_share and after.task.metric is None
        worst = None if not bounded else 0.0 if before is None else 1.0
        return cls(drop, values, farthest or float(after.task.is_share), worst)

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
        return max(student_cdf(score, self._freedom), self._unseen(margin))

    def _unseen(self, margin: float) -> float:
        """The chance that no example is seen that loses all, if there are so many that the true loss is `margin`."""
        if self.worst is None or margin <= self.drop:
            return 0.0
        seen = max(self.worst - margin, 0.0) / max(self.worst - self.drop, 1e-12)
        return float(min(seen, 1.0) ** len(self.values))

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""
        score, bend, shift = -student_quantile(confidence, self._freedom), *self._bend
        if bend:
            score = (float(np.cbrt(1 + 3 * bend * (score - shift))) - 1) / bend
        found = self.drop - score * self.spread
        if self.worst is None:
            return found
        share: float = (1 - confidence) ** (1 / len(self.values))
        return max(found, self.worst - (self.worst - self.drop) * share)

    @property
    def _bend(self) -> tuple[float, float]:
        root = math.sqrt(len(self.values))
        return self._skew / (3 * root), self._skew / (6 * root)

    @property
    def _freedom(self) -> int:
        return max(len(self.values) - 1, 1)

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the loss."""
        one_sided = (1 + confidence) / 2
        gain = PairedValues(-self.drop, -self.values, self.farthest)
        return -gain.upper(one_sided), self.upper(one_sided)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many examples."""
        return deviations(self.drop - margin, self.spread / math.sqrt(times))


def interval_of(answers: Outcomes | Predictions) -> tuple[float, float]:
    """The 95 % interval of the metric of a task, or of an accuracy."""
    if isinstance(answers, Predictions):
        return wilson_interval(int(answers.hits.sum()), len(answers.hits))
    low, high = PairedValues.of(None, answers).interval()
    return -high, -low


def student_cdf(value: float, freedom: int) -> float:
    """The distribution function of Student's t.

    >>> round(student_cdf(-1.833, 9), 4), round(student_cdf(2.0, 1), 4)
    (0.05, 0.8524)
    """
    if math.isinf(value):
        return 0.0 if value < 0 else 1.0
    if freedom > _MANY:
        return _NORMAL.cdf(value)
    angle, cosine = math.atan(value / math.sqrt(freedom)), freedom / (freedom + value * value)
    # Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    odd = freedom % 2
    term = math.sqrt(cosine) if odd else 1.0
    total = 0.0
    for step in range(1 + odd, freedom, 2):
        total += term
        term *= cosine * step / (step + 1)
    area = math.sin(angle) * total
    if odd:
        area = 2 / math.pi * (angle + area)
    return (1 + area) / 2


def student_quantile(share: float, freedom: int) -> float:
    """Where the distribution function of Student's t has that value.

    >>> round(student_quantile(0.95, 9), 3), round(student_quantile(0.975, 100_000), 3)
    (1.833, 1.96)
    """
    if freedom > _MANY:
        return _NORMAL.inv_cdf(share)
    low, high = -1e6, 1e6
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_cdf(middle, freedom) < share else (low, middle)
    return high
