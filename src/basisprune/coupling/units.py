"""Where the units of a coupling lie: the filters that make their channels, and the layers that read them."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from basisprune.errors import PlanError
from basisprune.torchkit.surgery import TORCH_CONVS, Layer, is_depthwise, is_transposed
from basisprune.types import Axis, Coupling, Group

Channels: TypeAlias = npt.NDArray[np.int64]
"""(size, n): the channels of a layer that each unit of a group holds."""


def unit_outputs(model: nn.Module, group: Group, layer: str) -> Channels:
    """The output channels of the layer that each unit of the group holds; a PlanError if they cannot be told."""
    module = model.get_submodule(layer)
    conv = module if isinstance(module, TORCH_CONVS) and module.transposed else None
    place = (f"{layer}.weight", 0 if conv is None else 1)
    axis = next((axis for axis in group.axes if (axis.parameter, axis.dim) == place), None)
    if axis is None:
        raise PlanError(f"{layer}: its filters cannot be distinguished; add it to ignored_layers of trace_coupling")
    index = _index(axis, group)
    # A transposed conv has one column for the channels at the same place in each of its groups.
    return index if conv is None else _in_every_group(index, conv.weight.shape[1], conv.groups)


def unit_inputs(model: nn.Module, coupling: Coupling) -> dict[str, dict[str, Channels]]:
    """For each conv or linear layer that mixes channels of some groups, by group, the channels it reads of each unit.

    A depthwise conv does not mix: it hands each channel on, and belongs to its group. What reads channels without
    being a conv or linear layer is not listed. Raises PlanError for a coupling of another network.

    >>> import torch
    >>> from basisprune.coupling import trace_coupling
    >>> net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    >>> unit_inputs(net, trace_coupling(net, torch.zeros(1, 3, 8, 8)))["2"]["0"].tolist()
    [[0], [1], [2], [3]]
    """
    found: dict[str, dict[str, Channels]] = {}
    for group in coupling.groups:
        for axis in group.axes:
            layer, _, parameter = axis.parameter.rpartition(".")
            index = _read(_layer(model, layer, axis), axis, group) if parameter == "weight" else None
            if index is not None:
                found.setdefault(layer, {})[group.name] = index
    return found


def _layer(model: nn.Module, name: str, axis: Axis) -> nn.Module:
    """The layer of that name, whose weight has the channels of the axis; a PlanError if there is none."""
    try:
        layer = model.get_submodule(name)
        shape = layer.get_parameter("weight").shape
    except AttributeError:
        shape = None
    if shape is None or axis.dim >= len(shape) or max(axis.index, default=0) >= shape[axis.dim]:
        raise PlanError(f"{name}: the coupling is that of another network; call trace_coupling on this one")
    return layer


def _read(layer: nn.Module, axis: Axis, group: Group) -> Channels | None:
    """The channels that the axis of the layer's weight reads; None if it makes channels, or the layer does not mix."""
    kinds: tuple[type[Layer], ...] = (*TORCH_CONVS, nn.Linear)
    if not isinstance(layer, kinds) or axis.dim != (0 if is_transposed(layer) else 1):
        return None
    if isinstance(layer, nn.Linear):
        return _index(axis, group)
    if is_depthwise(layer):
        return None
    if layer.transposed:
        return _index(axis, group)
    return _in_every_group(_index(axis, group), layer.weight.shape[1], layer.groups)  # a column is one in each


def _index(axis: Axis, group: Group) -> Channels:
    return np.asarray(axis.index, dtype=np.int64).reshape(group.size, -1)


def _in_every_group(index: Channels, width: int, groups: int) -> Channels:
    return np.concatenate([index + width * place for place in range(groups)], axis=1)
