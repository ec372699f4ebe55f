"""Where the units of a coupling lie, and the network without those that a plan leaves out."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from basisprune.errors import PlanError
from basisprune.torchkit.surgery import TORCH_CONVS, is_depthwise, named_tensors
from basisprune.types import Axis, Coupling, Group

Channels: TypeAlias = npt.NDArray[np.int64]
"""(size, n): the channels of a layer that each unit of a group holds."""

_CONV = nn.modules.conv._ConvNd
_BATCH_NORM = nn.modules.batchnorm._NormBase

DERIVED: tuple[tuple[type[nn.Module], tuple[str, ...]], ...] = (
    (_CONV, ("in_channels", "out_channels", "groups", "kernel_size", "stride", "padding", "dilation",
             "output_padding")),
    (nn.Linear, ("in_features", "out_features")),
    (_BATCH_NORM, ("num_features",)),
    (nn.GroupNorm, ("num_channels", "num_groups")),
)  # fmt: skip
"""Attributes that follow from the shapes of a module's own weights, or that have nothing to do with them."""


def unit_outputs(model: nn.Module, group: Group, layer: str) -> Channels:
    """The output channels of the layer that each unit of the group holds; a PlanError if they cannot be told."""
    module = model.get_submodule(layer)
    conv = module if isinstance(module, TORCH_CONVS) and module.transposed else None
    place = (f"{layer}.weight", 0 if conv is None else 1)
    axis = next((axis for axis in group.axes if (axis.parameter, axis.dim) == place), None)
    if axis is None:
        raise PlanError(f"{layer}: its filters cannot be distinguished; add it to ignored_layers of trace_coupling")
    # A transposed conv has one column for the channels at the same place in each of its groups.
    return _index(axis, group) if conv is None else _index(axis, group, conv.weight.shape[1], conv.groups)


def unit_inputs(model: nn.Module, coupling: Coupling) -> dict[str, dict[str, Channels]]:
    """For each conv or linear layer that mixes channels of some groups, by group, the channels it reads of each unit.

    A depthwise conv does not mix: it hands each channel on, and belongs to its group. Raises PlanError for a coupling
    of another network.
    """
    found: dict[str, dict[str, Channels]] = {}
    for group in coupling.groups:
        for axis in group.axes:
            name, _, parameter = axis.parameter.rpartition(".")
            if parameter != "weight":
                continue
            layer = _layer(model, name, axis)
            if isinstance(layer, nn.Linear) and axis.dim == 1:
                found.setdefault(name, {})[group.name] = _index(axis, group)
            elif isinstance(layer, TORCH_CONVS) and axis.dim == 1 - layer.transposed and not is_depthwise(layer):
                groups = 1 if layer.transposed else layer.groups  # a column is one in each
                found.setdefault(name, {})[group.name] = _index(axis, group, layer.weight.shape[1], groups)
    return found


def _layer(model: nn.Module, name: str, axis: Axis) -> nn.Module:
    try:
        layer = model.get_submodule(name)
        shape = layer.get_parameter("weight").shape
    except AttributeError:
        shape = None
    if shape is None or axis.dim >= len(shape) or max(axis.index, default=0) >= shape[axis.dim]:
        raise PlanError(f"{name}: the coupling is that of another network; call trace_coupling on this one")
    return layer


def _index(axis: Axis, group: Group, width: int = 0, groups: int = 1) -> Channels:
    """The places on the axis of each unit, in each of the layer's groups, which are so wide."""
    index = np.asarray(axis.index, dtype=np.int64).reshape(group.size, -1)
    return np.concatenate([index + width * place for place in range(groups)], axis=1)


def cut(model: nn.Module, coupling: Coupling, keep: Mapping[str, Sequence[int]], *, inplace: bool = False) -> nn.Module:
    """Return the network with only the units `keep[group name]` of each group named; others stay whole.

    Parameters keep `requires_grad`, dtype and device; gradients are dropped. Raises PlanError if `keep`
    names a unit or group that is not there, empties a group, or cuts its parts unevenly.
    """
    check_keep(coupling, keep)
    tensors = dict(named_tensors(model))
    smaller = [(tensors[name], _sliced(tensors[name], gone)) for name, gone in _removed(coupling, keep).items()]
    result = model if inplace else copy.deepcopy(model, {id(old): _like(old, slim) for old, slim in smaller})
    for old, slim in smaller if inplace else ():
        old.grad = None
        old.data = slim
    _repair(result, coupling, keep)
    return result


def hollow_cut(model: nn.Module, coupling: Coupling, keep: Mapping[str, Sequence[int]]) -> nn.Module:
    """The network after `cut` as far as shapes go: zeros for what is cut, the rest shared with the original."""
    tensors = dict(named_tensors(model))
    smaller = {}
    for name, removed in _removed(coupling, keep).items():
        tensor = tensors[name]
        shape = [size - len(removed.get(dim, ())) for dim, size in enumerate(tensor.shape)]
        smaller[id(tensor)] = _like(tensor, tensor.detach().new_zeros(shape))
    result = shell(model, smaller)
    _repair(result, coupling, keep)
    return result


