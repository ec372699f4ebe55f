"""Convs that output only a few pixels, as matrix products.

On a map of 2x2 pixels more than half of a 3x3 kernel lies outside of the image, and a conv spends much of its time on
bringing a large weight into another order, for few features to use it. Products of the pixels with the part of
the weight that meets them do neither, so that the last layers of a network train up to twice as fast at 64x64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

from basisprune.torchkit.running import is_transformed

Run: TypeAlias = tuple[tuple[int, int], tuple[int, slice], tuple[int, slice]]
"""A place of the output, the pixels of a row that it sees, and the taps of the kernel that meet them."""

_FEW_PLACES = 4
_LARGE_TAP = 128 * 128  # weights; below, calling the products costs what they save


def small_map(features: Tensor, weight: Tensor) -> bool:
    """Whether the features have less than half as many elements as the weight, from where on it was measured to pay."""
    return 2 * features.numel() < weight.numel()


def as_matrix_products(conv: nn.Module, features: Tensor) -> Tensor | None:
    """What the conv makes of a batch; None where the conv itself is faster, is trained, or is watched by a hook."""
    if type(conv) is not nn.Conv2d or features.dim() != 4 or not _is_plain(conv, features):
        return None
    if conv.kernel_size == (1, 1) and conv.padding in ((0, 0), "valid", "same"):
        seen = features[:, :, :: conv.stride[0], :: conv.stride[1]]
        return _pointwise(seen, conv.weight, like=features) if small_map(seen, conv.weight) else None
    lower = features.dtype not in (torch.float32, torch.float64) or torch.is_autocast_enabled(features.device.type)
    if isinstance(conv.padding, str) or lower or features.device.type != "cpu":
        return None  # in lower precision, the sum over taps would be rounded at each of them
    places = _places(features, conv.weight, conv.stride, conv.padding)  # type: ignore[arg-type]
    few = min(places) > 0 and math.prod(places) <= _FEW_PLACES
    if not few or conv.in_channels * conv.out_channels < _LARGE_TAP:
        return None
    output: Tensor = _FewPlaces.apply(features, conv.weight, conv.stride, conv.padding)
    return output


def _is_plain(conv: nn.Conv2d, features: Tensor) -> bool:
    settings = (conv.groups, conv.dilation, conv.padding_mode) == (1, (1, 1), "zeros")
    frozen = conv.bias is None and not conv.weight.requires_grad
    watched = conv._forward_hooks or conv._forward_pre_hooks or torch.compiler.is_compiling() or is_transformed()
    return settings and frozen and not watched and features.numel() > 0 and features.shape[1] == conv.in_channels


def transform_pixels(
    features: Tensor, matrix: Tensor, bias: Tensor | None = None, *, like: Tensor | None = None
) -> Tensor:
    """What a 1x1 conv with the weight `matrix` (c_o, c_i) computes, without bringing it into another order.

    The result (N, c_o, *) lies in memory as the features do, or as `like` does, and is not a view. Nothing is recorded
    for gradients.
    """
    count, _, *sizes = features.shape
    output = _channels_last(features, (count, len(matrix), *sizes))
    if bias is None:
        torch.mm(_pixels(features), matrix.t(), out=_pixels(output))
    else:
        torch.addmm(bias, _pixels(features), matrix.t(), out=_pixels(output))
    return _laid_out(output, like=features if like is None else like)


def _pointwise(features: Tensor, weight: Tensor, *, like: Tensor) -> Tensor:
    rows: Tensor = F.linear(_pixels(features), weight.flatten(1))
    return _laid_out(rows.unflatten(0, (len(features), *features.shape[2:])).movedim(-1, 1), like=like)


def _pixels(features: Tensor) -> Tensor:
    return features.movedim(1, -1).reshape(-1, features.shape[1])


def _channels_last(like: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor (N, c, *) whose channels are next to each other in memory."""
    _, channels, *sizes = shape
    steps = [math.prod(sizes[place + 1 :]) * channels for place in range(-1, len(sizes))]
    return like.new_empty_strided(tuple(shape), (steps[0], 1, *steps[1:]))


def _laid_out(output: Tensor, *, like: Tensor) -> Tensor:
    """The output, channels last where the input is so too; otherwise contiguous, as a conv would put it out."""
    return output if like.movedim(1, -1).is_contiguous() else output.contiguous()


class _Saved(Protocol):
    saved_tensors: tuple[Tensor, ...]
    size: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _FewPlaces(torch.autograd.Function):
    """The conv of features (N, c_i, h, w) by a product for each place of the output and row of the kernel."""

    @staticmethod
    def forward(
        ctx: _Saved, features: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.size, ctx.stride, ctx.padding = features.shape[2:], stride, padding
        pixels, taps = features.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1)
        shape = (len(features), len(weight), *_places(features, weight, stride, padding))
        output = _channels_last(features, shape).zero_()
        places = output.permute(0, 2, 3, 1)
        for (y, x), (row, columns), (tap_row, tap_columns) in _runs(ctx.size, weight.shape[2:], stride, padding):
            seen, meeting = pixels[:, row, columns].flatten(1), taps[:, tap_row, tap_columns].flatten(1)
            places[:, y, x].addmm_(seen, meeting.t())
        return _laid_out(output, like=features)

    @staticmethod
    def backward(ctx: _Saved, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # products into slices of a new tensor cannot be differentiated
            size = (len(gradient), weight.shape[1], *ctx.size)
            return conv2d_input(size, weight, gradient, ctx.stride, ctx.padding), None, None, None
        places, taps = gradient.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1)
        pixels = gradient.new_zeros(len(gradient), *ctx.size, weight.shape[1])
        for (y, x), (row, columns), (tap_row, tap_columns) in _runs(
            ctx.size, weight.shape[2:], ctx.stride, ctx.padding
        ):
            meeting = taps[:, tap_row, tap_columns].flatten(1)
            pixels[:, row, columns].view(len(gradient), -1).addmm_(places[:, y, x], meeting)
        return pixels.permute(0, 3, 1, 2), None, None, None


def _places(features: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> tuple[int, int]:
    high, wide = (
        (size + 2 * pad - kernel) // step + 1
        for size, kernel, step, pad in zip(features.shape[2:], weight.shape[2:], stride, padding, strict=True)
    )
    return high, wide


def _runs(
    sizes: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, int], padding: tuple[int, int]
) -> Iterator[Run]:
    down, along = (list(_along_axis(*axis)) for axis in zip(sizes, kernel, stride, padding, strict=True))
    for y, (first_row, first_tap_row, rows) in enumerate(down):
        for x, (column, tap_column, columns) in enumerate(along):
            if columns > 0:
                for offset in range(rows):
                    pixels = (first_row + offset, slice(column, column + columns))
                    yield (y, x), pixels, (first_tap_row + offset, slice(tap_column, tap_column + columns))


def _along_axis(size: int, kernel: int, stride: int, padding: int) -> Iterator[tuple[int, int, int]]:
    """For each place of the output along an axis: the first pixel and tap that meet, and how many do."""
    for start in range(-padding, size + padding - kernel + 1, stride):
        tap = max(0, -start)
        yield start + tap, tap, min(kernel, size - start) - tap
