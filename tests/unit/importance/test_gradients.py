"""Scores read the batches of any task."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from basisprune.basis.decompose import decompose
from basisprune.importance import basis_loss, score_filters, taylor_scores
from basisprune.tasks import segmentation

NAMED = segmentation(read=lambda batch: (batch["x"], batch["y"]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 3, 3, padding=1))


def signals(count: int = 24, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 16, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


def as_dicts(data: TensorDataset, size: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"x": inputs, "y": masks} for inputs, masks in DataLoader(data, size)]


def test_scores_read_the_batches_of_a_task():
    data = signals()
    pairs = decompose(network(), scale_init=1.0, basis="loss", batches=as_dicts(data), loss=NAMED)
    plain = [(inputs, masks) for inputs, masks in DataLoader(data, 8)]
    for scores in (taylor_scores, lambda *a, **k: basis_loss(*a, **k).scores):
        assert scores(pairs, as_dicts(data), loss=NAMED) == scores(pairs, plain, loss=nn.functional.cross_entropy)
    for method in ("taylor", "loss", "hrank"):
        named = score_filters(network(), method, ["0"], as_dicts(data), loss=NAMED)
        assert named == score_filters(network(), method, ["0"], plain)
