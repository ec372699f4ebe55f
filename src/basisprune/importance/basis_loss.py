"""What each basis vector is worth, in units of the loss (not in the paper)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.decompose import LinearLayers, split_layers
from basisprune.basis.layers import BasisPair, basis_pairs
from basisprune.basis.loss_basis import with_ridge
from basisprune.basis.refit import loss_basis_statistics
from basisprune.importance.basis_taylor import layer_scores
from basisprune.torchkit.moments import LossStatistics, OutputStatistics
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import Loss
from basisprune.torchkit.surgery import LayerPatterns, find_layers, is_transposed
from basisprune.types import Scores


@dataclass(frozen=True)
class BasisLoss:
    """The scores of all basis vectors, and the statistics of their features that `prune_basis` can refit with."""

    scores: Scores
    statistics: Mapping[str, LossStatistics]


def loss_scores(model: nn.Module, batches: Iterable[object], *, loss: Loss = F.cross_entropy) -> Scores:
    """var(z) v^T G v of every basis vector: twice what the loss is expected to rise when it goes, up to its mean.

    z is the feature along the vector, v its column of the second factor, scale included, and G the second moment of
    the loss gradient at the pair's output (see `LossStatistics`), with the ridge of the loss basis: the scores of a
    fresh loss basis are the eigenvalues that it was chosen by. They serve every other basis, before and after training,
    and compare across layers as they are.

    `batches` are prepared training images with labels, better two thousand than two hundred, seen once; means and
    costs come with the scores as in `taylor_scores`. In a distributed run every process gets the same. The model
    is not changed.
    """
    return basis_loss(model, batches, loss=loss).scores


def basis_loss(model: nn.Module, batches: Iterable[object], *, loss: Loss = F.cross_entropy) -> BasisLoss:
    """`loss_scores` and the statistics for `prune_basis(compensate="refit")`, from the same single pass."""
    return _scored(basis_pairs(model), loss_basis_statistics(model, batches, loss=loss))


def split_by_loss(
    model: nn.Module,
    batches: Iterable[object],
    *,
    loss: Loss = F.cross_entropy,
    ignored_layers: LayerPatterns = (),
    linear: LinearLayers = "auto",
) -> tuple[nn.Module, BasisLoss]:
    """`decompose(basis="loss", scale_init=1.0)`, and `basis_loss` of the new pairs, from one pass instead of two.

    No output changes when layers are split, so what is known of the outputs tells the features behind them. In a
    distributed run every process gets the same model. There are no scores where nothing could be split.
    """
    split = split_layers(
        model, scale_init=1.0, basis="loss", batches=batches, loss=loss, ignored_layers=ignored_layers, linear=linear
    )
    agreed = Processes.here().agree(split.model)
    pairs = {name: pair for name, pair in find_layers(agreed, BasisPair) if name in split.outputs}
    return agreed, _scored(pairs, {name: _features(pair, split.outputs[name]) for name, pair in pairs.items()})


def _scored(pairs: Mapping[str, BasisPair], found: Mapping[str, LossStatistics]) -> BasisLoss:
    layers = {
        name: layer_scores(pairs[name], _worth(pairs[name], known), known.mean, _uses(pairs[name], known))
        for name, known in found.items()
    }
    return BasisLoss(Scores("loss", layers), found)


def _uses(pair: BasisPair, known: LossStatistics) -> tuple[float, float]:
    """How often one image uses a filter and a column: in a transposed conv, every input meets all of a filter once."""
    reads, writes = known.positions
    return (reads if is_transposed(pair.basis) else writes), writes


@torch.no_grad()
def _features(pair: BasisPair, outputs: OutputStatistics) -> LossStatistics:
    """The statistics of a full pair's basis features from those of its outputs: z = V^+ (y - b)."""
    assert isinstance(outputs, LossStatistics)
    inverse = torch.linalg.pinv(pair.scaling.columns())
    bias = 0.0 if pair.bias is None else pair.bias.double()
    mean = inverse @ (outputs.mean - bias).view(pair.scaling.groups, -1, 1)
    return replace(outputs, mean=mean.flatten(), covariance=inverse @ outputs.covariance @ inverse.mT)


@torch.no_grad()
def _worth(pair: BasisPair, found: LossStatistics) -> Tensor:
    columns = pair.scaling.columns()
    variances = found.covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)  # rounding may leave less than nothing
    lengths = (columns * (with_ridge(found.metric) @ columns)).sum(1)
    worth: Tensor = (variances * lengths.clamp_min(0)).flatten()
    return worth
