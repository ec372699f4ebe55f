"""What each filter is worth, in units of the loss: measured where its channel is read (not in the paper)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.coupling import Channels, trace_coupling, unit_inputs
from basisprune.importance.basis_loss import BasisLoss, basis_loss
from basisprune.importance.layer_access import Batches, filter_values, first_images
from basisprune.importance.refit_worth import Array, Reading, refit_worth
from basisprune.torchkit.moments import LossStatistics, OutputStatistics, copies_of, input_statistics, reading
from basisprune.torchkit.running import Loss
from basisprune.types import Coupling, LayerScores, Scores


@dataclass(frozen=True)
class FilterLoss:
    """The scores of all filters, and the statistics that `prune_filters` can compensate with."""

    scores: Scores
    statistics: Mapping[str, OutputStatistics]


def filter_loss(
    model: nn.Module,
    coupling: Coupling,
    batches: Batches,
    *,
    loss: Loss = F.cross_entropy,
    refit: bool = False,
) -> FilterLoss:
    """The scores var(x) G of all filters of the coupling, and the statistics of the channels x they make.

    x is a channel as the next conv or linear layer reads it, behind norms, activations and depthwise convs, and G
    the mean over images of the squared loss gradient that comes back through that layer, summed over positions. A unit
    of coupled filters is worth the sum over all layers that read it, and each of its filters is given that sum: the
    scores of a unit agree, however they are reduced. They are twice what the loss is expected to rise when the
    filters go and their mean stays (see `prune_filters`), so they compare as they are, with `loss_scores` too. A unit
    that no such layer reads gets the highest score of all. With `refit`, the scores are for `compensate="refit"`: what
    the other filters of its group can make up for does not count (see `refit_worth`).

    `batches` are prepared training images with labels, or whatever the `loss` reads, seen once. The model is not
    changed.
    """
    found = input_statistics(model, list(unit_inputs(model, coupling)), batches, loss=loss)
    return _filter_loss(model, coupling, found, refit=refit)


def joint_loss(
    model: nn.Module,
    coupling: Coupling,
    batches: Batches,
    *,
    loss: Loss = F.cross_entropy,
    refit: bool = False,
) -> tuple[BasisLoss, FilterLoss]:
    """`basis_loss` and `filter_loss` of a decomposed model, from one pass over the images."""
    with reading(model, list(unit_inputs(model, coupling))) as inputs:
        basis = basis_loss(model, batches, loss=loss)
    return basis, _filter_loss(model, coupling, inputs.statistics(metric=True, copies=copies_of(batches)), refit=refit)


def _filter_loss(
    model: nn.Module, coupling: Coupling, found: Mapping[str, OutputStatistics], *, refit: bool
) -> FilterLoss:
    readers = unit_inputs(model, coupling)
    worth = _refit_worth(readers, found) if refit else _worth(readers, found)
    values = filter_values(model, coupling, worth, coupling.layers)
    scores = {name: LayerScores(tuple(value.tolist())) for name, value in values.items()}
    return FilterLoss(Scores("loss", scores), found)


def _worth(readers: Mapping[str, Mapping[str, Channels]], found: Mapping[str, OutputStatistics]) -> dict[str, Tensor]:
    """The worth of each unit of each group if nothing makes up for it."""
    worth: dict[str, Tensor] = {}
    for name, known in found.items():
        assert isinstance(known, LossStatistics)
        variances = known.covariance.diagonal(dim1=-2, dim2=-1).flatten().clamp_min(0)
        channels = (variances * known.metric.flatten()).cpu()
        for group, index in readers[name].items():
            here = channels[torch.from_numpy(index)].sum(1)
            worth[group] = worth[group] + here if group in worth else here
    return worth


def _refit_worth(
    readers: Mapping[str, Mapping[str, Channels]], found: Mapping[str, OutputStatistics]
) -> dict[str, Tensor]:
    """The worth of each unit of each group if the others make up for it, where a layer reads one channel of each."""
    readings: dict[str, list[Reading]] = {}
    alone: dict[str, Array] = {}
    for name, known in found.items():
        assert isinstance(known, LossStatistics)
        metric, covariance = known.metric.flatten().cpu().numpy(), known.covariance.cpu().numpy()
        variances = np.maximum(np.diagonal(covariance, axis1=-2, axis2=-1).reshape(-1), 0)
        for group, index in readers[name].items():
            alone.setdefault(group, np.zeros(len(index)))
            if len(covariance) == 1 and index.shape[1] == 1:
                chosen = index[:, 0]
                here = Reading(covariance[0][np.ix_(chosen, chosen)], metric[chosen])
                readings.setdefault(group, []).append(here)
            else:
                alone[group] += (variances * metric)[index].sum(1)
    return {group: torch.from_numpy(refit_worth(readings.get(group, []), values)) for group, values in alone.items()}


def filter_statistics(model: nn.Module, coupling: Coupling, batches: Iterable[object]) -> dict[str, OutputStatistics]:
    """What `prune_filters` needs to compensate with, from one forward pass; labels are not needed."""
    return input_statistics(model, list(unit_inputs(model, coupling)), batches)


def loss_values(
    model: nn.Module, layers: Sequence[str], batches: Batches, _seed: int, *, loss: Loss = F.cross_entropy
) -> dict[str, Tensor]:
    """The scores of `filter_loss` for these layers, with the coupling traced on the first of the batches."""
    coupling = trace_coupling(model, first_images(model, batches)[:2])
    scores = filter_loss(model, coupling, batches, loss=loss).scores
    return {name: torch.tensor(scores.layers[name].values, dtype=torch.float64) for name in layers}
