"""What channels said that are to be cut, handed over to those that stay, in the layers that read them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair, BasisScalingConv, half_name
from basisprune.basis.refit import least_squares
from basisprune.coupling.cutting import dropped, unit_inputs, unit_outputs
from basisprune.errors import PlanError
from basisprune.torchkit.moments import OutputStatistics
from basisprune.torchkit.surgery import Layer, is_plain, is_transposed
from basisprune.types import Axis, Coupling

FAINT = 1.0
"""As in `least_squares`: filters that hardly ever fire, by the side of others, are not what these depend on."""


@torch.no_grad()
def hand_over(
    model: nn.Module,
    coupling: Coupling,
    keep: Mapping[str, Sequence[int]],
    statistics: Mapping[str, OutputStatistics],
    *,
    refit: bool,
) -> Coupling:
    """Change the model, in place, so that less is lost when it is cut; return the coupling to cut it by then.

    In every conv or linear layer that reads channels which go, their mean over images and positions moves into the
    bias (of a pair, into that of its second half), and with `refit` all that least squares predict of them from the
    channels that stay, x_P ~ m_P + A (x_K - m_K): W_K + W_P A, b + W_P (m_P - A m_K), with one A for the whole kernel.
    A layer without bias gets one, which the coupling returned knows of. `statistics` are `input_statistics`.

    A constant handed to the bias is exact inside of a map; where the layer pads with zeros, its border sees the
    constant too. Layers whose weight is not what they convolve with (weight standardisation) and those without
    statistics stay as they are. Raises PlanError for statistics that do not fit.
    """
    groups = {group.name: group for group in coupling.groups}
    changes = []
    for name, parts in unit_inputs(model, coupling).items():
        lost = {group: index[dropped(groups[group], keep)].ravel() for group, index in parts.items()}
        gone = np.unique(np.concatenate(list(lost.values())))
        layer = cast("Layer", model.get_submodule(name))  # no others are listed
        if len(gone) and name in statistics and is_plain(layer):
            changes.append(_change(name, layer, gone.tolist(), statistics[name], refit))
    biases = [new for change in changes if (new := _carry_out(model, change)) is not None]
    return _with_biases(model, coupling, biases) if biases else coupling


@dataclass(frozen=True)
class _Change:
    name: str
    layer: Layer
    weight: Tensor
    constant: Tensor


def _change(name: str, layer: Layer, gone: list[int], known: OutputStatistics, refit: bool) -> _Change:
    weight = _per_group(layer)  # (groups, outputs, inputs, places of the kernel)
    groups, _, width, _ = weight.shape
    if known.mean.numel() != groups * width:
        raise PlanError(f"{name}: means of {known.mean.numel()} channels given, it reads {groups * width}")
    out = torch.zeros(groups, width, dtype=torch.bool, device=weight.device)
    out.view(-1)[gone] = True
    lost, kept = out.nonzero()[:, 1].view(groups, -1), (~out).nonzero()[:, 1].view(groups, -1)
    mean = known.mean.to(weight.device).view(groups, width)
    constant = mean.gather(1, lost)
    going = weight.take_along_dim(lost[:, None, :, None], 2)
    if refit and known.covariance.shape[-1] == width and width > 1:
        predictor = least_squares(known, kept, lost, torch.finfo(layer.weight.dtype).eps, faint=FAINT)
        constant = constant - (predictor @ mean.gather(1, kept)[..., None])[..., 0]
        staying = weight.take_along_dim(kept[:, None, :, None], 2) + torch.einsum("gopx,gpk->gokx", going, predictor)
        weight = weight.scatter(2, kept[:, None, :, None].expand_as(staying), staying)
    # Of a transposed conv's kernel, one place in that many meets an output.
    share = 1 if isinstance(layer, nn.Linear) or not layer.transposed else math.prod(layer.stride)
    added = (going.sum(-1) @ constant[..., None])[..., 0].flatten() / share
    return _Change(name, layer, _as_layer(weight, layer), added)


def _per_group(layer: Layer) -> Tensor:
    weight = layer.weight.detach().double()
    if isinstance(layer, nn.Linear):
        return weight[None, :, :, None]
    grouped: Tensor = weight.flatten(2).unflatten(0, (layer.groups, -1))
    return grouped.transpose(1, 2) if layer.transposed else grouped


def _as_layer(weight: Tensor, layer: Layer) -> Tensor:
    turned = weight.transpose(1, 2) if is_transposed(layer) else weight
    shaped: Tensor = turned.flatten(0, 1).reshape(layer.weight.shape).to(layer.weight.dtype)
    return shaped


def _carry_out(model: nn.Module, change: _Change) -> str | None:
    target: Layer | BasisScalingConv = change.layer
    target.weight.copy_(change.weight)
    name, constant = change.name, change.constant
    parent, _, own = name.rpartition(".")
    pair = model.get_submodule(parent) if own == "basis" else None
    if isinstance(pair, BasisPair):
        target, name = pair.scaling, half_name(parent, "scaling")
        constant = (target.columns() @ constant.view(target.groups, -1, 1)).flatten()
    if target.bias is not None:
        target.bias += constant.to(target.bias.dtype)
        return None
    target.bias = nn.Parameter(constant.to(target.weight.dtype), requires_grad=target.weight.requires_grad)
    return name


def _with_biases(model: nn.Module, coupling: Coupling, names: Sequence[str]) -> Coupling:
    """The coupling that cuts these new biases where it cuts their layers' filters."""
    groups = []
    for group in coupling.groups:
        held = [name for name in names if name in group.layers]
        axes = [Axis(f"{name}.bias", 0, tuple(unit_outputs(model, group, name).ravel().tolist())) for name in held]
        groups.append(replace(group, axes=(*group.axes, *axes)))
    return replace(coupling, groups=tuple(groups))
