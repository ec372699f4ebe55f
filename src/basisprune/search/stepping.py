"""How far a search goes and which share it tries next: a rule without memory, so that searches repeat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import get_args

from basisprune.errors import ConfigError, broken_rules
from basisprune.method.scoring import Outlook
from basisprune.recipes import Move
from basisprune.types import Effort, FrameworkName


@dataclass(frozen=True)
class SearchConfig:
    """What is pruned and how far the search goes.

    `framework` prunes filters by l1, taylor, hrank or loss, the basis, or both (default: the recipe's). Where scores
    are in units of the loss, they say which share to try first, and with the accuracies of what was tried which one
    next; otherwise the share kept is multiplied by `step` until a candidate fails, then narrowed down. The search ends
    when the share of basis vectors or filters that failed, or that is expected to fail, is within `tolerance` of the
    share that passed (their product, where both shrink together), or at `smallest`; with scores in units of the loss,
    also when a network that failed is within `tolerance` of the size of the one that passed. A candidate more than
    `give_up_margin` below the required accuracy after a fifth of its epochs is given up. With `warm_start`, a candidate
    is pruned from the last one that passed, otherwise in one step from the unpruned network, as in the paper. With
    `tune_fully`, all candidates are tuned for all epochs, also as in the paper.
    `polish` tunes the chosen network again, for all epochs (None: unless the loss is foreseen). Where scores are in
    units of the loss, networks are tuned briefly, and only the smallest that promises to pass for all epochs; after
    `tunings` of these the search ends, if one passed (None: when it is done).
    """

    framework: FrameworkName | None = None
    step: float = 0.5
    tolerance: float = 0.2
    smallest: float = 0.02
    give_up_margin: float = 0.1
    warm_start: bool = True
    tune_fully: bool = False
    polish: bool | None = None
    tunings: int | None = 1

    def __post_init__(self) -> None:
        allowed = [name for name in get_args(FrameworkName) if name != "baseline"]
        faults = broken_rules(
            self,
            ("framework", allowed.__contains__, f"allowed are {', '.join(allowed)}"),
            ("step tolerance smallest give_up_margin", lambda value: 0 < value < 1, "0 < value < 1 is needed"),
            ("tunings", lambda value: value is None or value >= 1, "at least 1 is needed, or None"),
            ("warm_start tune_fully", lambda value: isinstance(value, bool), "allowed are True and False"),
            ("polish", lambda value: value in (True, False, None), "allowed are True, False and None"),
        )
        if faults:
            raise ConfigError.of("SearchConfig", faults)


EFFORTS: dict[Effort, dict[str, bool | int | None]] = {
    "quick": {"tunings": 1, "polish": False},
    "normal": {"tunings": 3, "polish": False},
    "best": {"tunings": None, "polish": True},
}
"""What the efforts change in the settings of a search."""


def with_effort(search: SearchConfig, effort: Effort | None) -> SearchConfig:
    """Return the search as it goes with this effort; None: as it is.

    >>> with_effort(SearchConfig(), "best").tunings is None
    True
    """
    if effort is None:
        return search
    if effort not in EFFORTS:
        raise ConfigError(f"effort: {effort!r} given; allowed are {', '.join(EFFORTS)}")
    return replace(search, **EFFORTS[effort])  # type: ignore[arg-type]


_FIRST = 6.0
"""The expected rise of the loss, in units of the accuracy that may be lost, at which the search starts.
A rough start from trial runs; what is tried then corrects it."""

_LEAST_ALLOWED = 0.002
_INSIDE = 0.35  # a guess is at least so far from both ends of what is known, on a scale of logarithms
_NEAR, _STEEP = 0.6, 8.0
"""A guess between what passed and what failed may end the search if what failed keeps at least this share of what
passed, and lost at most so many times what is allowed: otherwise the accuracy may fall off a cliff anywhere, and what
failed says nothing of where."""


SAFE = 0.8
"""The chance to be certified from which on no larger network is tried, to have one to fall back on."""
_LEFT = 0.2
"""The part of what is lost after a short tuning that is still lost after a full one."""


@dataclass
class Recovery:
    """What full tunings left of the accuracy that was lost after short ones."""

    seen: list[tuple[float, float]] = field(default_factory=list)

    def note(self, briefly: float, fully: float) -> None:
        """Note what a network lost after a short tuning, and after the full one."""
        self.seen.append((briefly, fully))

    def expected(self, briefly: float) -> float:
        """Return what a network should lose after a full tuning, from what it lost after a short one.

        The last full tuning corrects what is expected. Where it gained more, it would have gained that without pruning
        too; where it gained less, the others lose as large a part.

        >>> recovery = Recovery()
        >>> recovery.expected(0.02)
        0.004
        >>> recovery.note(0.01, -0.005)
        >>> round(recovery.expected(0.02), 4)
        -0.003
        >>> recovery.note(0.02, 0.01)
        >>> recovery.expected(0.012)
        0.006
        """
        before, after = self.seen[-1] if self.seen else (0.0, 0.0)
        if after <= _LEFT * before:
            return after + _LEFT * (briefly - before)
        return briefly * min(after / before, 1.0) if before > 0 else briefly


@dataclass(frozen=True)
class Attempt:
    """A share that was kept, the accuracy that was lost, whether that is within the budget, and the network's size.

    Of one that could not be reached, the loss is infinite and the size unknown; one from which nothing was removed
    counts as what it was.
    """

    share: float
    drop: float
    passed: bool
    size: float | None = None


@dataclass(frozen=True)
class Stepping:
    """How a search for the smallest share goes; see `SearchConfig` for `step`, `tolerance` and `smallest`.

    `allowed` is the accuracy that may be lost; `axes` says how many are pruned by the same share. Without an `outlook`
    the share is multiplied by `step` until a candidate fails, then narrowed down.
    """

    allowed: float
    step: float
    tolerance: float
    smallest: float
    axes: int = 1
    outlook: Outlook | None = None

    def next_share(self, attempts: Sequence[Attempt]) -> float | None:
        """Return the share to try next; None if hardly anything smaller can be found.

        That is so if what passed keeps the smallest share, or if what failed, or is expected to fail, is within the
        tolerance of what passed, by the share or by the size.

        >>> halving = Stepping(allowed=0.01, step=0.5, tolerance=0.2, smallest=0.02)
        >>> halving.next_share([]), halving.next_share([Attempt(0.5, 0.0, passed=True)])
        (0.5, 0.25)
        """
        passed = min((attempt for attempt in attempts if attempt.passed), key=lambda one: one.share, default=None)
        largest = 1.0 if passed is None else passed.share
        worse = (attempt for attempt in attempts if not attempt.passed and attempt.share < largest)
        failed = max(worse, key=lambda one: one.share, default=None)
        nearest = largest * nearest_share(self.tolerance, self.axes)
        if largest <= self.smallest or (failed is not None and failed.share >= nearest):
            return None
        if self.outlook is None:
            return math.sqrt(largest * failed.share) if failed else max(largest * self.step, self.smallest)
        guess = self.outlook.share(self._loss(passed, failed, self.outlook))
        if passed is not None and guess >= nearest and self._is_known_well(passed, failed):
            return None
        if failed is None:
            beyond = nearest <= self.outlook.shares[-1]  # of which the outlook knows nothing
            return max(largest * self.step if beyond else min(guess, nearest), self.smallest)
        if passed is not None:
            if self._is_as_large(passed, failed):
                return None
            if self._is_cliff(failed):
                return math.sqrt(largest * failed.share)
        margin = _INSIDE * math.log(largest / failed.share)
        return math.exp(min(max(math.log(guess), math.log(failed.share) + margin), math.log(largest) - margin))

    def _is_known_well(self, passed: Attempt, failed: Attempt | None) -> bool:
        """Whether a guess of the smallest share is worth as much as a further attempt."""
        if failed is None:
            return passed.drop >= max(self.allowed, _LEAST_ALLOWED) / 2
        return failed.share >= passed.share * _NEAR and not self._is_cliff(failed)

    def _is_cliff(self, failed: Attempt) -> bool:
        """Whether so much was lost that nothing can be said of networks in between."""
        return failed.drop > _STEEP * max(self.allowed, _LEAST_ALLOWED)

    def _is_as_large(self, passed: Attempt, failed: Attempt) -> bool:
        """Whether what failed is smaller than what passed, but hardly so, because parts of it cannot shrink.

        One that is even larger was pruned from another network, and does not say how small this one can be.
        """
        if passed.size is None or failed.size is None:
            return False
        return passed.size * (1 - self.tolerance) <= failed.size < passed.size

    def _loss(self, passed: Attempt | None, failed: Attempt | None, outlook: Outlook) -> float:
        """Return the expected rise of the loss at which all of the allowed accuracy should be lost."""
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


def nearest_share(tolerance: float, axes: int) -> float:
    """Return the largest share of what passed worth trying: where several axes shrink together, so does the product.

    >>> nearest_share(0.36, 2)
    0.8
    """
    return float((1 - tolerance) ** (1 / axes))


def axes_of(move: Move, *, by_cost: bool) -> int:
    """Return how many axes shrink by a share that is kept; planned by cost, it is a share of the size.

    >>> axes_of(Move("both", "loss"), by_cost=False), axes_of(Move("both", "loss"), by_cost=True)
    (2, 1)
    """
    return 1 if by_cost else len(move.axes)


def most_steps(smallest: float, tolerance: float, axes: int = 1) -> int:
    """Return how many shares a search with an outlook tries: one at each end, then ever closer between what is known.

    There are more if many pass before the first fails.

    >>> most_steps(0.02, 0.2)
    9
    """
    between = math.log(smallest) / math.log(nearest_share(tolerance, axes))
    return 2 + math.ceil(math.log(max(between, 1.0)) / -math.log(1 - _INSIDE))
