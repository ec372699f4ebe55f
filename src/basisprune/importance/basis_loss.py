"""What each basis vector is worth, in units of the loss (not in the paper)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.decompose import LinearLayers, split_layers
from basisprune.basis.layers import BasisPair, basis_pairs
from basisprune.basis.loss_basis import with_ridge
from basisprune.basis.refit import loss_basis_statistics
from basisprune.importance.basis_taylor import watched
from basisprune.importance.layer_access import Batches, first_images
from basisprune.torchkit.moments import LossStatistics, OutputStatistics
from basisprune.torchkit.running import Loss, mode
from basisprune.torchkit.surgery import LayerPatterns
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

    `batches` are prepared training images with labels, a few hundred, seen once; means and costs come with the
    scores as in `taylor_scores`. In a distributed run every process gets the same. The model is not changed.
    """
    return basis_loss(model, batches, loss=loss).scores


def split_by_loss(
    model: nn.Module,
    batches: Batches,
    *,
    loss: Loss = F.cross_entropy,
    ignored_layers: LayerPatterns = (),
    linear: LinearLayers = "auto",
) -> tuple[nn.Module, BasisLoss]:
    """`decompose(basis="loss", scale_init=1.0)`, and `basis_loss` of what comes out, from one pass instead of two.

    No output changes when layers are split, so what is known of them tells the features behind them. The costs of the
    vectors come from the first batch.
    """
    split = split_layers(
        model, scale_init=1.0, basis="loss", batches=batches, loss=loss, ignored_layers=ignored_layers, linear=linear
    )
    pairs = basis_pairs(split.model)
    found = {name: _features(pairs[name], known) for name, known in split.outputs.items() if name in pairs}
    with watched(split.model, pairs) as watches, torch.no_grad(), mode(split.model, training=False):
        split.model(first_images(split.model, batches))
    layers = {
        name: watches[name].scores(pairs[name], _worth(pairs[name], known), means=known.mean)
        for name, known in found.items()
    }
    return split.model, BasisLoss(Scores("loss", layers), found)


@torch.no_grad()
def _features(pair: BasisPair, outputs: OutputStatistics) -> LossStatistics:
    """The statistics of a full pair's basis features from those of its outputs: z = V^+ (y - b)."""
    assert isinstance(outputs, LossStatistics)
    inverse = torch.linalg.pinv(pair.scaling.columns())
    bias = 0.0 if pair.bias is None else pair.bias.double()
    mean = inverse @ (outputs.mean - bias).view(pair.scaling.groups, -1, 1)
    return LossStatistics(mean.flatten(), inverse @ outputs.covariance @ inverse.mT, outputs.metric)


def basis_loss(model: nn.Module, batches: Iterable[object], *, loss: Loss = F.cross_entropy) -> BasisLoss:
    """`loss_scores` and the statistics for `prune_basis(compensate="refit")`, from the same single pass."""
    pairs = basis_pairs(model)
    with watched(model, pairs) as watches:
        found = loss_basis_statistics(model, batches, loss=loss)
    layers = {
        name: watches[name].scores(pair, _worth(pair, found[name])) for name, pair in pairs.items() if name in found
    }
    return BasisLoss(Scores("loss", layers), found)


@torch.no_grad()
def _worth(pair: BasisPair, found: LossStatistics) -> Tensor:
    columns = pair.scaling.columns()
    variances = found.covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)  # rounding may leave less than nothing
    lengths = (columns * (with_ridge(found.metric) @ columns)).sum(1)
    worth: Tensor = (variances * lengths.clamp_min(0)).flatten()
    return worth
