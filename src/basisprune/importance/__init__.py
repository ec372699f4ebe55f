"""model + data -> Scores: how much each basis vector or filter matters."""

from basisprune.importance.filters import FilterMethod as FilterMethod
from basisprune.importance.filters import score_filters as score_filters
from basisprune.importance.loss import BasisLoss as BasisLoss
from basisprune.importance.loss import FilterLoss as FilterLoss
from basisprune.importance.loss import basis_loss as basis_loss
from basisprune.importance.loss import filter_loss as filter_loss
from basisprune.importance.loss import filter_statistics as filter_statistics
from basisprune.importance.loss import joint_loss as joint_loss
from basisprune.importance.loss import loss_scores as loss_scores
from basisprune.importance.taylor import taylor_scores as taylor_scores
