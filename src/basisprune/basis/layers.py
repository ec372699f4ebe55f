"""The decomposed conv: a conv with the basis, then a BasisScalingConv (the paper's Section 3.2)."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.errors import ModelError
from basisprune.torchkit.running import is_transformed
from basisprune.torchkit.small_maps import as_matrix_products, small_map, transform_pixels
from basisprune.torchkit.surgery import Layer, find_layers, is_transposed

_POINTWISE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_SAFE_SCALE = 1e-4


class BasisScalingConv(nn.Module):
    """Rescales the features of a basis by `scale` and transforms them back: (N, r, *) -> (N, c_o, *).

    `scale` is the paper's s (r), `weight` its V-bar transposed (c_o, r / groups, 1, ...), `bias` its b
    (c_o). Only `scale` is to be trained; weight and bias are created frozen. A weight without spatial
    axes, (c_o, r), makes it the second half of a linear layer, with the features on the last axis.

    >>> layer = BasisScalingConv(torch.randn(8, 4, 1, 1), scale=torch.full((4,), 0.5))
    >>> layer(torch.randn(2, 4, 5, 5)).shape
    torch.Size([2, 8, 5, 5])
    """

    bias: nn.Parameter | None

    def __init__(self, weight: Tensor, *, scale: Tensor, bias: Tensor | None = None, groups: int = 1) -> None:
        super().__init__()
        self.groups = groups
        self.scale = nn.Parameter(scale)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def rank(self) -> int:
        return self.scale.numel()

    @property
    def spatial_dims(self) -> int:
        return self.weight.dim() - 2

    def scaled_weight(self) -> Tensor:
        """The weight with the scale in it, (c_o, r / groups, 1, ...): S V-bar transposed."""
        return _scaled(self.weight, self.scale, self.groups)

    def columns(self) -> Tensor:
        """The scaled weight as one matrix per group, (groups, c_o / groups, r / groups), in float64."""
        matrices: Tensor = self.scaled_weight().double().flatten(1).unflatten(0, (self.groups, -1))
        return matrices

    def forward(self, features: Tensor) -> Tensor:
        frozen = not self.weight.requires_grad and (self.bias is None or not self.bias.requires_grad)
        plain = torch.is_grad_enabled() and not torch.compiler.is_compiling() and not is_transformed()
        if frozen and plain and self.scale.requires_grad and features.dim() >= self.weight.dim():  # not one image
            device = features.device.type
            if torch.is_autocast_enabled(device):
                features = features.to(torch.get_autocast_dtype(device))
            with torch.autocast(device, enabled=False):
                output: Tensor = _ScaledTransform.apply(features, self.scale, self.weight, self.bias, self.groups)
            return output
        return _transform(features, self.scaled_weight(), self.bias, self.groups)

    def extra_repr(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"rank={self.rank}, out_channels={self.weight.shape[0]}, bias={self.bias is not None}{groups}"


class BasisPair(nn.Module):
    """A conv (or linear layer) split into `basis` and `scaling`; answers like the layer it replaced.

    Other code may still read `weight`, `kernel_size`, `stride`, `in_channels` and the like: `weight` is
    the dense weight that the pair stands for, the rest comes from the basis layer, which has the class and
    all settings of the original.
    """

    def __init__(self, basis: Layer, scaling: BasisScalingConv) -> None:
        super().__init__()
        self.basis = basis
        self.scaling = scaling

    def forward(self, features: Tensor, *args: object, **kwargs: object) -> Tensor:
        inner = as_matrix_products(self.basis, features) if self.training and not (args or kwargs) else None
        output: Tensor = self.scaling(self.basis(features, *args, **kwargs) if inner is None else inner)
        return output

    @property
    def rank(self) -> int:
        return self.scaling.rank

    @property
    def weight(self) -> Tensor:
        return dense_weight(self.basis, self.scaling)

    @property
    def bias(self) -> nn.Parameter | None:
        return self.scaling.bias

    @property
    def out_channels(self) -> int:
        return self.scaling.weight.shape[0]

    out_features = out_channels

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "basis" not in self.__dict__.get("_modules", {}):
                raise
            return getattr(self.basis, name)


def dense_weight(basis: Layer, scaling: BasisScalingConv) -> Tensor:
    """The weight U S V-bar transposed of the layer that the two stand for; computed in float64."""
    first = basis.weight.double()
    second = scaling.scaled_weight().double().flatten(1)
    groups = scaling.groups
    if is_transposed(basis):  # (c_i, r/g, *) with (c_o, r/g) -> (c_i, c_o/g, *)
        per_input = first.unflatten(0, (groups, -1)).movedim(2, 1)
        merged = torch.einsum("grix,gor->giox", per_input.flatten(3), second.unflatten(0, (groups, -1)))
        dense = merged.flatten(0, 1).unflatten(2, first.shape[2:])
    else:  # (r, c_i/g, *) with (c_o, r/g) -> (c_o, c_i/g, *)
        merged = second.unflatten(0, (groups, -1)) @ first.flatten(1).unflatten(0, (groups, -1))
        dense = merged.flatten(0, 1).unflatten(1, first.shape[1:])
    result: Tensor = dense.to(basis.weight.dtype)
    return result


def _scaled(weight: Tensor, scale: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return weight * scale.view(1, -1, *[1] * (weight.dim() - 2))
    grouped = weight.unflatten(0, (groups, -1))
    scaled: Tensor = grouped * scale.view(groups, 1, -1, *[1] * (weight.dim() - 2))
    return scaled.flatten(0, 1)


def _transform(features: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    if weight.dim() == 2:
        return F.linear(features, weight, bias)
    return _POINTWISE[weight.dim() - 2](features, weight, bias, groups=groups)


class _Saved(Protocol):
    saved_tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]
    needs_input_grad: tuple[bool, ...]
    groups: int

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _ScaledTransform(torch.autograd.Function):
    """features, scale -> transform with S V-bar, whose gradients cost no weight gradient.

    Autograd would form the gradient of the whole small weight, (c_o, r), at the cost of another forward
    pass, only to reduce it to r numbers. With h the gradient of the scaled features, the gradients are
    s * h for the features and sum(features * h) for s, and both come from one transposed transform.

    The scale is multiplied into whichever is smaller, weight or features. In the weight, the transposed
    transform gives s * h, from which h follows by division; where s is (nearly) zero that cannot be, and
    the transform uses 1 in its place. Features may be of lower precision than scale and weight, as under autocast.
    """

    @staticmethod
    def forward(
        ctx: _Saved, features: Tensor, scale: Tensor, weight: Tensor, bias: Tensor | None, groups: int
    ) -> Tensor:
        ctx.groups = groups
        bias = None if bias is None else bias.to(features.dtype)
        if small_map(features, weight):
            scaled = (features * _along(scale, features, weight)).to(features.dtype)
            weight = weight.to(features.dtype)
            ctx.save_for_backward(features, scale, weight, None)
            if groups > 1 or weight.dim() == 2:
                return _transform(scaled, weight, bias, groups)
            return transform_pixels(scaled, weight.flatten(1), bias)
        scaled = _scaled(weight, scale, groups).to(features.dtype)
        ctx.save_for_backward(features, scale, weight, scaled)
        return _transform(features, scaled, bias, groups)

    @staticmethod
    def backward(ctx: _Saved, gradient: Tensor) -> tuple[Tensor | None, ...]:
        features, scale, weight, scaled = ctx.saved_tensors
        needs_features, needs_scale = ctx.needs_input_grad[:2]
        if torch.is_grad_enabled():
            inner = _by_convolution(gradient, weight.to(features.dtype), features, ctx.groups)
            product = _sum_of_products(features, inner, weight, scale.dtype)
            return (inner * _along(scale, features, weight)).to(features.dtype), product, None, None, None
        # What h comes multiplied with, and what the features' gradient still lacks.
        divisor: Tensor | None = None
        factor: Tensor | None = scale
        if scaled is not None:
            divisor, factor, weight = scale, None, scaled
            if float(scale.amin()) < _SAFE_SCALE:
                tiny = scale.abs() < _SAFE_SCALE
                divisor, factor = torch.where(tiny, 1.0, scale), torch.where(tiny, scale, 1.0)
                weight = _scaled(ctx.saved_tensors[2], divisor, ctx.groups).to(features.dtype)
        inner = _transposed(gradient, weight, features, ctx.groups)
        scale_gradient = None
        if needs_scale:
            scale_gradient = _sum_of_products(features, inner, weight, scale.dtype)
            if divisor is not None:
                scale_gradient /= divisor
        if needs_features and factor is not None:
            inner = (inner * _along(factor, features, weight)).to(features.dtype)
        return inner if needs_features else None, scale_gradient, None, None, None


def _along(scale: Tensor, features: Tensor, weight: Tensor) -> Tensor:
    """The scale in a shape that multiplies the features' channels."""
    return scale if weight.dim() == 2 else scale.view(-1, *[1] * (features.dim() - 2))


