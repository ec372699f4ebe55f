"""What scores ask of a layer: the weights of its filters, and the norm right behind it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from basisprune.basis.layers import BasisScalingConv
from basisprune.coupling import unit_outputs
from basisprune.errors import DataError, LayerError
from basisprune.torchkit.running import images_of, placed
from basisprune.torchkit.surgery import is_norm
from basisprune.torchkit.watching import dataflow_of
from basisprune.types import Coupling

Batches: TypeAlias = Iterable[object]
"""Prepared images with their labels, or what a `Task` reads as inputs and targets."""


@dataclass(frozen=True)
class Affine:
    """The weight and bias of a norm, one of each per channel."""

    weight: Tensor
    bias: Tensor


@torch.no_grad()
def filter_weights(model: nn.Module, name: str) -> Tensor:
    """The weights of each output channel of the layer, (c_o, -1); of a pair, of its second half, scales included."""
    layer = model.get_submodule(name)
    if isinstance(layer, BasisScalingConv):
        return layer.scaled_weight().flatten(1)
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor):
        raise LayerError(name, f"{type(layer).__name__} has no weight to score; name convs and linear layers")
    if getattr(layer, "transposed", False):  # (c_i, c_o / groups, *)
        weight = weight.unflatten(0, (int(getattr(layer, "groups", 1)), -1)).transpose(1, 2).flatten(0, 1)
    return weight.detach().flatten(1)


def filter_values(
    model: nn.Module, coupling: Coupling, worth: Mapping[str, Tensor], layers: Sequence[str]
) -> dict[str, Tensor]:
    """What each unit of each group is worth, given to all its filters: (c_o) for each of the layers.

    Filters that belong to no group, or to one whose worth is not known, get the highest worth of all.
    """
    highest = max((float(values.max()) for values in worth.values()), default=0.0)
    found = {name: torch.full((len(filter_weights(model, name)),), highest, dtype=torch.float64) for name in layers}
    for group in coupling.groups:
        for name in group.layers:
            if name in found and group.name in worth:
                index = unit_outputs(model, group, name)
                values = worth[group.name].double().cpu()
                found[name][torch.from_numpy(index).flatten()] = values.repeat_interleave(index.shape[1])
    return found


def first_images(model: nn.Module, batches: Iterable[object]) -> Tensor:
    """The images of the first of the batches, where the model is; raises DataError if there is none."""
    images = next((images_of(batch) for batch in batches), None)
    if images is None:
        raise DataError("batches: no batch came; give the validation data")
    return placed(images, model)


def norms_behind(model: nn.Module, layers: Sequence[str], batches: Iterable[object]) -> dict[str, Affine]:
    """For each layer the affine norm with a weight per channel that reads its output, the first if several do.

    Layers without one are left out. Found in a run on the first of the batches; raises DataError if there is none.
    """
    norms = {name: module for name, module in model.named_modules() if is_norm(module)}
    watched = {name: model.get_submodule(name) for name in layers}
    found: dict[str, Affine] = {}
    for norm, sources in dataflow_of(model, [first_images(model, batches)], watched, norms).sources.items():
        for name in (source for source in sources if source is not None):
            if (affine := _affine(norms[norm], model, name)) is not None:
                found.setdefault(name, affine)
    return found


def _affine(norm: nn.Module, model: nn.Module, name: str) -> Affine | None:
    """The norm's weight and bias, if it has one of each per filter of the layer."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    # torch's own LayerNorm reads the last axis, which of a conv's output is not the channels.
    by_channel = type(norm) is not nn.LayerNorm or isinstance(model.get_submodule(name), nn.Linear)
    if not (by_channel and isinstance(weight, Tensor) and isinstance(bias, Tensor)):
        return None
    return Affine(weight, bias) if weight.shape == (len(filter_weights(model, name)),) else None
