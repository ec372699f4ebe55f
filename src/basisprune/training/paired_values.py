"""How far the loss in the metric of any task can be trusted, by what each unit says of it.

Where the metric is a mean, that is the unit's own number; elsewhere its jackknife value (see `Outcomes.each`). If it is
known how much one can lose, the test is that of `BoundedMean`, with one more unit that loses all: losses may be so rare
that none is seen. It holds exactly for a mean. A jackknife value can lose the range of the metric, or as much as the
farthest one is off, of either network or of the loss; for these the test is an approximation.

Where that is not known, nothing can be certified, and a paired t-test describes the loss. To the variance of the mean,
that of a single unit is added which changes by as much as the farthest one is off (as score intervals add examples;
Agresti and Coull, American Statistician 52, 1998).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import special

from basisprune.tasks import Outcomes, Predictions, Rows
from basisprune.training.bounded_mean import BoundedMean
from basisprune.training.intervals import Paired, deviations, wilson_interval

_Z = 1.645  # of the added variance, whatever the confidence


def loss_of(before: Outcomes | None, after: Outcomes) -> BoundedMean | PairedValues | Paired:
    """The loss from one network to the other in the metric of the task; without `before`, the metric itself, negated.

    Of an accuracy, each image counts as one, whatever its unit.
    """
    if isinstance(before, Predictions) and isinstance(after, Predictions):
        return Paired.of(before.hits, after.hits)
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
        one_sided = (1 + confidence) / 2
        gain = PairedValues(-self.drop, -self.values, self.farthest)
        return -gain.upper(one_sided), self.upper(one_sided)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many examples."""
        return deviations(self.drop - margin, self.spread / math.sqrt(times))


def interval_of(outcomes: Outcomes) -> tuple[float, float]:
    """The 95 % interval of the task's metric; of an accuracy, each image counts as one."""
    if isinstance(outcomes, Predictions):
        return wilson_interval(int(outcomes.hits.sum()), len(outcomes.hits))
    low, high = loss_of(None, outcomes).interval()
    return -high, -low
