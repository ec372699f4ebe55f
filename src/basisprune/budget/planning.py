"""A network and what to minimise -> the plans of least loss for every budget (not in the paper)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch.nn.functional as F
from torch import nn

from basisprune.basis.decompose import recompose
from basisprune.budget.goal import Optimize
from basisprune.costs import weight_uses
from basisprune.coupling.cutting import find_blocks
from basisprune.deploy.timing import measured_table, read_table, time_network, wanted_shapes
from basisprune.importance.layer_access import Batches
from basisprune.importance.loss import BasisLoss, FilterLoss, basis_loss, filter_loss, joint_loss
from basisprune.joint_plan import Costs, PlanFrontier, plan_frontier
from basisprune.layer_times import TimeTable
from basisprune.planning import Per, PlanConfig
from basisprune.pruning import Compensation, prune_filters, prune_together
from basisprune.recipes import Move, Step
from basisprune.torchkit.running import Loss
from basisprune.torchkit.watching import example_input
from basisprune.transfer.model import spec_of
from basisprune.types import Coupling, FilterPlan, InputSpec, JointPlan, Scores

_PER: dict[Optimize, Per] = {"params": "parameter", "macs": "mac", "latency": "latency"}
NO_BASIS, NO_FILTERS = BasisLoss(Scores("loss", {}), {}), FilterLoss(Scores("loss", {}), {})  # nothing is pruned


@dataclass(frozen=True)
class Scored:
    """A network, decomposed if its basis is pruned, with the worth of all that can go."""

    model: nn.Module
    coupling: Coupling
    basis: BasisLoss
    filters: FilterLoss

    @classmethod
    def of(
        cls,
        model: nn.Module,
        coupling: Coupling,
        batches: Batches,
        axes: tuple[str, ...],
        *,
        refit: bool = False,
        loss: Loss = F.cross_entropy,
    ) -> Scored:
        """Score what is pruned on these axes, in one pass over the images; `refit` as in `filter_loss`."""
        if "filters" not in axes:
            return cls(model, coupling, basis_loss(model, batches, loss=loss), NO_FILTERS)
        if "basis" not in axes:
            return cls(model, coupling, NO_BASIS, filter_loss(model, coupling, batches, refit=refit, loss=loss))
        return cls(model, coupling, *joint_loss(model, coupling, batches, refit=refit, loss=loss))

    def thinned(self, plan: FilterPlan, compensate: Compensation) -> nn.Module:
        """Remove the filters of the plan, and merge every pair into the one layer that it stands for."""
        known = None if compensate == "none" else self.filters.statistics
        return recompose(prune_filters(self.model, plan, compensate=compensate, statistics=known), inplace=True)

    def pruned(self, plan: JointPlan, compensate: Compensation) -> nn.Module:
        statistics = (self.basis.statistics, self.filters.statistics)
        return prune_together(self.model, plan, compensate=compensate, basis=statistics[0], filters=statistics[1])


@dataclass(frozen=True)
class CostPlanner:
    """Plans what goes by how much loss it costs for each parameter, multiply-add or second; by time, those of `table`.

    Without a table, the network's layers are measured on this machine. `elsewhere` says that the table is of another
    one, whose times cannot be measured here.
    """

    optimize: Optimize
    table: TimeTable | None = None
    elsewhere: bool = False

    @classmethod
    def of(
        cls,
        optimize: Optimize,
        device: Path | None,
        model: nn.Module,
        say: Callable[[str], None],
        keep: Callable[[Callable[[], TimeTable]], TimeTable] = lambda measure: measure(),
    ) -> CostPlanner | None:
        """The planner for a model, with the times of the device in that file, or else of this machine.

        `keep` is given the measurement, and returns that of an earlier start of the run if there is one. None for
        "params", where the same share of all that is pruned goes, as in the paper.
        """
        if optimize == "params":
            return None
        if optimize == "macs":
            return cls(optimize)
        if device is not None:
            return cls(optimize, read_table(device), elsewhere=True)
        return cls(optimize, keep(lambda: measured_table(wanted_shapes(model, spec_of(model).shape), say=say)))

    def step(self, move: Move, ratio: float) -> Step:
        """The pruning of this fraction, named after what is counted, and what the move prunes unless that is both.

        >>> planner = CostPlanner("macs")
        >>> str(planner.step(Move("basis", "basis"), 0.3)), str(planner.step(Move("both", "loss"), 0.3))
        ('macs basis 0.3', 'macs 0.3')
        """
        return Step(self.optimize if move.axis == "both" else f"{self.optimize} {move.axis}", ratio)

    def describe(self, plan: JointPlan, *thinned: FilterPlan) -> str:
        """Word what a plan removes, and what went before it."""
        counted = {"params": "parameters", "macs": "multiply-adds", "latency": "time"}[self.optimize]
        filters = sum(each.removed for each in thinned or (plan.filters,))
        parts = [f"{plan.basis.removed} basis vectors", f"{filters} filters"]
        if plan.blocks:
            parts.append(f"{len(plan.blocks)} whole branch{'es' if len(plan.blocks) > 1 else ''}")
        return f"planned by {counted}, removing {', '.join(parts)}"

    def frontier(self, scored: Scored, config: PlanConfig, spec: InputSpec, say: Callable[[str], None]) -> PlanFrontier:
        """Plan with the least loss for every budget."""
        costs: Costs | None = None
        config = replace(config, per=_PER[self.optimize], normalise="none")
        if self.optimize == "macs":
            costs = weight_uses(scored.model, spec.shape)
        elif self.optimize == "latency":
            costs = time_network(scored.model, spec.shape, self.table, say=say)
            config = replace(config, round_to=costs.table.block)
        say(f"planning by {self.optimize}")
        return plan_frontier(
            scored.model,
            scored.basis.scores,
            scored.filters.scores,
            config,
            coupling=scored.coupling,
            costs=costs,
            blocks=find_blocks(scored.model, example_input(scored.model, spec.shape)),
        )
