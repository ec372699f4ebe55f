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
from basisprune.torchkit.surgery import TORCH_CONVS, Layer, is_depthwise, is_transposed, named_tensors
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


def cut(model: nn.Module, coupling: Coupling, keep: Mapping[str, Sequence[int]], *, inplace: bool = False) -> nn.Module:
    """The network with only the units `keep[group name]` of each group named; others stay whole.

    Parameters keep `requires_grad`, dtype and device; gradients are dropped. Raises PlanError if `keep`
    names a unit or group that is not there, empties a group, or cuts its parts unevenly.

    >>> from basisprune.coupling import trace_coupling
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
    >>> coupling = trace_coupling(net, torch.zeros(1, 3, 8, 8))
    >>> cut(net, coupling, {"0": (0, 2, 5)})[3]
    Conv2d(3, 4, kernel_size=(1, 1), stride=(1, 1))
    """
    check_keep(coupling, keep)
    tensors = dict(named_tensors(model))
    smaller = {
        id(tensors[name]): (tensors[name], _sliced(tensors[name], removed))
        for name, removed in _removed(coupling, keep).items()
    }
    if inplace:
        for tensor, slim in smaller.values():
            tensor.grad = None
            tensor.data = slim
        result = model
    else:
        result = copy.deepcopy(model, {key: _like(tensor, slim) for key, (tensor, slim) in smaller.items()})
    repair(result, coupling, keep)
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
    repair(result, coupling, keep)
    return result


def shell(model: nn.Module, replaced: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A copy of the modules that shares all parameters and buffers but those replaced (by `id`).

    Running it cannot change what the original keeps in its attributes.
    """
    memo: dict[int, object] = {id(tensor): tensor for _, tensor in named_tensors(model)}
    for module in model.modules():  # a dozen tables of hooks per module, nearly all empty, take most of the time
        memo.update({id(table): table for name, table in vars(module).items() if "_hooks" in name})
    return copy.deepcopy(model, {**memo, **(replaced or {})})


def check_keep(coupling: Coupling, keep: Mapping[str, Sequence[int]]) -> None:
    """Nothing if the units to keep fit the coupling; a PlanError that says what is wrong otherwise."""
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
            places = np.array(axis.index).reshape(group.size, -1)[gone].ravel().tolist()
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
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(slim, requires_grad=tensor.requires_grad)
    return slim


def repair(model: nn.Module, coupling: Coupling, keep: Mapping[str, Sequence[int]]) -> None:
    """Sets the attributes of modules that mirror the shapes of what was cut."""
    for group in coupling.groups:
        lost = len(dropped(group, keep))
        for size in group.sizes if lost else ():
            _shrink(model.get_submodule(size.module), size.attribute, size.item, lost * size.count // size.divisor)
    cut_groups = [group for group in coupling.groups if group.name in keep]
    touched = {axis.parameter.rpartition(".")[0] for group in cut_groups for axis in group.axes}
    for name in touched:
        _derive(model.get_submodule(name))


def _shrink(module: nn.Module, attribute: str, item: int | None, by: int) -> None:
    value = getattr(module, attribute)
    if item is None:
        setattr(module, attribute, value - by)
    else:
        items = [entry - by if place == item else entry for place, entry in enumerate(value)]
        setattr(module, attribute, type(value)(items) if type(value) in (tuple, list) else tuple(items))


def _derive(module: nn.Module) -> None:
    """Reads a module's numbers of channels from its weights."""
    if isinstance(module, _CONV):
        _derive_conv(module)
    elif isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _BATCH_NORM):
        held = module.running_mean if module.weight is None else module.weight
        module.num_features = len(held) if held is not None else module.num_features
    elif isinstance(module, nn.GroupNorm):
        module.num_channels = len(module.weight) if module.weight is not None else module.num_channels


def _derive_conv(conv: nn.modules.conv._ConvNd) -> None:
    first, second = conv.weight.shape[:2]
    depthwise = conv.groups == conv.in_channels > 1
    if conv.transposed:
        conv.groups = first if depthwise else conv.groups
        conv.in_channels, conv.out_channels = first, second * conv.groups
    else:
        conv.groups = first * conv.in_channels // conv.out_channels if depthwise else conv.groups
        conv.in_channels, conv.out_channels = second * conv.groups, first
