"""What scores in units of the loss expect of pruning before anything is pruned (not in the paper)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn

from basisprune.errors import TooMuchError
from basisprune.planning import PlanConfig, largest_ratio, unit_scores
from basisprune.types import BasisPlan, FilterPlan, Scores

_STEP = 0.9
"""The ratio of one share looked at to the next."""


@dataclass(frozen=True)
class Outlook:
    """By how much the loss is expected to rise when only a share is kept, for shares from 1 downward.

    The true rise may be several times larger or, after tuning, smaller; their order is what counts.

    >>> outlook = Outlook((1.0, 0.5, 0.25), (0.0, 0.1, 0.4))
    >>> outlook.share(0.1), outlook.loss(0.375)
    (0.5, 0.25)
    """

    shares: tuple[float, ...]
    losses: tuple[float, ...]

    @classmethod
    def of(cls, rise: Callable[[float], float], smallest: float) -> Outlook:
        """The outlook for shares down to the smallest, or to the last for which `rise` finds that much to remove."""
        shares, losses = [1.0], [0.0]
        while shares[-1] > smallest:
            share = max(shares[-1] * _STEP, smallest)
            try:
                losses.append(max(rise(share), losses[-1]))
            except TooMuchError:
                break
            shares.append(share)
        return cls(tuple(shares), tuple(losses))

    def loss(self, share: float) -> float:
        """The expected rise if this share is kept; for less than the smallest share known, that of the smallest."""
        return float(np.interp(share, self.shares[::-1], self.losses[::-1]))

    def share(self, loss: float) -> float:
        """The share whose expected rise is this one; the smallest known if all are expected to lose less."""
        return float(np.interp(loss, self.losses, self.shares))


def expected_of_all(rises: Sequence[Callable[[float], float]], share: float) -> float:
    """The sum of what is expected of all that is pruned, each as far as it goes; raises TooMuchError if none does."""
    ratio = 1 - share
    most = [largest_ratio(ratio, rise) for rise in rises]
    if max(most) < ratio:
        raise TooMuchError(f"pruning_ratio: {ratio} cannot be removed; pass at most {max(most)}")
    return sum(rise(possible) for rise, possible in zip(rises, most, strict=True))


def expected_of_basis(plan: BasisPlan, scores: Scores) -> float:
    """The expected rise of the loss from a plan made by `loss_scores`: half the sum of all that go."""
    lost = (_lost(np.asarray(scores.layers[name].values), layer.keep) for name, layer in plan.layers.items())
    return sum(lost) / 2


def expected_of_filters(model: nn.Module, plan: FilterPlan, scores: Scores, config: PlanConfig) -> float:
    """The same for a plan of filters; the scores of the filters of a unit agree, and count once."""
    groups = plan.coupling.groups
    lost = (_lost(unit_scores(model, group, scores, config), plan.groups[group.name].keep) for group in groups)
    return sum(lost) / 2


def _lost(values: np.ndarray[tuple[int, ...], np.dtype[np.float64]], keep: tuple[int, ...]) -> float:
    return float(values.sum() - values[list(keep)].sum())
