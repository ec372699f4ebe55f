"""Where the units of a coupling lie, and the network without some of them or without whole branches."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair, BasisScalingConv, Shift, basis_pairs, half_name
from basisprune.basis.refit import least_squares
from basisprune.errors import PlanError
from basisprune.torchkit.moments import OutputStatistics
from basisprune.torchkit.running import hooked, mode
from basisprune.torchkit.surgery import (
    TORCH_CONVS,
    Layer,
    find_layers,
    is_depthwise,
    is_plain,
    is_transposed,
    named_tensors,
    replace_module,
)
from basisprune.types import Axis, Block, Coupling, Group

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
    """Return the channels that each conv or linear layer which mixes channels reads of each unit, by group.

    A depthwise conv does not mix. Raises PlanError for a coupling of another network.
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


_HIGH = 1e4  # where a relu does nothing
_SAME = 1e-9 * _HIGH  # in float64


@torch.no_grad()
def find_blocks(model: nn.Module, example: Tensor) -> tuple[Block, ...]:
    """Return the blocks of a decomposed model whose branch ends in a pair, in the order in which they run.

    With the output of the pair held constant, such a block shifts each channel of its input by a constant, in float64.
    """
    found: list[Block] = []
    for name, width in _holders(model, example).items():
        if any(name.startswith(f"{block.name}.") or block.name.startswith(f"{name}.") for block in found):
            continue
        twin = copy.deepcopy(model.get_submodule(name)).cpu().double().eval()
        last = _last_pair(twin, width)
        if last is None:
            continue
        shift = _shift(twin, last, torch.zeros(width, dtype=torch.float64))
        if shift is not None:
            found.append(Block(name, f"{name}.{last}", shift[1]))
    return tuple(found)


def _holders(model: nn.Module, example: Tensor) -> dict[str, int]:
    """The modules that hold a pair, run once and make a map of the shape that they read: its channels by name."""
    widths: dict[str, list[int]] = {}

    def note(name: str, _module: nn.Module, args: tuple[object, ...], output: object) -> None:
        read, width = args[0] if len(args) == 1 else None, 0
        if isinstance(read, Tensor) and isinstance(output, Tensor) and read.dim() == 4 and read.shape == output.shape:
            width = read.shape[1]
        widths.setdefault(name, []).append(width)

    pairs = [name for name, _ in find_layers(model, BasisPair)]
    handles = [
        module.register_forward_hook(partial(note, name))
        for name, module in model.named_modules()
        if name and name not in pairs and any(pair.startswith(f"{name}.") for pair in pairs)
    ]
    with hooked(handles), mode(model, training=False):
        model(example)
    return {name: found[0] for name, found in widths.items() if len(found) == 1 and found[0]}


def _last_pair(block: nn.Module, width: int) -> str | None:
    """The pair that runs last in a float64 block, if each runs once and it makes a map of this width."""
    order: list[str] = []
    inner = dict(find_layers(block, BasisPair))
    handles = [pair.register_forward_hook(lambda *_, name=name: order.append(name)) for name, pair in inner.items()]
    with hooked(handles):
        try:
            block(_probe(width))
        except RuntimeError:
            return None  # it wants a larger map, or another one
    last = order[-1] if order and len(set(order)) == len(order) else None
    return last if last is not None and inner[last].out_channels == width else None


def _probe(width: int) -> Tensor:
    return torch.randn(1, width, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _shift(block: nn.Module, last: str, output: Tensor) -> tuple[Tensor, bool] | None:
    """What a float64 block adds to each channel if its last pair outputs this constant, and whether a relu follows."""

    def hold(_module: nn.Module, _args: object, made: Tensor) -> Tensor:
        return output.view(1, -1, 1, 1).expand_as(made)

    x = _probe(len(output))
    with hooked([block.get_submodule(last).register_forward_hook(hold)]):
        high, made = x.abs() + _HIGH, block(x)
        constant: Tensor = (block(high) - high).mean(dim=(0, 2, 3))
    expected = x + constant.view(1, -1, 1, 1)
    for rectifies, wanted in ((False, expected), (True, expected.relu())):
        if made.shape == wanted.shape and float((made - wanted).abs().max()) <= _SAME:
            return constant, rectifies
    return None


@torch.no_grad()
def drop_blocks(
    model: nn.Module, blocks: Sequence[Block], means: Mapping[str, Sequence[float]], *, inplace: bool = False
) -> nn.Module:
    """Return the model without the branches of these blocks; each adds the mean of what its branch added instead.

    `means` are those of the features of the last pair of each block, as scores know them; a branch without means adds
    what it makes of features that are all zero. Raises PlanError for a block that is not one of the model.
    """
    pairs = basis_pairs(model)
    shifts: dict[str, nn.Module] = {}
    for block in blocks:
        if block.last not in pairs:
            raise PlanError(f"{block.name}: the model has no block with the pair {block.last}; find its blocks again")
        pair = copy.deepcopy(pairs[block.last]).cpu().double()
        features = torch.tensor(means.get(block.last) or [0.0] * pair.rank, dtype=torch.float64)
        output = pair.scaling(features.view(1, -1, 1, 1)).flatten()
        twin = copy.deepcopy(model.get_submodule(block.name)).cpu().double().eval()
        found = _shift(twin, block.last.removeprefix(f"{block.name}."), output)
        if found is None:
            raise PlanError(f"{block.name}: does not add a branch to what it reads; find its blocks again")
        shift = Shift(found[0].to(pairs[block.last].scaling.weight))
        shifts[block.name] = nn.Sequential(shift, nn.ReLU()) if block.rectifies else shift
    result = model if inplace else copy.deepcopy(model)
    for name, rest in shifts.items():
        result = replace_module(result, name, rest)
    return result
