"""model + data -> Scores: how much each basis vector matters."""

from basisprune.importance.taylor import taylor_scores

__all__ = ["taylor_scores"]
