"""What a search tries next, from what it has tried: a rule without memory, so that a search can be repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from basisprune.outlook import Outlook

_FIRST = 6.0
"""The expected rise of the loss, in units of the accuracy that may be lost, at which the search starts.
A rough start from trial runs; what is tried then corrects it."""

_LEAST_ALLOWED = 0.002
_INSIDE = 0.35  # a guess is at least so far from both ends of what is known, on a scale of logarithms
_NEAR, _STEEP = 0.6, 8.0
"""A guess between what passed and what failed may end the search if what failed keeps at least this share of what
passed, and lost at most so many times what is allowed: otherwise the accuracy may fall off a cliff anywhere."""


@dataclass(frozen=True)
class Attempt:
    """A share that was kept, the accuracy that was lost, and whether that is within the budget.

    Of one that could not be reached, the loss is infinite; one from which nothing was removed counts as what it was.
    """

    share: float
    drop: float
    passed: bool


@dataclass(frozen=True)
class Stepping:
    """How a search for the smallest share goes; see `SearchConfig` for `step`, `tolerance` and `smallest`.

    `allowed` is the accuracy that may be lost. Without an `outlook` the share is multiplied by `step` until a candidate
    fails, then narrowed down.
    """

    allowed: float
    step: float
    tolerance: float
    smallest: float
    outlook: Outlook | None = None

    def next_share(self, attempts: Sequence[Attempt]) -> float | None:
        """The share to try next; None if what failed, or is expected to fail, is within the tolerance of what passed.

        >>> halving = Stepping(allowed=0.01, step=0.5, tolerance=0.2, smallest=0.02)
        >>> halving.next_share([]), halving.next_share([Attempt(0.5, 0.0, passed=True)])
        (0.5, 0.25)
        """
        passed = min((attempt for attempt in attempts if attempt.passed), key=lambda one: one.share, default=None)
        largest = 1.0 if passed is None else passed.share
        worse = (attempt for attempt in attempts if not attempt.passed and attempt.share < largest)
        failed = max(worse, key=lambda one: one.share, default=None)
        if largest <= self.smallest or (failed is not None and failed.share >= largest * (1 - self.tolerance)):
            return None
        if self.outlook is None:
            return math.sqrt(largest * failed.share) if failed else max(largest * self.step, self.smallest)
        guess = self.outlook.share(self._loss(passed, failed, self.outlook))
        if passed is not None and guess >= largest * (1 - self.tolerance) and self._is_known_well(passed, failed):
            return None
        if failed is None:
            nearest = largest * (1 - self.tolerance)
            beyond = nearest <= self.outlook.shares[-1]  # of which the outlook knows nothing
            return max(largest * self.step if beyond else min(guess, nearest), self.smallest)
        margin = _INSIDE * math.log(largest / failed.share)
        return math.exp(min(max(math.log(guess), math.log(failed.share) + margin), math.log(largest) - margin))

    def _is_known_well(self, passed: Attempt, failed: Attempt | None) -> bool:
        """Whether a guess of the smallest share is worth as much as a further attempt."""
        allowed = max(self.allowed, _LEAST_ALLOWED)
        if failed is None:
            return passed.drop >= allowed / 2
        return failed.share >= passed.share * _NEAR and failed.drop <= _STEEP * allowed

    def _loss(self, passed: Attempt | None, failed: Attempt | None, outlook: Outlook) -> float:
        """The expected rise of the loss at which all of the allowed accuracy should be lost."""
        allowed = max(self.allowed, _LEAST_ALLOWED)
        if passed is None and failed is None:
            return _FIRST * allowed
        if failed is None:
            assert passed is not None
            return outlook.loss(passed.share) * max(allowed / max(passed.drop, allowed / 8), 1.0)
        # Tuning gains something, and what pruning costs then is about the square of the expected rise (docs/method.md).
        below = outlook.loss(failed.share)
        if passed is None:
            return below * min(max(math.sqrt(allowed / max(failed.drop, allowed)), 1 / 16), 0.7)
        above = min(outlook.loss(passed.share), below)
        least, most = min(passed.drop, allowed), max(failed.drop, 1.01 * allowed)
        return math.sqrt(above**2 + (allowed - least) / (most - least) * (below**2 - above**2))


def most_steps(smallest: float, tolerance: float) -> int:
    """How many shares a search with an outlook tries: one at each end, then ever closer between what is known.

    There are more if many pass before the first fails.

    >>> most_steps(0.02, 0.2)
    9
    """
    between = math.log(smallest) / math.log(1 - tolerance)
    return 2 + math.ceil(math.log(max(between, 1.0)) / -math.log(1 - _INSIDE))
