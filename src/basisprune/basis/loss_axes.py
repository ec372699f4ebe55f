"""The basis of the loss: axes in the metric of the loss, for layers that are split and pairs that are turned to it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from basisprune.basis.factors import balance_of, balanced, make_pair, plain_layer, to_matrix
from basisprune.basis.layers import BasisPair, half_name
from basisprune.torchkit.moments import InputStatistics, LossStatistics, OutputStatistics, loss_statistics
from basisprune.torchkit.running import Loss, copied
from basisprune.torchkit.surgery import Layer, is_plain, is_transposed, replace_module

logger = logging.getLogger(__name__)

RIDGE = 1e-2
"""What is added to the diagonal of G, as a fraction of its mean, so that no direction seems free for want of images."""

_TINY = 1e-12


def with_ridge(metric: Tensor) -> Tensor:
    """G (…, n, n) with a small multiple of the identity added."""
    size = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    return metric + RIDGE * size * _eye(metric)


def metric_roots(metric: Tensor) -> tuple[Tensor, Tensor]:
    """G^1/2 and G^-1/2 (…, n, n), with the ridge in G; where the loss reads nothing, G counts as the identity."""
    read = metric.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None] > 0
    values, axes = torch.linalg.eigh(torch.where(read, with_ridge(metric), _eye(metric)))
    roots = values.sqrt()[..., None, :]
    return axes * roots @ axes.mT, axes / roots @ axes.mT


def _eye(metric: Tensor) -> Tensor:
    return torch.eye(metric.shape[-1], dtype=metric.dtype, device=metric.device)


@dataclass(frozen=True)
class Features:
    """What is known of the features of a pair: their moments, and what each vector is worth to the loss (groups, r)."""

    statistics: OutputStatistics
    worth: Tensor


@torch.no_grad()
def split_by_axes(
    model: nn.Module,
    layers: Mapping[str, Layer | BasisPair],
    batches: Iterable[object],
    loss: Loss,
    *,
    scale_init: float = 1.0,
    inplace: bool = False,
) -> tuple[nn.Module, dict[str, Features]]:
    """Return the model with these layers split by the loss, and pairs turned to it, from one pass over the batches.

    Layers that never ran are left alone.
    """
    inside = {name: weight for name, part in layers.items() if (weight := _few_inputs(part)) is not None}
    sites = {name: _half(name, part, "basis" if name in inside else "scaling") for name, part in layers.items()}
    gradients = {name: _half(name, part, "scaling") for name, part in layers.items()}
    seen = loss_statistics(
        model,
        list(sites.values()),
        batches,
        loss=loss,
        gradients_at=list(gradients.values()),
        optional=list(sites.values()),
        inside={gradients[name]: weight for name, weight in inside.items()},
    )
    ran = that_ran(layers, {name: True for name, site in sites.items() if site in seen})
    split = {name: _split_by_axes(name, layers[name], seen[sites[name]], scale_init) for name in ran}
    result = with_pairs(model, {name: pair for name, (pair, _) in split.items()}, inplace=inplace)
    return result, {name: features for name, (_, features) in split.items()}


def _half(name: str, layer: Layer | BasisPair, half: Literal["basis", "scaling"]) -> str:
    """Return the name of the half of a pair, or of the layer that is none."""
    return half_name(name, half) if isinstance(layer, BasisPair) else name


def _few_inputs(layer: Layer | BasisPair) -> Tensor | None:
    """Return the weight (groups, outputs, inputs) of a pointwise layer, if its inputs say all in fewer numbers."""
    if isinstance(layer, BasisPair):
        weight = layer.scaling.columns().detach()
        return weight if weight.shape[2] <= weight.shape[1] else None
    if not is_plain(layer) or is_transposed(layer):
        return None
    if not isinstance(layer, nn.Linear) and (set(layer.kernel_size) != {1} or any(layer.padding)):
        return None
    weight = to_matrix(layer).mT
    return weight if weight.shape[2] < weight.shape[1] else None


def _split_by_axes(
    name: str, layer: Layer | BasisPair, seen: LossStatistics, scale_init: float
) -> tuple[BasisPair, Features]:
    if isinstance(layer, BasisPair):
        like, outer, rows = layer.basis, to_matrix(layer.basis), layer.scaling.columns().mT
        matrix = rows if isinstance(seen, InputStatistics) else outer @ rows
    else:
        like, matrix = plain_layer(name, layer)
    bias = layer.scaling.bias if isinstance(layer, BasisPair) else like.bias
    inside = isinstance(seen, InputStatistics)
    axes = (
        _axes_inside(matrix, seen) if isinstance(seen, InputStatistics) else _axes(matrix, seen.covariance, seen.metric)
    )
    first, second = balanced(axes.first, axes.second)
    mean = seen.mean if inside or bias is None else seen.mean - bias.double()
    # The features as `axes` has them, then as balancing scales them.
    scale = balance_of(axes.first, axes.second)
    mean = scale * (axes.reads @ mean.view(len(matrix), -1, 1))[..., 0]
    variances = (axes.reads @ seen.covariance * axes.reads).sum(-1).clamp_min(0)  # rounding may leave less than nothing
    statistics = OutputStatistics(
        mean.flatten(), torch.diag_embed(scale.square() * variances), positions=seen.positions
    )
    if isinstance(layer, BasisPair) and inside:
        first = outer @ first
    pair = make_pair(like, first, second, bias, scale=scale_init)
    if isinstance(layer, BasisPair):
        pair.scaling.scale.requires_grad_(layer.scaling.scale.requires_grad)
    return pair, Features(statistics, variances)


class Axes(NamedTuple):
    """Factors (groups, k, r) and (groups, r, c_o / groups), and what reads the features off what was seen.

    The vectors have length 1 in the metric, so that the variances of the features are what they are worth.
    """

    first: Tensor
    second: Tensor
    reads: Tensor


def loss_basis(matrix: Tensor, covariance: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """W G^1/2 U (…, k, r) and U^T G^-1/2 (…, r, c_o), in descending order of what a vector is worth, balanced.

    With C the covariance of a layer's outputs and G the second moment of the loss gradient there, taking the outputs y
    - E[y] to P (y - E[y]) costs about tr(G (1 - P) C (1 - P)^T) / 2. In coordinates G^1/2 y this is a plain distance,
    and the best P of a rank keeps the leading eigenvectors U of G^1/2 C G^1/2: the eigenvalues are what the others
    cost. `matrix` is W (…, k, c_o), `covariance` C and `metric` G of its outputs (…, c_o, c_o). Fewer inputs than
    outputs: U is taken within what the layer can output, so that the product is W at full rank.
    """
    axes = _axes(matrix, covariance, metric)
    return balanced(axes.first, axes.second)


def _axes(matrix: Tensor, covariance: Tensor, metric: Tensor) -> Axes:
    root, inverse = metric_roots(metric)
    seen = matrix @ root
    inner = root @ covariance @ root
    if matrix.shape[-2] < matrix.shape[-1]:
        space, _ = torch.linalg.qr(seen.mT)
        _, axes = torch.linalg.eigh(space.mT @ inner @ space)
        vectors = space @ axes.flip(-1)
    else:
        _, axes = torch.linalg.eigh(inner)
        vectors = axes.flip(-1)
    return Axes(seen @ vectors, vectors.mT @ inverse, vectors.mT @ root)


def _axes_inside(matrix: Tensor, known: InputStatistics) -> Axes:
    """The same for a layer with fewer inputs than outputs, by what is known of its inputs.

    With D the covariance of the inputs, C = W D W^T has the rank of D, and within it the eigenvectors are those of
    R D R^T, where R^T R = W^T G W: as many numbers as there are inputs.
    """
    gram = matrix @ matrix.mT
    metric = known.metric + RIDGE * known.strength * gram if known.strength > 0 else gram
    size = metric.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    root = torch.linalg.cholesky(metric + torch.where(size > 0, _TINY * size, 1.0) * _eye(metric), upper=True)
    _, axes = torch.linalg.eigh(root @ known.covariance @ root.mT)
    vectors = axes.flip(-1)
    reads = vectors.mT @ root
    return Axes(reads.mT, torch.linalg.solve_triangular(root, vectors, upper=True).mT @ matrix, reads)


def that_ran(names: Iterable[str], found: Mapping[str, object]) -> list[str]:
    """Return the names that something was found of; log the others."""
    if idle := [name for name in names if name not in found]:
        logger.info("left alone, because they never ran on the given images: %s", ", ".join(idle))
    return [name for name in names if name in found]


def with_pairs(model: nn.Module, pairs: Mapping[str, BasisPair], *, inplace: bool) -> nn.Module:
    """Return the model with these pairs in the places of their names."""
    result = model if inplace else copied(model)
    for name, pair in pairs.items():
        result = replace_module(result, name, pair)
    return result
