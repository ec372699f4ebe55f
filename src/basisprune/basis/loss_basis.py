"""The basis in the metric of the loss: the vectors that a layer can lose at the least cost (not in the paper).

With C the covariance of a layer's outputs and G the second moment of the loss gradient there, taking the outputs
y - E[y] to P (y - E[y]) costs about tr(G (1 - P) C (1 - P)^T) / 2. In coordinates G^1/2 y this is a plain distance,
and the best P of a rank keeps the leading eigenvectors U of G^1/2 C G^1/2: the eigenvalues are what the others cost.
"""

from __future__ import annotations

import torch
from torch import Tensor

RIDGE = 1e-2
"""What is added to the diagonal of G, as a fraction of its mean, so that no direction seems free for want of images."""

_SHORT = 1e-6


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


def loss_basis(matrix: Tensor, covariance: Tensor, metric: Tensor) -> tuple[Tensor, Tensor]:
    """W G^1/2 U (…, k, r) and U^T G^-1/2 (…, r, c_o), in descending order of what a vector is worth, balanced.

    `matrix` is W (…, k, c_o), `covariance` C and `metric` G of its outputs (…, c_o, c_o). Fewer inputs than outputs:
    U is taken within what the layer can output, so that the product is W at full rank.
    """
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
    return balanced(seen @ vectors, vectors.mT @ inverse)


def balanced(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """The factors (…, k, r) and (…, r, c_o) with the same product and, for each vector, equal norms.

    Otherwise one factor is thousands of times as large as the other, and no learning rate suits both. A vector
    whose filter is zero keeps a column of moderate size.
    """
    inner = torch.linalg.vector_norm(first, dim=-2)
    outer = torch.linalg.vector_norm(second, dim=-1)
    inner = inner.clamp_min(_SHORT * float(inner.amax()))
    balance = torch.where((inner > 0) & (outer > 0), outer / inner, 1.0).sqrt()
    return first * balance[..., None, :], second / balance[..., None]
