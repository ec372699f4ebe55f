"""model + data -> Scores: how much each basis vector or filter matters."""

from basisprune.importance.basis_loss import BasisLoss, basis_loss, loss_scores
from basisprune.importance.basis_taylor import taylor_scores
from basisprune.importance.filter_loss import FilterLoss, filter_loss, filter_statistics, joint_loss
from basisprune.importance.filters import FilterMethod, score_filters

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
