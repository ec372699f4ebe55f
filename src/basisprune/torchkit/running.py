"""What every run of a network needs: its mode for a while, and the images of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from basisprune.errors import DataError


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The model in train or eval mode for a while; every module gets its own mode back afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


def images_of(batch: object) -> Tensor:
    """The images of a batch, which is a tensor, or a tuple or list that starts with one."""
    images = batch[0] if isinstance(batch, tuple | list) and batch else batch
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = f"{images.dtype} tensor" if isinstance(images, Tensor) else type(images).__name__
        raise DataError(
            f"batches: a {kind} given, a float tensor of prepared images is needed; "
            "basisprune.data.PreparedBatches makes them from any data"
        )
    return images
