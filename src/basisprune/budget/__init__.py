"""What may be lost: the goal of a run, and how the promise to keep to it is certified."""

from basisprune.budget.goal import Budget, Goal, MetricBudget, Optimize, Ratios

__all__ = ["Budget", "Goal", "MetricBudget", "Optimize", "Ratios"]
