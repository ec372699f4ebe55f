"""What may be lost, and how much was.

goal  planning                        budgets and ratios; plans of least loss for every cost
metrics                               what a budget is counted in
evidence                              which test suits which metric and which images
proportions  means  resampling        the tests and intervals
certify                               the order of the tests, and what they certify
shares                                how many images search, confirm and test by default
"""

from basisprune.budget.goal import Budget, Goal, MetricBudget, Optimize, Ratios

__all__ = ["Budget", "Goal", "MetricBudget", "Optimize", "Ratios"]