def shell(model: nn.Module, replaced: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A copy of the modules that shares all parameters and buffers but those replaced (by `id`)."""
    memo: dict[int, object] = {id(tensor): tensor for _, tensor in named_tensors(model)}
    for module in model.modules():  # a dozen tables of hooks per module, nearly all empty, take most of the time
        memo.update({id(table): table for name, table in vars(module).items() if "_hooks" in name})
    return copy.deepcopy(model, {**memo, **(replaced or {})})


def check_keep(coupling: Coupling, keep: Mapping[str, Sequence[int]]) -> None:
    """Raise PlanError, saying what is wrong, unless the units to keep fit the coupling."""
    groups = {group.name: group for group in coupling.groups}
    for name, units in keep.items():
        if name not in groups:
            raise PlanError(f"{name}: no such group; there are {', '.join(groups) or 'none'}")
        group, kept = groups[name], set(units)
        if list(units) != sorted(kept) or not kept <= set(range(group.size)) or not kept:
            raise PlanError(
                f"{name}: units to keep must be a sorted, not empty choice of 0 to {group.size - 1}, "
                f"got {list(units)[:8]} ..."
            )
        counts = {len(kept.intersection(part)) for part in group.parts}
        if len(counts) > 1 or 0 in counts:
            raise PlanError(
                f"{name}: its {len(group.parts)} parts must keep equally many units, at least one; "
                f"got between {min(counts)} and {max(counts)}; see Group.parts"
            )


def dropped(group: Group, keep: Mapping[str, Sequence[int]]) -> list[int]:
    """The units of the group that are not kept; none where `keep` does not name the group."""
    kept = set(keep.get(group.name, range(group.size)))
    return [unit for unit in range(group.size) if unit not in kept]


def _removed(coupling: Coupling, keep: Mapping[str, Sequence[int]]) -> dict[str, dict[int, list[int]]]:
    """The positions to remove, by parameter and axis."""
    found: dict[str, dict[int, list[int]]] = {}
    for group in coupling.groups:
        gone = dropped(group, keep)
        for axis in group.axes if gone else ():
            places = _index(axis, group)[gone].ravel().tolist()
            found.setdefault(axis.parameter, {}).setdefault(axis.dim, []).extend(places)
    return found


def _sliced(tensor: Tensor, removed: Mapping[int, list[int]]) -> Tensor:
    slim = tensor.detach()
    for dim, places in removed.items():
        mask = torch.ones(slim.shape[dim], dtype=torch.bool)
        mask[places] = False
        slim = slim.index_select(dim, mask.nonzero().flatten().to(slim.device))
    return slim


def _like(tensor: Tensor, slim: Tensor) -> Tensor:
    return nn.Parameter(slim, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else slim


def _repair(model: nn.Module, coupling: Coupling, keep: Mapping[str, Sequence[int]]) -> None:
    """Set the attributes of modules that mirror the shapes of what was cut."""
    for group in coupling.groups:
        lost = len(dropped(group, keep))
        for size in group.sizes if lost else ():
            _shrink(model.get_submodule(size.module), size.attribute, size.item, lost * size.count // size.divisor)
    cut_groups = [group for group in coupling.groups if group.name in keep]
    for name in {axis.parameter.rpartition(".")[0] for group in cut_groups for axis in group.axes}:
        _derive(model.get_submodule(name))


def _shrink(module: nn.Module, attribute: str, item: int | None, by: int) -> None:
    value = getattr(module, attribute)
    if item is None:
        setattr(module, attribute, value - by)
    else:
        items = [entry - by if place == item else entry for place, entry in enumerate(value)]
        setattr(module, attribute, type(value)(items) if type(value) in (tuple, list) else tuple(items))


def _derive(module: nn.Module) -> None:
    """Read a module's numbers of channels from its weights."""
    if isinstance(module, _CONV):
        first, second = module.weight.shape[:2]
        depthwise = module.groups == module.in_channels > 1
        if module.transposed:
            module.groups = first if depthwise else module.groups
            module.in_channels, module.out_channels = first, second * module.groups
        else:
            module.groups = first * module.in_channels // module.out_channels if depthwise else module.groups
            module.in_channels, module.out_channels = second * module.groups, first
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _BATCH_NORM):
        held = module.running_mean if module.weight is None else module.weight
        module.num_features = len(held) if held is not None else module.num_features
    elif isinstance(module, nn.GroupNorm) and module.weight is not None:
        by_itself = module.num_groups == module.num_channels  # each channel is a group, which goes as a whole
        module.num_channels = len(module.weight)
        module.num_groups = module.num_channels if by_itself else module.num_groups
