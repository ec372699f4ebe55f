"""The law of filter pruning: a network without filters computes what it computes with them at zero."""

from __future__ import annotations

import torch
from torch import nn

from basisprune.types import FilterPlan


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
