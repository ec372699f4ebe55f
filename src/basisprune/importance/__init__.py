"""model + data -> Scores: how much each basis vector or filter matters."""

from basisprune.importance.filters import FilterMethod, score_filters
from basisprune.importance.taylor import taylor_scores

__all__ = ["FilterMethod", "score_filters", "taylor_scores"]
