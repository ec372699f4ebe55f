"""First-order Taylor importance of the basis scaling factors (the paper's Section 3.3, eq. 4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair, basis_pairs
from basisprune.importance.gradients import mean_square_products
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import Loss, hooked
from basisprune.torchkit.surgery import Layer, has_channels_last, is_transposed
from basisprune.types import LayerScores, Scores


def taylor_scores(model: nn.Module, batches: Iterable[object], *, loss: Loss = F.cross_entropy) -> Scores:
    """(g s)^2 of every basis scaling factor s, with g the gradient of the loss on `batches` in eval mode.

    As in Molchanov et al. (2019) the square is taken batch by batch and averaged, so that gradients of
    opposite sign do not cancel over the data. `batches` are prepared images with labels, or whatever the `loss` reads
    (a function of output and labels, or a `Task`), as a rule the validation data. The mean features along each basis
    vector are gathered in the same pass, and what a vector costs: the weights of its filter in the basis and of its
    column in the scaling (its scale merges into these), and as multiply-adds each of them times the positions it works
    at, summed over all calls of a layer that runs more than once. Those are the positions of the output; for the filter
    of a transposed conv, whose weights meet every input once, those of the input.

    Linear layers that were never called, because the attention around them reads their dense weight, are left out.
    In a distributed run every process gets the mean over the batches of all. The model is not changed.
    """
    pairs = basis_pairs(model)
    with watched(model, pairs) as watches:
        squares = mean_square_products(model, [[pair.scaling.scale] for pair in pairs.values()], batches, loss)
    layers = {
        name: watches[name].scores(pair, square)
        for (name, pair), square in zip(pairs.items(), squares, strict=True)
        if not watches[name].is_bypassed(pair)
    }
    return Scores("taylor", layers)


class Watch:
    """The mean basis features of a pair, and how often a filter and a column of it are used for one image."""

    def __init__(self, pair: BasisPair) -> None:
        self.channel_axis = -1 if has_channels_last(pair.scaling) else 1
        self.means = torch.zeros_like(pair.scaling.scale, dtype=torch.float64, requires_grad=False)
        self.positions = self.means.new_zeros(2)

    @torch.no_grad()
    def hook(self, basis: Layer, args: tuple[Tensor, ...], output: Tensor) -> None:
        """Notes one call of the basis layer."""
        features = output.movedim(self.channel_axis, 0).flatten(1)
        self.means += features.sum(1, dtype=torch.float64)
        reads = args[0].numel() // args[0].shape[1] if is_transposed(basis) else features.shape[1]
        self.positions += self.positions.new_tensor([reads, features.shape[1]])

    def is_bypassed(self, pair: BasisPair) -> bool:
        """Whether it is a linear layer that was never called: at most its weight is read, and pruning is no use."""
        return pair.scaling.spatial_dims == 0 and not bool(self.positions[1])

    def scores(self, pair: BasisPair, values: Tensor) -> LayerScores:
        """The values with means and costs beside them."""
        reads, writes = self.positions.tolist()
        return layer_scores(pair, values, self.means, (reads, writes))


def layer_scores(pair: BasisPair, values: Tensor, means: Tensor, positions: tuple[float, float]) -> LayerScores:
    """The scores of a pair's vectors with their means, and what a vector costs.

    `positions` are how often one image uses a filter and a column of it.
    """
    filters, columns = pair.basis.weight.numel() // pair.rank, pair.scaling.weight.numel() // pair.rank
    return LayerScores(
        tuple(values.tolist()),
        pair.scaling.groups,
        tuple(means.tolist()),
        parameters=filters + columns,
        macs=round(positions[0] * filters + positions[1] * columns),
    )


@contextmanager
def watched(model: nn.Module, pairs: dict[str, BasisPair]) -> Iterator[dict[str, Watch]]:
    """What each layer's basis outputs while the model runs, of all processes, known at the end; zeros without a run."""
    watches = {name: Watch(pair) for name, pair in pairs.items()}
    images = 0

    def count(_model: nn.Module, args: tuple[Tensor, ...]) -> None:
        nonlocal images
        images += len(args[0])

    handles = [pair.basis.register_forward_hook(watches[name].hook) for name, pair in pairs.items()]
    handles.append(model.register_forward_pre_hook(count))
    with hooked(handles):
        yield watches
    processes = Processes.here()
    images = processes.total(images)
    for watch in watches.values():
        watch.means, watch.positions = processes.sum(watch.means), processes.sum(watch.positions)
        watch.means /= watch.positions[1].clamp(min=1)
        watch.positions /= max(images, 1)
