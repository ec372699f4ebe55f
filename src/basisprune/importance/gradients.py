"""First-order Taylor terms, accumulated over batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from basisprune.errors import DataError, TrainingError
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import Loss, cut_graphs, loss_on, mode, placed, read_batch


def mean_square_products(
    model: nn.Module,
    groups: Sequence[Sequence[Tensor]],
    batches: Iterable[object],
    loss: Loss,
) -> list[Tensor]:
    """For each group of tensors of one shape the mean over the batches of (sum of g * tensor)^2, in float64.

    g is the gradient of the loss in eval mode. As in Molchanov et al. (2019) the square is taken batch by
    batch, so that gradients of opposite sign do not cancel over the data. In a distributed run, the mean is that over
    the batches of all processes. The model is not changed.
    """
    tensors = [tensor for group in groups for tensor in group]
    totals = [torch.zeros_like(group[0], dtype=torch.float64, requires_grad=False) for group in groups]
    count = 0
    with mode(model, training=False), _requiring_grad(tensors):
        for batch in batches:
            images, labels = read_batch(batch, loss)
            value = loss_on(model, placed(images, model), labels, loss)
            if not bool(value.isfinite()):
                raise TrainingError(f"the loss of batch {count} is {value.item()}; check the model and the images")
            gradients = iter(torch.autograd.grad(value, tensors, allow_unused=True))
            for total, group in zip(totals, groups, strict=True):
                terms = [(g, tensor.detach()) for tensor in group if (g := next(gradients)) is not None]
                if terms:
                    total += sum((g * tensor).double() for g, tensor in terms).square()  # type: ignore[union-attr]
            cut_graphs(model)
            count += 1
    if count == 0:
        raise DataError("batches: no batch came; give the validation data")
    processes = Processes.here()
    batches_of_all = processes.total(count)
    return [processes.sum(total) / batches_of_all for total in totals]


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
