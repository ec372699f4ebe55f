"""Scores of filters from the weights alone, and the control: L1 norms, scales of norms, random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from basisprune.importance.layer_access import Batches, filter_weights, norms_behind


def l1(model: nn.Module, layers: Sequence[str], _batches: Batches, _seed: int) -> dict[str, Tensor]:
    """The sum of the absolute weights of each filter; of a decomposed layer, of its second half, scales included."""
    return {name: _l1(model, name) for name in layers}


def bn_scale(model: nn.Module, layers: Sequence[str], batches: Batches, _seed: int) -> dict[str, Tensor]:
    """The absolute scale of the norm right behind the layer; the L1 norm where there is none."""
    norms = norms_behind(model, layers, batches)
    return {name: norms[name].weight.detach().abs() if name in norms else _l1(model, name) for name in layers}


def random(model: nn.Module, layers: Sequence[str], _batches: Batches, seed: int) -> dict[str, Tensor]:
    """A number from 0 to 1 for each filter."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(len(filter_weights(model, name)), generator=generator) for name in layers}


def _l1(model: nn.Module, name: str) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(filter_weights(model, name), ord=1, dim=1)
    return norms
