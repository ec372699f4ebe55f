"""What people use instead, in the same pipeline: torch-pruning, and truncated singular value decomposition."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_pruning
from torch import Tensor, nn

from basisprune import FilterPlan, Pipeline, decompose
from basisprune.basis.layers import basis_pairs
from basisprune.coupling import trace_coupling
from basisprune.importance import score_filters
from basisprune.method.states import FULLY, Plan, State, Tuning
from basisprune.planning import plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.recipes import Framework, Move, Step
from basisprune.training.trainable import find_classifiers, set_trainable
from basisprune.transfer.model import spec_of
from basisprune.types import Coupling, LayerScores, Scores

TRUNCATION = Move("basis", "singular values")
INSIDE_MOVES = {Move("filters", f"{scores} inside blocks"): scores for scores in ("l1", "taylor", "hrank")}
TORCH_PRUNING = {Move("filters", f"torch-pruning {method}"): method for method in ("magnitude", "taylor")}
RIVALS = {move.scores: Framework(move.scores, "dense", (move,)) for move in (*INSIDE_MOVES, *TORCH_PRUNING)} | {
    "truncated svd": Framework("truncated svd", "svd", (TRUNCATION,))
}
"""What people use instead, by name."""


@dataclass
class RivalPipeline(Pipeline):
    """The pipeline, and the moves of the rivals beside its own."""

    def start(self, framework: Framework) -> State:
        """The trained network that the framework prunes; for truncation it is split by its singular values."""
        if framework.start != "svd":
            return super().start(framework)
        dense = self.dense()  # the same function, so nothing to train
        return replace(dense, steps=(Step("svd"),), model=decompose(dense.model, basis="weights", scale_init=1.0))

    def prune(self, state: State, move: Move, ratio: float, tuning: Tuning = FULLY) -> State:
        """The state without the fraction `ratio` of what the move counts."""
        steps = state.after(Step(move.scores, ratio))
        plans: tuple[Plan, ...] = ()
        if move == TRUNCATION:
            basis = plan_basis(singular_values(state.model), ratio, self.settings.plan)
            plans, pruned = (basis,), prune_basis(state.model, basis, compensate=self.settings.compensate)
        elif move in INSIDE_MOVES:
            filters = self._plan_inside(state.model, INSIDE_MOVES[move], ratio)
            plans, pruned = (filters,), prune_filters(state.model, filters)
        elif move in TORCH_PRUNING:
            pruned = torch_pruned(state.model, TORCH_PRUNING[move], ratio, self.scoring.batches())
        else:
            return super().prune(state, move, ratio, tuning)
        return self.tune(state, steps, pruned, *plans, tuning=tuning)

    def _plan_inside(self, model: nn.Module, method: str, ratio: float) -> FilterPlan:
        """Filters by one of the paper's scores, those that skip connections tie together left alone."""
        device = next(model.parameters()).device
        coupling = untied(trace_coupling(model, torch.zeros(2, *self.spec.shape, device=device)))
        scores = score_filters(model, method, coupling.layers, self.scoring.batches())
        return plan_filters(model, scores, ratio, self.settings.filter_plan, coupling=coupling)

    def for_truncation(self) -> RivalPipeline:
        """The pipeline with a recipe for plain truncation: nothing is made up for, scales are not trained."""
        recipe = self.settings
        recipe = replace(
            recipe,
            basis="weights",
            scale_init=1.0,
            compensate="none",
            rebase=False,
            finetune=replace(recipe.finetune, train_scales=False),
            plan=replace(recipe.plan, normalise="max", per="vector"),
        )
        folder = None if self.checkpoints is None else Path(self.checkpoints) / "truncated-svd"
        plain = replace(self, recipe=recipe, checkpoints=folder)
        plain.adopt(self.dense())
        return plain


def torch_pruned(model: nn.Module, method: str, ratio: float, batches: Iterable[tuple[Tensor, Tensor]]) -> nn.Module:
    """The model without the fraction `ratio` of its channels, by torch-pruning's importance of groups.

    Channels are compared over the whole network. That has no floor there: `max_pruning_ratio` is looked at only
    before a step.
    """
    pruned = copy.deepcopy(model).eval()
    for parameter in pruned.parameters():
        parameter.requires_grad_(True)
    device = next(pruned.parameters()).device
    for images, labels in batches if method == "taylor" else ():
        F.cross_entropy(pruned(images.to(device)), labels.to(device)).backward()
    importances = {
        "magnitude": torch_pruning.importance.MagnitudeImportance,
        "taylor": torch_pruning.importance.TaylorImportance,
    }
    pruner = torch_pruning.pruner.BasePruner(
        pruned,
        torch.zeros(1, *spec_of(model).shape, device=device),
        importance=importances[method](),
        global_pruning=True,
        pruning_ratio=ratio,
        ignored_layers=find_classifiers(pruned),
    )
    pruner.step()
    pruned.zero_grad(set_to_none=True)
    set_trainable(pruned)
    return pruned


def untied(coupling: Coupling) -> Coupling:
    """The coupling without the groups whose channels several layers make; ratios then are of what is left."""
    return replace(coupling, groups=tuple(group for group in coupling.groups if len(group.layers) == 1))


def singular_values(model: nn.Module) -> Scores:
    """The singular values of every conv that was split by them and not scaled."""
    layers = {
        name: LayerScores(tuple(pair.scaling.weight.detach().double().flatten(2).norm(dim=(0, 2)).tolist()))
        for name, pair in basis_pairs(model).items()
    }
    return Scores("singular values", layers)
