"""Attention in the one shape that torch's ONNX exporter knows: (batch, heads, length, width)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FourAxes(TorchFunctionMode):
    """While it is on, attention over any number of leading axes is computed as attention over two."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return over_two_axes(*args, **kwargs or {})
        return func(*args, **kwargs or {})


def over_two_axes(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
) -> Tensor:
    """`scaled_dot_product_attention` of (..., length, width), with all leading axes but the last in one.

    >>> import torch
    >>> query, key, value = torch.randn(3, 2, 4, 5, 6, 7).unbind()
    >>> direct = F.scaled_dot_product_attention(query, key, value)
    >>> torch.allclose(over_two_axes(query, key, value), direct, atol=1e-6)
    True
    """
    leading = query.shape[:-2]
    if len(leading) == 2:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **named)
    if attn_mask is not None:
        attn_mask = _with_two(attn_mask.expand(*leading, *attn_mask.shape[-2:]))
    query, key, value = (_with_two(each) for each in (query, key, value))
    found = F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **named)
    return found.squeeze(1) if len(leading) == 1 else found.unflatten(0, leading[:-1])


def _with_two(features: Tensor) -> Tensor:
    return features.unsqueeze(1) if features.ndim == 3 else features.flatten(0, -4)
