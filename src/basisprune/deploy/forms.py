"""The plain forms that a layer can take, with the batch norm behind it inside."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

from basisprune.basis.decompose import merge_pair
from basisprune.basis.layers import BasisPair
from basisprune.deploy.allowed import LAYER_ATTRIBUTES
from basisprune.layer_times import LayerShape, TimeTable
from basisprune.torchkit.surgery import (
    TORCH_CONVS,
    Layer,
    clone_conv,
    is_transposed,
    make_linear,
    output_channels,
)
from basisprune.torchkit.watching import Dataflow, LayerCall

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm
PLAIN: tuple[type[Layer], ...] = (*TORCH_CONVS, nn.Linear)

_PLAIN_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNormAct2d)


def merged(layer: Layer | BasisPair, norm: BatchNorm | None) -> Layer:
    """The one layer that computes what the norm makes of the layer's output."""
    return _with_norm(merge_pair(layer) if isinstance(layer, BasisPair) else layer, norm)


def plain_pair(pair: BasisPair, norm: BatchNorm | None) -> nn.Sequential:
    """The two halves as plain layers, the norm in the second, in a container that answers like the original layer."""
    scaling = pair.scaling
    weight = scaling.scaled_weight().detach()
    second: Layer
    if scaling.spatial_dims == 0:
        second = make_linear(weight, scaling.bias)
    else:
        frame = nn.utils.skip_init(
            TORCH_CONVS[scaling.spatial_dims - 1],
            *(pair.rank, len(weight), 1),
            groups=scaling.groups,
            device=weight.device,
            dtype=weight.dtype,
        )
        second = clone_conv(frame, weight, scaling.bias)
    halves = nn.Sequential(OrderedDict(basis=pair.basis, scaling=_with_norm(second, norm)))
    return answer_like(halves, pair.basis, pair.out_channels)


def subsampled(form: nn.Module) -> nn.Sequential | None:
    """The form with its strided 1x1 conv as a choice of pixels and a dense 1x1 conv; None if it has none.

    Some backends compute a strided 1x1 conv several times slower than the other two together.
    """
    parts = plain_layers(form)
    name, conv = next(iter(parts.items()))
    if type(conv) is not nn.Conv2d or max(conv.stride) == 1:
        return None
    if max(conv.kernel_size) > 1 or conv.padding not in ((0, 0), "valid"):
        return None
    dense = clone_conv(conv, conv.weight.detach(), conv.bias)
    dense.stride = (1, 1)
    outputs = output_channels([*parts.values()][-1])
    pixels = nn.MaxPool2d(1, (conv.stride[0], conv.stride[1]))
    steps: dict[str, nn.Module] = {"pixels": pixels, **parts, name: dense}
    return answer_like(nn.Sequential(OrderedDict(steps)), conv, outputs)


def plain_layers(form: nn.Module) -> dict[str, Layer]:
    """The convs and linear layers that a form consists of, in their order; a layer on its own is called "conv"."""
    parts = form.named_children() if isinstance(form, nn.Sequential) else [("conv", form)]
    return {name: part for name, part in parts if isinstance(part, PLAIN)}


def answer_like(container: nn.Sequential, layer: Layer, outputs: int) -> nn.Sequential:
    """The container with the attributes of a layer, which the code around it may read in its forward."""
    for name in LAYER_ATTRIBUTES:
        if hasattr(layer, name):
            setattr(container, name, getattr(layer, name))
    setattr(container, "out_features" if isinstance(layer, nn.Linear) else "out_channels", outputs)
    # For its device and dtype: a plain attribute, not one more parameter.
    container.__dict__["weight"] = layer.weight
    return container


def table_seconds(
    choices: Mapping[str, Sequence[nn.Module]], run: Dataflow, table: TimeTable
) -> dict[str, list[float]]:
    """The seconds of all forms of each layer, over all its calls; layers that the table does not know are left out."""
    found = {}
    for name, forms in choices.items():
        seconds = [_form_seconds(form, run.calls.get(name, []), table) for form in forms]
        known = [value for value in seconds if value is not None]
        if len(known) == len(seconds) and run.calls.get(name):
            found[name] = known
    return found


def _form_seconds(form: nn.Module, calls: Sequence[LayerCall], table: TimeTable) -> float | None:
    total, parts = 0.0, list(plain_layers(form).values())
    for call in calls:
        for part, sides in zip(parts, (call.shape, call.output_shape), strict=False):
            if not isinstance(part, nn.Conv2d) or len(call.shape) != 4:
                return None
            shape = LayerShape.of(part, (sides[-2], sides[-1]))
            if shape not in table:
                return None
            total += float(table.seconds(shape, part.in_channels, output_channels(part)))
    return total


def affine(norm: BatchNorm) -> tuple[Tensor, Tensor] | None:
    """What the norm in eval mode multiplies each channel with, and then adds; in float64.

    None for a norm that does something else, or that keeps no statistics.
    """
    mean, variance = norm.running_mean, norm.running_var
    if type(norm) not in _PLAIN_NORMS or mean is None or variance is None:
        return None
    factor = (variance.double() + norm.eps).rsqrt()
    if norm.weight is not None:
        factor = factor * norm.weight.double()
    shift = -mean.double() * factor
    return factor, shift if norm.bias is None else shift + norm.bias.double()


@torch.no_grad()
def drop_statistics(norm: BatchNorm) -> None:
    """Moves the running statistics of a norm that stays into its weight and bias, in place.

    It keeps those that it was created with, which no state dict holds: mean 0 and variance 1. A norm is what
    eager PyTorch computes fastest; a depthwise 1x1 conv takes many times as long.
    """
    found = affine(norm)
    if found is None or norm.running_var is None:
        return
    (factor, shift), statistics = found, norm.running_var
    norm.affine = True
    norm.weight = nn.Parameter((factor * math.sqrt(1 + norm.eps)).to(statistics.dtype))
    norm.bias = nn.Parameter(shift.to(statistics.dtype))
    norm.register_buffer("running_mean", torch.zeros_like(statistics), persistent=False)
    norm.register_buffer("running_var", torch.ones_like(statistics), persistent=False)
    norm.register_buffer("num_batches_tracked", None)


@torch.no_grad()
def _with_norm(layer: Layer, norm: BatchNorm | None) -> Layer:
    """A layer that computes what the norm makes of the layer's output; in float64 until the end."""
    found = None if norm is None else affine(norm)
    if found is None:
        return layer
    like, (factor, shift) = layer.weight, found
    if layer.bias is not None:
        shift = shift + layer.bias.double() * factor
    weight = like.double()
    if isinstance(layer, nn.Linear):
        return make_linear((weight * factor[:, None]).to(like.dtype), shift.to(like.dtype))
    if is_transposed(layer):  # (c_i, c_o/g, *): the rows of one group make its outputs
        per_group = factor.view(layer.groups, 1, -1, *[1] * (weight.dim() - 2))
        weight = (weight.unflatten(0, (layer.groups, -1)) * per_group).flatten(0, 1)
    else:
        weight = weight * factor.view(-1, *[1] * (weight.dim() - 1))
    return clone_conv(layer, weight, shift)
