"""Filter plans of small networks, and their law: without filters, they compute what they do with them at zero."""

from __future__ import annotations

import torch
from networks import NETWORKS
from torch import Tensor, nn

from basisprune.basis.split import decompose
from basisprune.coupling import trace_coupling
from basisprune.importance import score_filters
from basisprune.plan import PlanConfig, plan_filters
from basisprune.types import FilterPlan

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


def _kind(model: nn.Module, name: str) -> str:
    return type(model.get_submodule(name)).__name__