def _transposed(gradient: Tensor, weight: Tensor, features: Tensor, groups: int) -> Tensor:
    """The gradient of the features, from that of the transform's output."""
    if weight.dim() > 2 and groups == 1 and small_map(features, weight):
        return transform_pixels(gradient, weight.flatten(1).t(), like=features)
    return _by_convolution(gradient, weight, features, groups)


def _by_convolution(gradient: Tensor, weight: Tensor, features: Tensor, groups: int) -> Tensor:
    """The same, and the result can be differentiated."""
    if weight.dim() == 2:
        return gradient @ weight
    spatial = weight.dim() - 2
    ones, zeros = [1] * spatial, [0] * spatial
    inner: Tensor
    inner, _, _ = torch.ops.aten.convolution_backward(
        gradient, features, weight, None, ones, zeros, ones, False, zeros, groups, (True, False, False)
    )
    return inner


def _sum_of_products(a: Tensor, b: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of a * b over all but the channels."""
    if weight.dim() == 2:
        return (a * b).flatten(0, -2).sum(0, dtype=dtype)
    return (a * b).sum([0, *range(2, a.dim())], dtype=dtype)


class Shift(nn.Module):
    """Adds a constant to each channel of a map: what is left of a branch that was dropped."""

    bias: nn.Parameter

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.view(1, -1, 1, 1)


def half_name(pair: str, half: Literal["basis", "scaling"]) -> str:
    """The dotted name of one half of the pair of that name."""
    return f"{pair}.{half}" if pair else half


def basis_pairs(model: nn.Module) -> dict[str, BasisPair]:
    """Every decomposed layer of the model by its name; raises ModelError when there is none."""
    pairs = dict(find_layers(model, BasisPair))
    if not pairs:
        raise ModelError(f"{type(model).__name__} has no decomposed layers; call decompose(model) first")
    return pairs
