"""First-order Taylor terms, accumulated over batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from basisprune.errors import DataError, TrainingError
from basisprune.torchkit.running import images_of, mode

Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def mean_square_products(
    model: nn.Module,
    groups: Sequence[Sequence[Tensor]],
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Loss,
) -> list[Tensor]:
    """For each group of tensors of one shape the mean over the batches of (sum of g * tensor)^2, in float64.

    g is the gradient of the loss in eval mode. As in Molchanov et al. (2019) the square is taken batch by
    batch, so that gradients of opposite sign do not cancel over the data. The model is not changed.
    """
    tensors = [tensor for group in groups for tensor in group]
    totals = [torch.zeros_like(group[0], dtype=torch.float64, requires_grad=False) for group in groups]
    device = next(model.parameters()).device
    count = 0
    with mode(model, training=False), _requiring_grad(tensors):
        for batch in batches:
            if not isinstance(batch, tuple | list) or len(batch) < 2:
                raise DataError(f"batches: (images, labels) are needed, {type(batch).__name__} given")
            value = loss(model(images_of(batch).to(device)), batch[1].to(device))
            if not bool(value.isfinite()):
                raise TrainingError(f"the loss of batch {count} is {value.item()}; check the model and the images")
            gradients = iter(torch.autograd.grad(value, tensors, allow_unused=True))
            for total, group in zip(totals, groups, strict=True):
                terms = [(g, tensor.detach()) for tensor in group if (g := next(gradients)) is not None]
                if terms:
                    total += sum((g * tensor).double() for g, tensor in terms).square()  # type: ignore[union-attr]
            count += 1
    if count == 0:
        raise DataError("batches: no batch came; give the validation data")
    return [total / count for total in totals]


def average_over_processes(values: Tensor) -> Tensor:
    """The mean of the values over all processes of a distributed run, so that each prunes the same."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


@contextmanager
def _requiring_grad(tensors: Sequence[Tensor]) -> Iterator[None]:
    before = [tensor.requires_grad for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_(True)
    try:
        with torch.enable_grad():
            yield
    finally:
        for tensor, required in zip(tensors, before, strict=True):
            tensor.requires_grad_(required)
