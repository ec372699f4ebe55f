"""Basis vectors fitted to images: least squares when some go, new axes for those that stay (not in the paper)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.factors import make_pair, to_matrix
from basisprune.basis.layers import BasisPair, BasisScalingConv, basis_pairs, half_name
from basisprune.basis.loss_axes import split_by_axes
from basisprune.errors import ConfigError
from basisprune.torchkit.moments import LossStatistics, OutputStatistics, loss_statistics, output_statistics
from basisprune.torchkit.running import Loss
from basisprune.torchkit.surgery import replace_module

RIDGE = 1e-3
"""What is added to the variance of every feature, as a fraction of it, so that a few images are not fitted too well."""

Axes: TypeAlias = Literal["outputs", "loss"]

_SMALL_SCALE = 1e-4


def basis_statistics(model: nn.Module, batches: Iterable[object]) -> dict[str, OutputStatistics]:
    """Return the mean and covariance of each pair's basis features on `batches`, under the name of the pair.

    The sums over batches are in float64, the covariances are those within each group. `batches` are prepared images, as
    tensors or tuples that start with them; a few hundred images are enough. Layers that never ran are left out.

    >>> from basisprune.basis.decompose import decompose
    >>> found = basis_statistics(decompose(nn.Conv2d(3, 8, 1)), [torch.randn(4, 3, 5, 5)])
    >>> found[""].mean.shape, found[""].covariance.shape
    (torch.Size([3]), torch.Size([1, 3, 3]))
    """
    halves = {name: half_name(name, "basis") for name in basis_pairs(model)}
    found = output_statistics(model, list(halves.values()), batches, optional=list(halves.values()))
    return {name: found[half] for name, half in halves.items() if half in found}


def loss_basis_statistics(
    model: nn.Module, batches: Iterable[object], *, loss: Loss = F.cross_entropy
) -> dict[str, LossStatistics]:
    """Like `basis_statistics`, with the metric of the loss at each pair's output; one forward and backward pass.

    `batches` are prepared images with labels. The metric is (groups, c_o / groups, c_o / groups).
    """
    pairs = basis_pairs(model)
    bases, scalings = [half_name(name, "basis") for name in pairs], [half_name(name, "scaling") for name in pairs]
    found = loss_statistics(model, bases, batches, loss=loss, gradients_at=scalings, optional=bases)
    return {name: found[half] for name, half in zip(pairs, bases, strict=True) if half in found}


def rebase(
    model: nn.Module,
    batches: Iterable[object],
    *,
    basis: Axes = "outputs",
    loss: Loss = F.cross_entropy,
    inplace: bool = False,
) -> nn.Module:
    """Return the model with every pair turned to the principal axes of what it outputs on `batches`, scales at 1.

    The output is unchanged, as are the ranks (but for a pair with more basis vectors than outputs, which loses
    those that are too many); the features along the new basis vectors are uncorrelated, in descending order of
    their variance. This is what `decompose(basis="outputs")` does for a dense layer: after pruning and training
    the old axes are no longer principal ones, and scores act on each axis alone. `basis="loss"` is the same for
    `decompose(basis="loss")`; its batches need labels. Because no output changes, one pass is enough for all layers.

    >>> from basisprune.basis.decompose import decompose
    >>> rebase(decompose(nn.Conv2d(3, 8, 1)), [torch.randn(4, 3, 5, 5)]).scaling.scale.tolist()
    [1.0, 1.0, 1.0]
    """
    if basis not in get_args(Axes):
        raise ConfigError(f"basis: {basis!r} given; allowed are {', '.join(get_args(Axes))}")
    if basis == "loss":
        return split_by_axes(model, basis_pairs(model), batches, loss, inplace=inplace)[0]
    found = basis_statistics(model, batches)
    turned = {name: _turned(pair, found[name]) for name, pair in basis_pairs(model).items() if name in found}
    result = model if inplace else copy.deepcopy(model)
    for name, pair in turned.items():
        result = replace_module(result, name, pair)
    return result


@torch.no_grad()
def _turned(pair: BasisPair, found: OutputStatistics) -> BasisPair:
    # V_s = space triangle; the outputs' covariance within that space is triangle C triangle^T.
    space, triangle = torch.linalg.qr(pair.scaling.columns())
    _, axes = torch.linalg.eigh(triangle @ found.covariance @ triangle.mT)
    axes = axes.flip(-1)
    first, second = to_matrix(pair.basis) @ triangle.mT @ axes, space @ axes
    turned = make_pair(pair.basis, first, second.mT, pair.scaling.bias)
    turned.scaling.scale.requires_grad_(pair.scaling.scale.requires_grad)
    return turned


@torch.no_grad()
def refit_scaling(
    scaling: BasisScalingConv, keep: Sequence[int], statistics: OutputStatistics, *, ridge: float = RIDGE
) -> BasisScalingConv:
    """The layer for the kept basis features alone whose output is nearest to that of all of them.

    The features that go are predicted from those that stay, z_P ~ m_P + A (z_K - m_K) with
    A = C_PK (C_KK + ridge)^-1, and the prediction moves into weight and bias: V_K + V_P A, and
    b + V_P (m_P - A m_K). The scales stay as they are, but for those that are nearly zero: what is predicted
    through them must not vanish, so these become 1. With all covariances zero, only the bias changes.
    """
    groups, like, weight = scaling.groups, scaling.weight, scaling.columns()
    width = weight.shape[2]
    kept = torch.tensor(keep, device=like.device).view(groups, -1) % width  # places within their group
    goes = torch.ones(groups, width, dtype=torch.bool, device=like.device).scatter(1, kept, False)
    gone = goes.nonzero()[:, 1].view(groups, -1)
    predictor = least_squares(statistics, kept, gone, torch.finfo(like.dtype).eps, ridge=ridge)
    lost = weight.take_along_dim(gone[:, None], 2)
    scale = scaling.scale[list(keep)]
    scale = torch.where(scale.abs() < _SMALL_SCALE, 1.0, scale)
    columns = weight.take_along_dim(kept[:, None], 2) + lost @ predictor
    mean = statistics.mean.to(like.device).view(groups, -1, 1)
    unsaid = mean.take_along_dim(gone[..., None], 1) - predictor @ mean.take_along_dim(kept[..., None], 1)
    bias = (lost @ unsaid).flatten()
    if scaling.bias is not None:
        bias += scaling.bias.double()
    slim = _like(scaling, columns / scale.double().view(groups, 1, -1), bias.to(like.dtype))
    slim.scale.copy_(scale)
    slim.scale.requires_grad_(scaling.scale.requires_grad)
    return slim


def _like(scaling: BasisScalingConv, weight: Tensor, bias: Tensor | None) -> BasisScalingConv:
    """A layer of the same kind with this weight (groups, outputs, inputs) and scales of 1."""
    groups, _, width = weight.shape
    flat = weight.flatten(0, 1).to(scaling.weight.dtype)
    shaped = flat.reshape(*flat.shape, *[1] * scaling.spatial_dims)
    return BasisScalingConv(shaped, scale=scaling.scale.new_ones(groups * width), bias=bias, groups=groups)


def least_squares(
    statistics: OutputStatistics, kept: Tensor, gone: Tensor, eps: float, *, ridge: float = RIDGE, faint: float = 0.0
) -> Tensor:
    """A (groups, p, k): how the features that go follow from those that stay, z_P ~ m_P + A (z_K - m_K).

    `kept` (groups, k) and `gone` (groups, p) are places within the groups, `eps` the precision of the features. Solved
    for features of unit variance, so that their sizes do not matter. A feature that hardly varies says nothing but
    rounding errors, and is left out. With `faint`, a feature whose
    variance is far below that part of the mean one counts as smaller than it is, so that it hardly predicts anything:
    its weight would be huge, and training, which moves features, would move the output out of all proportion.
    """
    covariance = statistics.covariance.to(kept.device)
    rows = covariance.take_along_dim(kept[:, :, None], 1)
    inner = rows.take_along_dim(kept[:, None], 2)
    cross = rows.take_along_dim(gone[:, None], 2).mT
    variance = inner.diagonal(dim1=-2, dim2=-1)
    size = (covariance.diagonal(dim1=-2, dim2=-1) + statistics.mean.to(kept.device).view(len(kept), -1).square()).amax()
    alive = variance > size * (10 * eps) ** 2
    noise = faint * variance.mean(-1, keepdim=True)
    unit = torch.where(alive, variance + noise, 1.0).rsqrt() * alive
    if not bool(cross.any()):  # as between the features of a fresh basis
        return cross
    least = max(ridge, eps * unit.shape[1])  # two features may be the same
    correlations = unit[:, :, None] * inner * unit[:, None]
    root = torch.linalg.cholesky(correlations + least * torch.eye(unit.shape[1], dtype=unit.dtype, device=unit.device))
    predictor: Tensor = torch.cholesky_solve((cross * unit[:, None]).mT, root).mT * unit[:, None]
    return predictor
