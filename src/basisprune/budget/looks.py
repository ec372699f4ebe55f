"""A group-sequential test of a loss of accuracy, for images that are labelled one after the other.

Two networks that give the same answer are both right or both wrong, so an image on which they agree needs no label. The
others are labelled in random order, and the test may end early: at each of a few looks, Tango's score is compared with
a boundary, and the boundaries together spend the error (Lan and DeMets, Biometrika 70, 1983; spending as O'Brien and
Fleming's). Images without a label count as lost, so that the test may be decided before all are labelled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.integrate import cumulative_trapezoid

from basisprune.budget.proportions import Paired

Differences = npt.NDArray[np.int8]
LOST, NEITHER, WON, UNLABELLED = 1, 0, -1, 2
"""What became of an image: only the unpruned network is right, both or none are, only the pruned one; not known yet."""

_NORMAL = NormalDist()
LOOKS, _FIRST = 9, 0.2
"""How often the test looks, and after which share of the images for the first time."""
UNLIKELY = _NORMAL.inv_cdf(0.1)
"""In standard deviations, the chance to pass below which no more labels are asked for."""
_SPREAD, _POINTS = 8.0, 1601  # of the grid on which the boundaries are computed


def boundaries(shares: npt.NDArray[np.float64], error: float) -> npt.NDArray[np.float64]:
    """Return the score at or below which each look rejects, so that all looks together err with probability `error`.

    `shares` are the parts of all images that were seen at each look, the last being 1.

    >>> [round(float(score), 2) for score in boundaries(np.array([0.5, 1.0]), 0.05)]
    [-2.54, -1.66]
    """
    spent = 2 * stats.norm.cdf(stats.norm.ppf(error / 2) / np.sqrt(shares))
    grid = np.linspace(-_SPREAD, _SPREAD, _POINTS)
    width = grid[1] - grid[0]
    running = np.zeros(_POINTS)  # the density of the score times the root of the share, where no look has rejected
    found, before = [], 0.0
    for share, allowed in zip(shares, np.diff(spent, prepend=0.0), strict=True):
        if before:
            steps = stats.norm.pdf(np.arange(1 - _POINTS, _POINTS) * width, scale=math.sqrt(share - before))
            running = np.convolve(steps, running, mode="valid") * width
        else:
            running = stats.norm.pdf(grid, scale=math.sqrt(share))
        bound = float(np.interp(allowed, cumulative_trapezoid(running, dx=width, initial=0), grid))
        found.append(bound / math.sqrt(share))
        running, before = np.where(grid > bound, running, 0.0), share
    return np.array(found)


@dataclass(frozen=True)
class Decision:
    """What the labels show so far: `passed` is None while more of them may still decide.

    `lost` and `won` are counted among the `seen` images of the look that decided, or else of the last; of those without
    a label, `missing` are counted as lost. `p_value` is that of the look, against a boundary of `needed`.
    """

    passed: bool | None
    seen: int
    lost: int
    won: int
    missing: int
    p_value: float
    needed: float


@dataclass(frozen=True)
class SequentialTest:
    """Tests whether a network loses at most `margin` of accuracy on `images` in random order.

    >>> test = SequentialTest(images=1000, margin=0.02)
    >>> test.decide(np.zeros(1000, dtype=np.int8)).seen  # no difference: half of them suffice
    500
    """

    images: int
    margin: float
    confidence: float = 0.95

    @property
    def looks(self) -> tuple[tuple[int, float], ...]:
        """The number of images at each look, and the score that it takes to pass."""
        return _looks(self.images, self.confidence)

    def decide(self, differences: Differences) -> Decision:
        """Decide by the differences, in the random order that was fixed before any label was given."""
        worst = np.where(differences == UNLABELLED, LOST, differences)
        for count, score in self.looks:
            if self._paired(worst, count).score(self.margin) <= score:
                return self._decision(True, differences, count, score)
        hopeful = np.where(differences == UNLABELLED, WON, differences)
        undecided = any(self._paired(hopeful, count).score(self.margin) <= score for count, score in self.looks)
        passed = None if undecided and not self._is_unlikely(differences) else False
        return self._decision(passed, differences, *self.looks[-1])

    def _is_unlikely(self, differences: Differences) -> bool:
        """Whether the last look would hardly be passed even by a network that loses nothing on the other images.

        Ending the test for that takes labels from networks that fail, and adds no error.
        """
        (missing,) = np.nonzero(differences == UNLABELLED)
        if len(missing) == 0 or missing[0] == 0:
            return False
        pair = self._paired(differences, int(missing[0]))
        variance = (pair.lost + pair.won + 1) / pair.images
        needed = self.looks[-1][1] * math.sqrt(self.images * variance) + self.images * self.margin
        return (needed - (pair.lost - pair.won)) / math.sqrt((self.images - pair.images) * variance) < UNLIKELY

    def upper(self, differences: Differences) -> float:
        """Return the loss that the true one does not exceed, by the look that is best for it."""
        worst = np.where(differences == UNLABELLED, LOST, differences)
        return min(self._paired(worst, count).upper(_NORMAL.cdf(-score)) for count, score in self.looks)

    def _paired(self, differences: Differences, count: int) -> Paired:
        first = differences[:count]
        return Paired(int((first == LOST).sum()), int((first == WON).sum()), count)

    def _decision(self, passed: bool | None, differences: Differences, count: int, score: float) -> Decision:
        first = differences[:count]
        missing = int((first == UNLABELLED).sum())
        pair = self._paired(np.where(first == UNLABELLED, LOST, first), count)
        lost = int(pair.lost) - missing
        return Decision(passed, count, lost, int(pair.won), missing, pair.p_value(self.margin), _NORMAL.cdf(score))


@lru_cache
def _looks(images: int, confidence: float) -> tuple[tuple[int, float], ...]:
    counts = np.unique(np.maximum(np.round(np.linspace(_FIRST, 1, LOOKS) * images), 1))
    scores = boundaries(counts / images, 1 - confidence)
    return tuple((int(count), float(score)) for count, score in zip(counts, scores, strict=True))
