"""Basis vectors, filters and whole branches in one plan, by what each costs: a knapsack (not in the paper)."""

from basisprune.joint_plan.planning import Costs, PlanFrontier, plan_frontier, plan_together

__all__ = ["Costs", "PlanFrontier", "plan_frontier", "plan_together"]
