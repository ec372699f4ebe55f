"""Laws of the basis in the metric of the loss, on matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from basisprune.basis.decompose import RIDGE, balanced, loss_basis, metric_roots, output_basis, with_ridge

FEW = settings(max_examples=40, deadline=None)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def moment(generator: torch.Generator, groups: int, size: int, rank: int) -> Tensor:
    rows = torch.randn(groups, rank, size, generator=generator, dtype=torch.float64)
    return rows.mT @ rows / max(rank, 1)


@st.composite
def layers(draw) -> tuple[Tensor, Tensor, Tensor]:
    """A weight (groups, k, c_o), a covariance of its outputs and a metric: of full rank, less, or zero; any size."""
    groups, k, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 8)), draw(st.integers(1, 8))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    matrix = torch.randn(groups, k, outputs, generator=generator, dtype=torch.float64)
    inputs = moment(generator, groups, k, draw(st.integers(0, 12)))
    metric = moment(generator, groups, outputs, draw(st.integers(0, 12))) * draw(st.sampled_from([1.0, 1e-10, 1e6]))
    return matrix, matrix.mT @ inputs @ matrix, metric


@FEW
@given(layers())
def test_the_factors_give_the_weight_and_are_balanced(layer):
    matrix, covariance, metric = layer
    first, second = loss_basis(matrix, covariance, metric)
    assert first.shape[-1] == min(matrix.shape[-2:])
    close(first @ second, matrix)
    norms = torch.linalg.vector_norm(first, dim=-2), torch.linalg.vector_norm(second, dim=-1)
    well = norms[0] > 1e-4 * norms[0].amax()  # where a filter is not lost in rounding errors
    close(norms[0][well], norms[1][well], 1e-6)


@FEW
@given(layers())
def test_features_are_uncorrelated_vectors_orthogonal_in_the_metric_and_their_worth_falls(layer):
    matrix, covariance, metric = layer
    first, second = loss_basis(matrix, covariance, metric)
    inner = torch.linalg.pinv(matrix) @ first  # features from outputs
    if matrix.shape[-2] > matrix.shape[-1]:
        features = inner.mT @ covariance @ inner
        lengths = (second @ with_ridge(metric) @ second.mT).diagonal(dim1=-2, dim2=-1)
        worth = features.diagonal(dim1=-2, dim2=-1) * lengths
        assert (worth.diff(dim=-1) <= 1e-9 * worth.amax() + 1e-300).all()
        assert (worth >= -1e-12 * worth.amax()).all()
        total = (with_ridge(metric) @ covariance).diagonal(dim1=-2, dim2=-1).sum(-1)
        close(worth.sum(-1), total, 1e-8)
    if not metric.any():
        return
    gram = second @ with_ridge(metric) @ second.mT
    scale = gram.diagonal(dim1=-2, dim2=-1).sqrt()
    close(gram / (scale[..., None] * scale[..., None, :]), torch.eye(gram.shape[-1]).double().expand_as(gram), 1e-7)


@FEW
@given(st.integers(0, 1000), st.integers(1, 5))
def test_no_other_projection_of_that_rank_loses_less_in_the_metric(seed, rank):
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(1, 9, 6, generator=generator, dtype=torch.float64)
    covariance, metric = moment(generator, 1, 6, 20), moment(generator, 1, 6, 20)

    def cost(first: Tensor, second: Tensor) -> float:
        left = torch.eye(6, dtype=torch.float64) - torch.linalg.pinv(matrix) @ first @ second
        return float((with_ridge(metric) @ left.mT @ covariance @ left).diagonal(dim1=-2, dim2=-1).sum())

    first, second = loss_basis(matrix, covariance, metric)
    best = cost(first[..., :rank], second[:, :rank])
    root = metric_roots(metric)[0]
    worth = torch.linalg.eigvalsh(root @ covariance @ root).flip(-1)
    assert best == pytest.approx(float(worth[..., rank:].sum()), abs=1e-9)  # what the vectors that go were worth
    others = [output_basis(matrix, covariance)]
    random = torch.randn(1, 6, rank, generator=generator, dtype=torch.float64)
    others.append((matrix @ random, torch.linalg.pinv(random)))
    assert all(best <= cost(a[..., :rank], b[:, :rank]) * (1 + 1e-9) for a, b in others)


@FEW
@given(layers(), st.sampled_from([1e-8, 1.0, 1e3]))
def test_with_a_metric_that_is_the_identity_it_is_the_basis_of_the_outputs(layer, size):
    matrix, covariance, metric = layer
    eye = size * torch.eye(metric.shape[-1], dtype=torch.float64).expand_as(metric)
    first, second = loss_basis(matrix, covariance, eye)
    expected, axes = output_basis(matrix, covariance)
    for rank in range(1, first.shape[-1]):
        # Vectors may differ where their worth is the same, so the loss they leave is compared.
        def left(one: Tensor, other: Tensor, rank: int = rank) -> Tensor:
            rest = matrix - one[..., :rank] @ other[:, :rank]
            back = torch.linalg.pinv(matrix) @ rest
            return (back.mT @ covariance @ back).diagonal(dim1=-2, dim2=-1).sum(-1)

        size = float(covariance.diagonal(dim1=-2, dim2=-1).sum(-1).max())
        torch.testing.assert_close(left(first, second), left(expected, axes), rtol=1e-6, atol=1e-9 * size)


def test_the_identity_gives_the_very_vectors_of_the_outputs():
    generator = torch.Generator().manual_seed(0)
    matrix, covariance = torch.randn(2, 9, 5, generator=generator).double(), moment(generator, 2, 5, 20)
    _, second = loss_basis(matrix, covariance, torch.eye(5).double().expand(2, 5, 5))
    _, axes = output_basis(matrix, covariance)
    close((second / second.norm(dim=-1, keepdim=True)).abs(), axes.abs())


def test_the_ridge_is_a_share_of_the_mean_and_nothing_is_divided_by_zero():
    metric = torch.diag_embed(torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    ridged = with_ridge(metric)
    close(ridged[0], torch.diag(torch.tensor([4 + 2 * RIDGE, 2 * RIDGE], dtype=torch.float64)))
    assert (ridged[1] == 0).all()  # nothing is worth anything where the loss reads nothing
    root, inverse = metric_roots(metric)
    close(root[0] @ root[0], ridged[0])
    close(root[1], torch.eye(2).double())
    close(root @ inverse, torch.eye(2).double().expand(2, 2, 2))


def test_a_zero_filter_is_balanced_to_something_finite():
    first, second = torch.randn(1, 4, 3).double(), torch.randn(1, 3, 5).double()
    first[..., 1] = 0
    one, other = balanced(first, second)
    close(one @ other, first @ second)
    assert (one[..., 1] == 0).all()
    assert 0 < other[:, 1].norm() < second[:, 1].norm()
    zero = balanced(torch.zeros(1, 4, 3), torch.zeros(1, 3, 5))
    assert all((part == 0).all() for part in zero)
