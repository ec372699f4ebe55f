"""How far a mean of independent units can be trusted, of whatever numbers, if it is known how bad one of them can be.

A unit is an example, or all examples that belong together: copies of an image, or images of one patient, burst or
scene. The test is Gaffke's (Three test statistics for a nonparametric one-sided hypothesis on the mean of a nonnegative
variable, 2005; Learned-Miller and Thomas, arXiv:1905.06208, 2019). The units are weighted at random, by a
Dirichlet distribution, together with one more unit that loses everything; what counts is how often the weighted mean
reaches the margin. It holds for any number of units. For two different values it is Clopper and Pearson's exact test;
for others validity is a conjecture, of which no counterexample is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Complex = npt.NDArray[np.complex128]
_NORMAL = NormalDist()
_HALVINGS, _STEPS = 60, 60
_STEP = 0.08  # of the integral, whose error falls exponentially with it
_NEGLIGIBLE = -45.0  # as a logarithm
_BLOCK = 1 << 12


@dataclass(frozen=True, eq=False)
class BoundedMean:
    """The mean loss of units that were drawn independently; none loses more than `worst` or less than `best`.

    With `shares`, the part of each unit that counts, it is the sum of `values` divided by the sum of these parts, such
    as the loss of one class.

    >>> pair = BoundedMean(np.array([1.0] * 3 + [0.0] * 7), worst=1, best=0)
    >>> round(pair.drop, 2), round(pair.upper(0.95), 4)  # Clopper and Pearson's bound
    (0.3, 0.6066)
    """

    values: Numbers
    worst: float
    best: float
    shares: Numbers | None = None

    @property
    def drop(self) -> float:
        """The mean loss."""
        return float(self.values.sum() / self._parts.sum())

    @property
    def _parts(self) -> Numbers:
        return np.ones(len(self.values)) if self.shares is None else self.shares

    def p_value(self, margin: float) -> float:
        """The chance, at most, of a loss as small as this if the true one is `margin`."""
        return self._chance(margin)

    def _chance(self, margin: float, times: float = 1.0) -> float:
        """The p-value, if each unit had been seen that many times."""
        if margin > self.worst:
            return 0.0
        terms = np.append(self.values - margin * self._parts, self.worst - margin)
        return chance_above_zero(terms, np.append(np.full(len(self.values), times), 1.0))

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""
        wanted = _NORMAL.inv_cdf(1 - confidence)
        low, high, below = self.drop, self.worst, 0.5 - wanted
        above = _score(self.p_value(high)) - wanted
        for step in range(_STEPS):  # by false position in normal scores, which are close to linear
            if high - low <= 1e-9 * (self.worst - self.best):
                break
            part = below / (below - above) if below > above and step % 3 != 2 else 0.5
            middle = low + min(max(part, 0.001), 0.999) * (high - low)
            off = _score(self.p_value(middle)) - wanted
            if abs(off) < 1e-9:
                return middle
            if off > 0:
                low, below = middle, off
            else:
                high, above = middle, off
        return high

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the loss."""
        one_sided = (1 + confidence) / 2
        gain = BoundedMean(-self.values, -self.best, -self.worst, self.shares)
        return -gain.upper(one_sided), self.upper(one_sided)

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many units."""
        return _score(self._chance(margin, times))


def _score(chance: float) -> float:
    return _NORMAL.inv_cdf(min(max(chance, 1e-300), 1 - 1e-15))


def chance_above_zero(terms: Numbers, shapes: Numbers) -> float:
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


def _heights(each: Numbers, counts: Numbers, saddle: float, scale: float, steps: Numbers) -> Complex:
    """The logarithm of what is integrated: ever further from the saddle point, so that slow decay takes few steps."""
    line = saddle + 1j * scale * np.sinh(steps)
    logs: Complex = np.log(np.cosh(steps)) - np.log(line)
    for start in range(0, len(each), _BLOCK):
        some = slice(start, start + _BLOCK)
        logs = logs - np.log(1 - np.multiply.outer(line, each[some])) @ counts[some]
    return logs
