"""What people use instead, as functions model -> smaller model: torch-pruning, L1, HRank, truncated SVD."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
import torch_pruning
from torch import Tensor, nn

from basisprune import PlanConfig, decompose
from basisprune.basis.layers import basis_pairs
from basisprune.coupling import trace_coupling
from basisprune.importance import score_filters
from basisprune.planning import plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.training.trainable import find_classifiers
from basisprune.transfer.model import spec_of
from basisprune.types import LayerScores, Scores

Batches = Iterable[tuple[Tensor, Tensor]]
BLOCK = 8
"""All methods keep multiples of so many channels where they can: ONNX Runtime is faster with those."""

SPARSE_RATE, SPARSE_REG = 1e-2, 5e-4
"""Rate of SGD and strength of the regularisation, from torch-pruning's own benchmark of its group norm pruner."""


def by_magnitude(model: nn.Module, ratio: float, *, across: bool = True) -> nn.Module:
    """The model without the fraction `ratio` of its channels, by torch-pruning's magnitudes of groups.

    `across` layers, or of each layer alike.
    """
    kind, importance = torch_pruning.pruner.BasePruner, torch_pruning.importance.MagnitudeImportance()
    with _all_learn(model) as pruned:
        _pruner(pruned, kind, importance, ratio, across=across).step()
    return pruned


def by_taylor(model: nn.Module, ratio: float, batches: Batches, *, across: bool = True) -> nn.Module:
    """The model without the fraction `ratio` of its channels, by torch-pruning's Taylor importance of groups.

    `across` layers, or of each layer alike.
    """
    kind, importance = torch_pruning.pruner.BasePruner, torch_pruning.importance.TaylorImportance()
    with _all_learn(model) as pruned:
        for images, labels in batches:
            F.cross_entropy(pruned(images), labels).backward()
        _pruner(pruned, kind, importance, ratio, across=across).step()
    return pruned


class GroupNorm:
    """torch-pruning's group norm pruner (DepGraph): weak groups are pressed to zero by training, then go."""

    def __init__(self, model: nn.Module, ratio: float) -> None:
        self.model = copy.deepcopy(model).to(memory_format=torch.channels_last).requires_grad_(True)
        importance = torch_pruning.importance.GroupMagnitudeImportance()
        self.pruner = _pruner(
            self.model.eval(), torch_pruning.pruner.GroupNormPruner, importance, ratio, reg=SPARSE_REG
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), SPARSE_RATE, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step of the training that makes groups sparse."""
        self.model.train()
        F.cross_entropy(self.model(images), labels).backward()
        self.pruner.regularize(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def pruned(self) -> nn.Module:
        """The model without its weakest groups."""
        self.model.eval()
        self.pruner.step()
        self.model.zero_grad(set_to_none=True)
        return self.model


def by_filters(model: nn.Module, method: str, ratio: float, batches: Batches) -> nn.Module:
    """The model without the fraction `ratio` of its filters, by one of the paper's scores."""
    coupling = trace_coupling(model, torch.zeros(2, *spec_of(model).shape))
    scores = score_filters(model, method, coupling.layers, batches)
    config = PlanConfig(normalise="max", round_to=BLOCK)
    return prune_filters(model, plan_filters(model, scores, ratio, config, coupling=coupling))


def by_singular_values(model: nn.Module, ratio: float) -> nn.Module:
    """The model with every conv split by its singular values and without the fraction `ratio` of all of them.

    Each is taken in relation to the largest of its layer; nothing is made up for.
    """
    split = decompose(model, basis="weights", scale_init=1.0)
    plan = plan_basis(singular_values(split), ratio, PlanConfig(normalise="max", round_to=BLOCK))
    return prune_basis(split, plan, compensate="none")


def singular_values(model: nn.Module) -> Scores:
    """The singular values of every conv that was split by them and not scaled."""
    layers = {
        name: LayerScores(tuple(pair.scaling.weight.detach().double().flatten(2).norm(dim=(0, 2)).tolist()))
        for name, pair in basis_pairs(model).items()
    }
    return Scores("singular values", layers)


@contextmanager
def _all_learn(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of the model whose weights all have gradients temporarily."""
    copied = copy.deepcopy(model).eval().requires_grad_(True)
    yield copied
    copied.zero_grad(set_to_none=True)


def _pruner(
    model: nn.Module,
    kind: Callable[..., torch_pruning.pruner.BasePruner],
    importance: object,
    ratio: float,
    *,
    across: bool = True,
    **more: float,
) -> Any:
    return kind(
        model,
        torch.zeros(1, *spec_of(model).shape),
        importance=importance,
        global_pruning=across,
        pruning_ratio=ratio,
        ignored_layers=find_classifiers(model),
        round_to=BLOCK,
        **more,
    )
