"""model + plan -> smaller model (the paper's Figure 3)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair, BasisScalingConv, basis_pairs
from basisprune.basis.refit import refit_scaling
from basisprune.coupling import check_keep, cut, hand_over
from basisprune.coupling.cutting import drop_blocks
from basisprune.errors import ConfigError, PlanError
from basisprune.torchkit.moments import OutputStatistics
from basisprune.torchkit.surgery import Layer, clone_conv, is_transposed, make_linear, named_tensors, replace_module
from basisprune.types import BasisPlan, FilterPlan, JointPlan, LayerPlan

Compensation: TypeAlias = Literal["none", "mean", "refit"]


def prune_basis(
    model: nn.Module,
    plan: BasisPlan,
    *,
    compensate: Compensation = "mean",
    statistics: Mapping[str, OutputStatistics] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Return the model without the basis vectors that the plan does not keep; channels outside the pairs stay.

    What the removed vectors contributed does not have to vanish. `compensate="mean"` moves its mean into the
    bias, where the plan knows the means (a bias is added where there was none). "refit" moves all that the
    vectors which stay can predict of it, by least squares, into their columns and the bias; it needs the
    `statistics` of this model from `basis_statistics(model, batches)`. "none" drops it.

    Layers that the plan does not name are left alone. Raises PlanError, and changes nothing, when plan or
    statistics do not fit.
    """
    _check_compensation(compensate, statistics, ("refit",))
    pairs, known = basis_pairs(model), statistics or {}
    faults = [fault for name, layer in plan.layers.items() if (fault := _misfit(name, layer, pairs.get(name)))]
    if compensate == "refit" and not faults:
        untold = [_untold(name, pairs[name], known.get(name)) for name, layer in plan.layers.items() if layer.removed]
        faults = [fault for fault in untold if fault]
    if faults:
        raise PlanError.of("the plan does not fit this model", faults)
    pruned = {
        name: _pruned_pair(pairs[name], layer, compensate, known.get(name))
        for name, layer in plan.layers.items()
        if layer.removed
    }
    result = model if inplace else copy.deepcopy(model)
    for name, pair in pruned.items():
        result = replace_module(result, name, pair)
    return result


def _check_compensation(
    compensate: Compensation, statistics: Mapping[str, OutputStatistics] | None, needing: tuple[Compensation, ...]
) -> None:
    if compensate not in get_args(Compensation):
        raise ConfigError(f"compensate: {compensate!r} given; allowed are {', '.join(get_args(Compensation))}")
    if (compensate in needing) != (statistics is not None):
        which = " or ".join(map(repr, needing))
        raise ConfigError(f"compensate={which} and statistics go together; pass both or neither")


def _untold(name: str, pair: BasisPair, statistics: OutputStatistics | None) -> str | None:
    groups, width = pair.scaling.groups, pair.rank // pair.scaling.groups
    given = None if statistics is None else tuple(statistics.covariance.shape)
    if given == (groups, width, width):
        return None
    return f"{name}: covariances {given} given for rank {pair.rank}; take basis_statistics of this model"


