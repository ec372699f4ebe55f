"""Networks of half precision, trained in single precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from basisprune.torchkit.surgery import named_tensors

_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """The model with every tensor of half precision in float32 temporarily; the tensors stay the same objects.

    bfloat16 holds three digits: a step of training that changes a weight by less than that changes nothing.
    """
    before = {id(tensor): (tensor, tensor.dtype) for _, tensor in named_tensors(model) if tensor.dtype in _HALF}
    for tensor, _ in before.values():
        _set_dtype(tensor, torch.float32)
    try:
        yield
    finally:
        for tensor, dtype in before.values():
            _set_dtype(tensor, dtype)


def single_at_least(values: Tensor) -> Tensor:
    """The values in float32, or as they are in float64: a loss needs the digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def _set_dtype(tensor: Tensor, dtype: torch.dtype) -> None:
    tensor.grad = None
    tensor.data = tensor.data.to(dtype)
