"""First-order Taylor importance of the basis scaling factors (the paper's Section 3.3, eq. 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.errors import ModelError
from basisprune.importance.gradients import Loss, average_over_processes, mean_square_products
from basisprune.layers import BasisPair
from basisprune.surgery import find_layers
from basisprune.types import LayerScores, Scores


def basis_pairs(model: nn.Module) -> dict[str, BasisPair]:
    """Every decomposed layer of the model by its name; raises ModelError when there is none."""
    pairs = dict(find_layers(model, BasisPair))
    if not pairs:
        raise ModelError(f"{type(model).__name__} has no decomposed layers; call decompose(model) first")
    return pairs


def taylor_scores(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], *, loss: Loss = F.cross_entropy
) -> Scores:
    """(g s)^2 of every basis scaling factor s, with g the gradient of the loss on `batches` in eval mode.

    As in Molchanov et al. (2019) the square is taken batch by batch and averaged, so that gradients of
    opposite sign do not cancel over the data. `batches` are prepared images with labels, as a rule the
    validation data. The mean features along each basis vector are gathered in the same pass. In a
    distributed run every process gets the average over all processes. The model is not changed.
    """
    pairs = basis_pairs(model)
    with _mean_features(pairs) as features:
        squares = mean_square_products(model, [[pair.scaling.scale] for pair in pairs.values()], batches, loss)
    layers = {}
    for (name, pair), square in zip(pairs.items(), squares, strict=True):
        values, means = average_over_processes(square), average_over_processes(features[name])
        layers[name] = LayerScores(tuple(values.tolist()), pair.scaling.groups, tuple(means.tolist()))
    return Scores("taylor", layers)


@contextmanager
def _mean_features(pairs: dict[str, BasisPair]) -> Iterator[dict[str, Tensor]]:
    """A dict that holds, at the end, the mean of each layer's basis features; zeros where a layer never ran."""
    means = {name: torch.zeros_like(pair.scaling.scale, dtype=torch.float64) for name, pair in pairs.items()}
    counts = dict.fromkeys(pairs, 0)

    def hook_for(name: str, channel_axis: int) -> Callable[..., None]:
        @torch.no_grad()
        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            features = args[0].movedim(channel_axis, 0).flatten(1)
            means[name] += features.sum(1, dtype=torch.float64)
            counts[name] += features.shape[1]

        return hook

    handles = [
        pair.scaling.register_forward_pre_hook(hook_for(name, 1 if pair.scaling.spatial_dims else -1))
        for name, pair in pairs.items()
    ]
    try:
        yield means
    finally:
        for handle in handles:
            handle.remove()
    for name, count in counts.items():
        means[name] /= max(count, 1)
