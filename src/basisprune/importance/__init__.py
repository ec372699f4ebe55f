"""model + data -> Scores: how much each basis vector or filter matters."""

from basisprune.importance.filters import FilterMethod, score_filters
from basisprune.importance.loss import (
    BasisLoss,
    FilterLoss,
    basis_loss,
    filter_loss,
    filter_statistics,
    joint_loss,
    loss_scores,
)
from basisprune.importance.taylor import taylor_scores

__all__ = [
    "BasisLoss",
    "FilterLoss",
    "FilterMethod",
    "basis_loss",
    "filter_loss",
    "filter_statistics",
    "joint_loss",
    "loss_scores",
    "score_filters",
    "taylor_scores",
]
