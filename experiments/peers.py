"""What people use instead, in the same pipeline: torch-pruning, and truncated singular value decomposition."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import torch_pruning
from torch import Tensor, nn

from basisprune import (
    Coupling,
    Pipeline,
    decompose,
    plan_basis,
    plan_filters,
    prune_basis,
    prune_filters,
    score_filters,
    trace_coupling,
)
from basisprune.basis.layers import basis_pairs
from basisprune.pipeline import Enough, State
from basisprune.search import Move
from basisprune.training.trainable import find_classifiers, set_trainable
from basisprune.transfer.model import spec_of
from basisprune.types import LayerScores, Scores


def magnitude_move(pipeline: Pipeline) -> Move:
    """Filters by torch-pruning's magnitudes of groups, compared over the whole network."""
    return _torch_pruning_move(pipeline, "magnitude")


def taylor_move(pipeline: Pipeline) -> Move:
    """Filters by torch-pruning's Taylor importance of groups, compared over the whole network."""
    return _torch_pruning_move(pipeline, "taylor")


def _torch_pruning_move(pipeline: Pipeline, method: str) -> Move:
    def prune(state: State, ratio: float, enough: Enough | None) -> State:
        pruned = torch_pruned(state.model, method, ratio, pipeline.scoring_batches())
        return pipeline.tune(state, f"{state.key}, torch-pruning {method} {ratio!r}", pruned, enough=enough)

    return Move("filters", prune)


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


def inside_move(pipeline: Pipeline, method: str) -> Move:
    """Filters by one of the paper's scores, those that skip connections tie together left alone."""

    def prune(state: State, ratio: float, enough: Enough | None) -> State:
        device = next(state.model.parameters()).device
        coupling = untied(trace_coupling(state.model, torch.zeros(2, *pipeline.spec.shape, device=device)))
        scores = score_filters(state.model, method, coupling.layers, pipeline.scoring_batches())
        plan = plan_filters(state.model, scores, ratio, pipeline.settings.filter_plan, coupling=coupling)
        pruned = prune_filters(state.model, plan)
        return pipeline.tune(state, f"{state.key}, {method} inside {ratio!r}", pruned, plan, enough=enough)

    return Move("filters", prune)


def untied(coupling: Coupling) -> Coupling:
    """The coupling without the groups whose channels several layers make; ratios then are of what is left."""
    return replace(coupling, groups=tuple(group for group in coupling.groups if len(group.layers) == 1))


def svd_pipeline(pipeline: Pipeline) -> Pipeline:
    """The pipeline with a recipe for plain truncation: nothing is made up for, scaling factors are not trained."""
    recipe = pipeline.settings
    recipe = replace(
        recipe,
        basis="weights",
        scale_init=1.0,
        compensate="none",
        rebase=False,
        finetune=replace(recipe.finetune, train_scales=False),
        plan=replace(recipe.plan, normalise="max", per="vector"),
    )
    folder = None if pipeline.checkpoints is None else Path(pipeline.checkpoints) / "truncated-svd"
    plain = replace(pipeline, recipe=recipe, checkpoints=folder)
    plain.adopt(pipeline.dense())
    return plain


def svd_start(pipeline: Pipeline) -> State:
    """The trained network with every conv split by its singular values: the same function, so nothing to train."""
    dense = pipeline.dense()
    return replace(dense, key="svd", model=decompose(dense.model, basis="weights", scale_init=1.0))


def svd_move(pipeline: Pipeline) -> Move:
    """Truncation by singular values, each in relation to the largest of its layer; no scaling factors, no Taylor."""

    def prune(state: State, ratio: float, enough: Enough | None) -> State:
        plan = plan_basis(singular_values(state.model), ratio, pipeline.settings.plan)
        pruned = prune_basis(state.model, plan, compensate=pipeline.settings.compensate)
        return pipeline.tune(state, f"{state.key}, truncated {ratio!r}", pruned, plan, enough=enough)

    return Move("basis", prune)


def singular_values(model: nn.Module) -> Scores:
    """The singular values of every conv that was split by them and not scaled."""
    layers = {
        name: LayerScores(tuple(pair.scaling.weight.detach().double().flatten(2).norm(dim=(0, 2)).tolist()))
        for name, pair in basis_pairs(model).items()
    }
    return Scores("singular values", layers)
