"""The weight of a layer as a matrix, the two factors of a pair as layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair, BasisScalingConv
from basisprune.errors import LayerError
from basisprune.torchkit.surgery import Layer, clone_conv, is_transposed, make_linear, plain_conv, plain_linear

_SHORT = 1e-6


def refuse_odd_numbers(name: str, weight: Tensor) -> None:
    """Raise LayerError for weights that are not finite."""
    if not bool(weight.isfinite().all()):
        raise LayerError(name, "its weight holds NaN or infinite values; load the weights again")


def plain_layer(name: str, layer: Layer) -> tuple[Layer, Tensor]:
    """Return a layer of torch's own that does the same, and its weight as a matrix."""
    plain = plain_linear(name, layer) if isinstance(layer, nn.Linear) else plain_conv(name, layer)
    matrix = to_matrix(plain)
    refuse_odd_numbers(name, matrix)
    return plain, matrix


def matrix_shape(layer: Layer) -> tuple[int, int, int]:
    """(groups, k, c_o / groups): the shape of the layer's weight as one matrix per group."""
    if isinstance(layer, nn.Linear):
        return 1, layer.in_features, layer.out_features
    fan_in = layer.in_channels // layer.groups * math.prod(layer.kernel_size)
    return layer.groups, fan_in, layer.out_channels // layer.groups


def full_rank(layer: Layer, outputs: int | None = None) -> int:
    """The most basis vectors of use to a layer, over all groups; with that many outputs, if those are not its own."""
    groups, fan_in, fan_out = matrix_shape(layer)
    return groups * min(fan_in, fan_out if outputs is None else outputs // groups)


def to_matrix(layer: Layer) -> Tensor:
    """The layer's weight in float64 as (groups, k, c_o / groups)."""
    weight = layer.weight.detach().double()
    shape = matrix_shape(layer)
    if is_transposed(layer):  # (c_i, c_o/g, *)
        grouped = weight.view(shape[0], -1, *weight.shape[1:])
        return grouped.flatten(3).transpose(2, 3).reshape(shape)
    return weight.reshape(shape[0], shape[2], shape[1]).mT


def with_matrix(layer: Layer, matrix: Tensor) -> Layer:
    """The layer without bias and with `matrix` (groups, k, r) for its weight, so with groups * r outputs."""
    groups, _, rank = matrix.shape
    old = layer.weight
    if isinstance(layer, nn.Linear):
        return make_linear(matrix[0].mT.to(old.device, old.dtype), None)
    if is_transposed(layer):
        per_input = matrix.reshape(groups, old.shape[0] // groups, -1, rank).transpose(2, 3)
        weight = per_input.reshape(old.shape[0], rank, *old.shape[2:])
    else:
        weight = matrix.mT.reshape(groups * rank, *old.shape[1:])
    return clone_conv(layer, weight, None)


def make_pair(like: Layer, first: Tensor, second: Tensor, bias: Tensor | None, *, scale: float = 1.0) -> BasisPair:
    """Return the pair with these factors (groups, k, r) and (groups, r, c_o / groups), and else as the layer `like`."""
    groups, width, _ = second.shape
    weight = second.mT.flatten(0, 1).reshape(-1, width, *[1] * (like.weight.dim() - 2))
    scaling = BasisScalingConv(
        weight.to(like.weight.device, like.weight.dtype).contiguous(),
        scale=torch.full((groups * width,), scale, device=like.weight.device, dtype=like.weight.dtype),
        bias=None if bias is None else bias.detach().clone(),
        groups=groups,
    )
    return BasisPair(with_matrix(like, first), scaling)


def balanced(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The factors (…, k, r) and (…, r, c_o) with the same product and, for each vector, equal norms.

    Otherwise one factor is thousands of times as large as the other, and no learning rate suits both. A vector
    whose filter is zero keeps a column of moderate size.
    """
    balance = balance_of(first, second)
    return first * balance[..., None, :], second / balance[..., None]


def balance_of(first: Tensor, second: Tensor) -> Tensor:
    """What the vectors (…, r) of the first factor are multiplied by, and those of the second divided by."""
    inner = torch.linalg.vector_norm(first, dim=-2)
    outer = torch.linalg.vector_norm(second, dim=-1)
    inner = inner.clamp_min(_SHORT * float(inner.amax()))
    return torch.where((inner > 0) & (outer > 0), outer / inner, 1.0).sqrt()
