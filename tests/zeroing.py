"""Filter plans of small networks, and their law: without filters, they compute what they do with them at zero."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from networks import NETWORKS
from torch import Tensor, nn

from basisprune.basis.decompose import decompose
from basisprune.coupling import trace_coupling
from basisprune.importance import score_filters
from basisprune.planning import PlanConfig, plan_filters
from basisprune.types import Coupling, FilterPlan

FREE = PlanConfig(normalise="max", min_share=0.0)


def planned_filters(
    name: str, ratio: float, config: PlanConfig = FREE, *, split: bool = False
) -> tuple[nn.Module, Tensor, FilterPlan]:
    """The network of that name, images for it, and a plan that removes that share of its filters."""
    model, images = NETWORKS[name]()
    if split:
        model = decompose(model, scale_init=1.0)
    coupling = trace_coupling(model, images)
    scores = score_filters(model, "l1", coupling.layers)
    return model, images, plan_filters(model, scores, ratio, config, coupling=coupling)


def zeroed(model: nn.Module, plan: FilterPlan) -> None:
    """Makes the filters that go exactly zero where they are produced: weights, biases and norms."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    for group in plan.coupling.groups:
        gone = sorted(set(range(group.size)) - set(plan.groups[group.name].keep))
        for axis in group.axes:
            tensor = tensors.get(axis.parameter)
            layer = axis.parameter.rpartition(".")[0]
            produced = layer in group.layers and axis.dim == (1 if "Transpose" in _kind(model, layer) else 0)
            if tensor is not None and (tensor.dim() == 1 or produced):
                places = torch.tensor(axis.index).view(group.size, -1)[gone].flatten()
                tensor.data.index_fill_(axis.dim, places, 0.0)


def without_channels(model: nn.Module, coupling: Coupling, keep: Mapping[str, Sequence[int]]) -> nn.Module:
    """The network with every parameter (not the statistics) of the channels that are not kept set to zero."""
    result = copy.deepcopy(model)
    parameters = dict(result.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for group in coupling.groups:
            kept = keep.get(group.name, range(group.size))
            lost = torch.tensor([unit for unit in range(group.size) if unit not in kept], dtype=torch.int64)
            for axis in group.axes:
                if axis.parameter in parameters:
                    places = torch.tensor(axis.index).view(group.size, -1)[lost].flatten()
                    parameters[axis.parameter].index_fill_(axis.dim, places, 0.0)
    return result


def _kind(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__
