"""How every test of a loss looks from outside.

A new test is a subclass of `Evidence` in a file of its own here, and a line in `certify.evidence_of`, which says for
which metrics and images it is used.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from statistics import NormalDist
from typing import TYPE_CHECKING

NORMAL = NormalDist()


class Evidence(ABC):
    """What examples say of a loss, which is `drop` on them.

    `p_value` is the chance, at most, of a loss as small as this if the true one is `margin`; `upper` is what the true
    loss does not exceed, with this one-sided confidence. `expected_score` is how many standard deviations the loss is
    expected to be above `margin` on `times` as many units. `reversed` is the evidence of the gain.
    """

    if TYPE_CHECKING:  # a field of some tests, and computed by others

        @property
        def drop(self) -> float: ...

    @abstractmethod
    def p_value(self, margin: float) -> float: ...

    @abstractmethod
    def upper(self, confidence: float) -> float: ...

    @abstractmethod
    def expected_score(self, margin: float, times: float) -> float: ...

    @property
    @abstractmethod
    def reversed(self) -> Evidence: ...

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Return the two-sided interval of the loss."""
        one_sided = (1 + confidence) / 2
        return -self.reversed.upper(one_sided), self.upper(one_sided)


def deviations(distance: float, spread: float) -> float:
    """Express a distance in standard deviations.

    >>> deviations(-1.0, 0.5), deviations(-1.0, 0.0), deviations(0.0, 0.0)
    (-2.0, -inf, 0.0)
    """
    if spread > 0:
        return distance / spread
    return math.copysign(math.inf, distance) if distance else 0.0


def falls_to(value: float, falling: Callable[[float], float], low: float, high: float, halvings: int = 60) -> float:
    """Return where a falling function, which may jump or be infinite, has that value; `high` if it stays above."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > value else (low, middle)
    return high
