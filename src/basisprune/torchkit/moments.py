"""What layers put out on given images: means and covariances, gathered in one forward pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from basisprune.errors import DataError, LayerError
from basisprune.torchkit.running import images_of, mode


@dataclass(frozen=True)
class OutputStatistics:
    """Mean (c_o) and covariance per group (groups, c_o / groups, c_o / groups) of a layer's output, float64."""

    mean: Tensor
    covariance: Tensor


@torch.no_grad()
def output_statistics(model: nn.Module, names: Sequence[str], batches: Iterable[object]) -> dict[str, OutputStatistics]:
    """The mean and covariance of the output of each layer named, over all images and positions, in eval mode.

    The model is not changed. Raises DataError when there is no batch, LayerError for a layer that never ran
    or whose output is not finite.
    """
    sums = {name: _Moments(model.get_submodule(name)) for name in names}
    handles = [model.get_submodule(name).register_forward_hook(moments.hook) for name, moments in sums.items()]
    try:
        with mode(model, training=False):
            count = 0
            for batch in batches:
                model(images_of(batch).to(next(model.parameters()).device))
                count += 1
    finally:
        for handle in handles:
            handle.remove()
    if count == 0:
        raise DataError("batches: no batch came; a few hundred prepared images are needed")
    return {name: moments.result(name) for name, moments in sums.items()}


class _Moments:
    """Running first and second moments of a layer's output, shifted by its first batch's mean.

    The shift keeps the subtraction of the squared mean from cancelling; sums are kept in float64.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.groups: int = getattr(layer, "groups", 1)
        self.channels_last = isinstance(layer, nn.Linear)
        self.count = 0
        self.shift: Tensor | None = None

    def hook(self, _layer: nn.Module, _args: Any, output: Tensor) -> None:
        rows = output.flatten(0, -2) if self.channels_last else output.transpose(0, 1).flatten(1).mT
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # half precision cannot hold a variance
        if self.shift is None:
            self.shift = rows.mean(0)
            self.first = torch.zeros_like(self.shift, dtype=torch.float64)
            per_group = rows.shape[1] // self.groups
            self.second = self.first.new_zeros(self.groups, per_group, per_group)
        centred = rows - self.shift
        grouped = centred.unflatten(1, (self.groups, -1)).transpose(0, 1)
        self.first += centred.sum(0, dtype=torch.float64)
        with torch.autocast(rows.device.type, enabled=False):
            self.second += grouped.mT @ grouped
        self.count += len(rows)

    def result(self, name: str) -> OutputStatistics:
        if self.shift is None:
            raise LayerError(name, "never ran on the given images; add it to ignored_layers of decompose")
        if not bool(self.second.isfinite().all()):
            raise LayerError(name, "puts out NaN or infinite values on the given images; check images and weights")
        mean = self.first / self.count
        grouped = mean.view(self.groups, -1, 1)
        return OutputStatistics(mean + self.shift, self.second / self.count - grouped @ grouped.mT)
