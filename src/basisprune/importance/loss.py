"""What each basis vector and each filter is worth, in units of the loss (not in the paper)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.decompose import LinearLayers, layers_to_split
from basisprune.basis.layers import BasisPair, basis_pairs
from basisprune.basis.loss_axes import split_by_axes, with_ridge
from basisprune.basis.refit import loss_basis_statistics
from basisprune.coupling import Channels, trace_coupling, unit_inputs
from basisprune.importance.layer_access import Batches, filter_values, first_images
from basisprune.importance.taylor import layer_scores
from basisprune.torchkit.moments import LossStatistics, OutputStatistics, copies_of, input_statistics, reading
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import Loss, ReadBatches, copied, has_computed_weights
from basisprune.torchkit.surgery import LayerPatterns, find_layers, is_transposed
from basisprune.types import Coupling, LayerScores, Scores


@dataclass(frozen=True)
class BasisLoss:
    """The scores of all basis vectors, and the statistics of their features that `prune_basis` can refit with."""

    scores: Scores
    statistics: Mapping[str, OutputStatistics]


def loss_scores(model: nn.Module, batches: Iterable[object], *, loss: Loss = F.cross_entropy) -> Scores:
    """Return var(z) v^T G v of every basis vector: twice the expected rise of the loss when it goes, up to its mean.

    z is the feature along the vector, v its column of the second factor, scale included, and G the second moment of
    the loss gradient at the pair's output (see `LossStatistics`), with the ridge of the loss basis: the scores of a
    fresh loss basis are the eigenvalues that it was chosen by. They serve every other basis, before and after training,
    and compare across layers as they are. `batches` are prepared training images with labels, better two thousand than
    two hundred, seen once; means and costs come with the scores as in `taylor_scores`.
    """
    return basis_loss(model, batches, loss=loss).scores


def basis_loss(model: nn.Module, batches: Iterable[object], *, loss: Loss = F.cross_entropy) -> BasisLoss:
    """`loss_scores` and the statistics for `prune_basis(compensate="refit")`, from the same single pass."""
    pairs, found = basis_pairs(model), loss_basis_statistics(model, batches, loss=loss)
    return _scored(pairs, {name: _vector_worth(pairs[name], known) for name, known in found.items()}, found)


def split_by_loss(
    model: nn.Module,
    batches: Iterable[object],
    *,
    loss: Loss = F.cross_entropy,
    ignored_layers: LayerPatterns = (),
    linear: LinearLayers = "auto",
) -> tuple[nn.Module, BasisLoss]:
    """Split every layer, turn every pair, and score all their vectors, from one pass instead of three.

    That is `decompose(basis="loss", scale_init=1.0)`, `rebase(basis="loss")` and `basis_loss`. No output changes when
    layers are split, so what is known of the outputs tells the features behind them. There are no scores where nothing
    could be split.
    """
    if has_computed_weights(model):
        model = copied(model)
    layers = layers_to_split(model, ignored_layers=ignored_layers, linear=linear)
    split, found = split_by_axes(model, {**dict(find_layers(model, BasisPair)), **layers}, batches, loss)
    agreed = Processes.here().agree(split)
    pairs = {name: pair for name, pair in find_layers(agreed, BasisPair) if name in found}
    worth = {name: each.worth for name, each in found.items()}
    return agreed, _scored(pairs, worth, {name: each.statistics for name, each in found.items()})


def _scored(
    pairs: Mapping[str, BasisPair], worth: Mapping[str, Tensor], found: Mapping[str, OutputStatistics]
) -> BasisLoss:
    layers = {}
    for name, known in found.items():
        reads, writes = known.positions
        uses = reads if is_transposed(pairs[name].basis) else writes, writes  # each input meets all of such a filter
        layers[name] = layer_scores(pairs[name], worth[name].flatten(), known.mean, uses)
    return BasisLoss(Scores("loss", layers), found)


@torch.no_grad()
def _vector_worth(pair: BasisPair, found: LossStatistics) -> Tensor:
    columns = pair.scaling.columns()
    variances = found.covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)  # rounding may leave less than nothing
    lengths = (columns * (with_ridge(found.metric) @ columns)).sum(1)
    return variances * lengths.clamp_min(0)


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
    """Return the scores var(x) G of all filters of the coupling, and the statistics of the channels x they make.

    x is a channel as the next conv or linear layer reads it, behind norms, activations and depthwise convs, and G the
    mean over images of the squared loss gradient that comes back through that layer, summed over positions. A unit of
    coupled filters is worth the sum over all layers that read it, and each of its filters is given that sum. They are
    twice what the loss is expected to rise when the filters go and their mean stays (see `prune_filters`), so they
    compare as they are, with `loss_scores` too. A unit that no such layer reads gets the highest score of all. With
    `refit`, what the other filters of its group can make up for does not count (see `refit_worth`).
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
    read = ReadBatches(batches, loss)
    with reading(model, list(unit_inputs(model, coupling))) as inputs:
        basis = basis_loss(model, read, loss=loss)
    inputs.images = read.images
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


Array = npt.NDArray[np.float64]

_DENSE = 0.9  # the share of units not yet chosen below which the others are left out


@dataclass(frozen=True)
class Reading:
    """What one layer reads of the units of a group: (units, units) their covariance, (units) what variance is worth."""

    covariance: Array
    metric: Array


def refit_worth(readings: Sequence[Reading], alone: Array) -> Array:
    """The worth of each unit (units): what is lost in addition when it goes after all that are worth less.

    Units are chosen one after the other, each the one without which the least can be predicted by least squares from
    those already chosen, in all layers that read them; a unit's worth is what choosing it saves. `alone` (units) is
    worth that nothing makes up for. Of two equal channels, the second is worth nothing.

    >>> twins = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> refit_worth([Reading(twins, np.ones(3))], np.zeros(3)).tolist()
    [2.0, 0.0, 1.0]
    """
    rest = [_weighted(reading) for reading in readings]
    least = [1e-10 * float(np.diagonal(each).max(initial=0.0)) for each in rest]
    worth, order = np.zeros(len(alone)), np.zeros(len(alone), dtype=np.int64)
    units, left = np.arange(len(alone)), np.ones(len(alone), dtype=bool)
    for place in range(len(alone)):
        if left.sum() < _DENSE * len(left):  # what was chosen is all zero by now
            rest = [each[np.ix_(left, left)] for each in rest]
            units, left = units[left], np.ones(int(left.sum()), dtype=bool)
        saved = alone[units] + sum((_saved(each, floor) for each, floor in zip(rest, least, strict=True)), 0.0)
        best = int(np.argmax(np.where(left, saved, -1.0)))
        order[place], worth[place], left[best] = units[best], saved[best], False
        for each, floor in zip(rest, least, strict=True):
            if each[best, best] > floor:
                column = each[:, best] / np.sqrt(each[best, best])
                each -= np.outer(column, column)
    result = np.empty_like(worth)
    # A unit that is chosen later is not worth more: the two save it together.
    result[order] = np.maximum.accumulate(worth[::-1])[::-1]
    return result


def _saved(rest: Array, floor: float) -> Array:
    pivots = np.diagonal(rest)
    sums = np.einsum("ij,ij->j", rest, rest)
    found: Array = np.divide(sums, pivots, out=np.zeros_like(sums), where=pivots > floor)
    return found


def _weighted(reading: Reading) -> Array:
    root = np.sqrt(np.maximum(reading.metric, 0))
    return root[:, None] * reading.covariance * root[None]