def _misfit(name: str, layer: LayerPlan, pair: BasisPair | None) -> str | None:
    if pair is None:
        return f"{name}: no decomposed layer of that name; decompose the model first"
    if layer.rank != pair.rank:
        return f"{name}: the plan is for rank {layer.rank}, the layer has {pair.rank}; make a new plan"
    groups, width = pair.scaling.groups, pair.rank // pair.scaling.groups
    if not all(isinstance(index, int) for index in layer.keep):
        return f"{name}: keep must hold whole numbers; {layer.keep[:8]} given"
    if not layer.keep or list(layer.keep) != sorted(set(layer.keep)):
        return f"{name}: keep must be sorted, without repeats, and not empty; {layer.keep[:8]} given"
    if layer.keep[0] < 0 or layer.keep[-1] >= pair.rank:
        return f"{name}: keep must lie in 0 to {pair.rank - 1}; {layer.keep[0]} to {layer.keep[-1]} given"
    if layer.means is not None and len(layer.means) != layer.rank:
        return f"{name}: {len(layer.means)} means given for rank {layer.rank}"
    per_group = [sum(index // width == group for index in layer.keep) for group in range(groups)]
    if len(set(per_group)) != 1:
        return f"{name}: each of its {groups} groups must keep equally many; {per_group} given"
    return None


@torch.no_grad()
def _pruned_pair(
    pair: BasisPair, layer: LayerPlan, compensate: Compensation, statistics: OutputStatistics | None
) -> BasisPair:
    scaling, keep = pair.scaling, list(layer.keep)
    if statistics is not None:
        return BasisPair(_slim_basis(pair.basis, layer.keep, scaling.groups), refit_scaling(scaling, keep, statistics))
    weight = _keep_columns(scaling.weight, layer.keep, scaling.groups)
    bias = None if scaling.bias is None else scaling.bias.clone()
    if compensate == "mean" and layer.means is not None:
        means = torch.tensor(layer.means, dtype=torch.float64, device=weight.device)
        means[keep] = 0
        lost = (scaling.columns() @ means.view(scaling.groups, -1, 1)).flatten().to(weight.dtype)
        bias = lost if bias is None else bias + lost
    slim = BasisScalingConv(weight, scale=scaling.scale[keep], bias=bias, groups=scaling.groups)
    slim.scale.requires_grad_(scaling.scale.requires_grad)
    return BasisPair(_slim_basis(pair.basis, layer.keep, scaling.groups), slim)


def _keep_columns(weight: Tensor, keep: tuple[int, ...], groups: int) -> Tensor:
    """(c, r / groups, *) with the kept of all r = groups * r' columns: each group of rows keeps its own."""
    width = weight.shape[1]
    local = torch.tensor(keep, device=weight.device).view(groups, -1) % width
    rows = weight.unflatten(0, (groups, -1))
    return torch.cat([rows[group][:, local[group]] for group in range(groups)])


def _slim_basis(basis: Layer, keep: tuple[int, ...], groups: int) -> Layer:
    weight = basis.weight
    if isinstance(basis, nn.Linear):
        return make_linear(weight[list(keep)], None)
    kept = _keep_columns(weight, keep, groups) if is_transposed(basis) else weight[list(keep)]
    return clone_conv(basis, kept, None)


def prune_filters(
    model: nn.Module,
    plan: FilterPlan,
    *,
    compensate: Compensation = "none",
    statistics: Mapping[str, OutputStatistics] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Return the model without the filters that the plan does not keep, and without all that depends on them.

    What the filters output behind their activations does not have to vanish: `compensate="mean"` moves
    its mean into the biases of the layers that read it, "refit" all that their other inputs predict of it, by least
    squares, into their weights too. Both need the `statistics` that `filter_loss` or `filter_statistics` tell of
    this model. "none" is the paper's. Raises PlanError, and changes nothing, when plan or statistics do not fit.
    """
    _check_compensation(compensate, statistics, ("mean", "refit"))
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(model)}
    faults = [
        f"{name}: the plan is for shape {wanted}, the model has {shapes.get(name, 'none of that name')}"
        for name, wanted in plan.shapes.items()
        if shapes.get(name) != wanted
    ]
    if faults:
        raise PlanError.of("the plan does not fit this model; make a new one", faults)
    keep = {name: group.keep for name, group in plan.groups.items()}
    check_keep(plan.coupling, keep)
    coupling = plan.coupling
    if statistics is not None:
        model = model if inplace else copy.deepcopy(model)
        coupling = hand_over(model, coupling, keep, statistics, refit=compensate == "refit")
    return cut(model, coupling, keep, inplace=inplace or statistics is not None)


def prune_together(
    model: nn.Module,
    plan: JointPlan,
    *,
    compensate: Compensation = "refit",
    basis: Mapping[str, OutputStatistics] | None = None,
    filters: Mapping[str, OutputStatistics] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Return the model without the basis vectors and the filters that the plan does not keep, as one move.

    `compensate` is as in `prune_basis` and `prune_filters`; `basis` and `filters` are the statistics of this model from
    `joint_loss`, both before pruning. Of a block that goes, the mean of what its branch added stays. Raises PlanError,
    and changes nothing, when the plan does not fit.
    """
    smaller = prune_filters(
        model,
        plan.filters,
        compensate=compensate,
        statistics=filters if compensate != "none" else None,
        inplace=inplace,
    )
    if plan.basis.layers:
        known = basis if compensate == "refit" else None
        smaller = prune_basis(smaller, plan.basis, compensate=compensate, statistics=known, inplace=True)
    if not plan.blocks:
        return smaller
    last = {block.last: plan.basis.layers[block.last] for block in plan.blocks}
    means = {name: tuple(layer.means[kept] for kept in layer.keep) for name, layer in last.items() if layer.means}
    return drop_blocks(smaller, plan.blocks, {} if compensate == "none" else means, inplace=True)
