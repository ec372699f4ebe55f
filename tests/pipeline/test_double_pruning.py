"""Basis and filter pruning together, on the paper's three networks with random weights."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from networks import randomise_norms
from torch import nn
from zeroing import zeroed

from basisprune import PlanConfig, decompose, measure, transfer_model
from basisprune.basis.layers import BasisPair
from basisprune.coupling import trace_coupling
from basisprune.importance import score_filters, taylor_scores
from basisprune.planning import plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.transfer.model import TransferModel
from basisprune.types import BasisPlan, FilterPlan

MODELS = ("vgg16", "densenet121", "resnet50")
FREE = PlanConfig(normalise="max", min_share=0.0)


@cache
def built(name: str) -> TransferModel:
    torch.manual_seed(0)
    model = transfer_model(name, 4, input_size=32)
    randomise_norms(model)
    return model


@cache
def split(name: str) -> nn.Module:
    return decompose(built(name), scale_init=1.0)


def images() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def filter_plan(model: nn.Module, ratio: float) -> FilterPlan:
    coupling = trace_coupling(model, images().to(next(model.parameters())))
    scores = score_filters(model, "l1", coupling.layers)
    return plan_filters(model, scores, ratio, FREE, coupling=coupling)


def basis_plan(model: nn.Module, ratio: float) -> BasisPlan:
    return plan_basis(taylor_scores(model, [(images(), torch.tensor([0, 1]))]), ratio, FREE)


@pytest.mark.parametrize("name", MODELS)
def test_filter_pruning_equals_filters_at_zero(name):
    model = copy.deepcopy(built(name)).double()
    plan = filter_plan(model, 0.3)
    small = prune_filters(model, plan)
    zeroed(model, plan)
    with torch.no_grad():
        batch = images().double()
        assert torch.allclose(small(batch), model(batch), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_the_count_is_exact_and_nothing_is_left_of_removed_channels(name):
    model = built(name)
    plan = filter_plan(model, 0.3)
    small = prune_filters(model, plan)
    convs = {key: module for key, module in small.named_modules() if isinstance(module, nn.Conv2d)}
    before = sum(module.out_channels for module in model.modules() if isinstance(module, nn.Conv2d))
    after = sum(conv.out_channels for conv in convs.values())
    assert (plan.total, plan.removed) == (before, before - after)
    largest = max(sum(group.filters.values()) // group.size for group in plan.coupling.groups)
    assert 0 <= round(0.3 * before) - plan.removed < largest
    for module in small.modules():  # attributes, weights and statistics all speak of the same channels
        if isinstance(module, nn.Conv2d):
            assert module.weight.shape[:2] == (module.out_channels, module.in_channels)
        elif isinstance(module, nn.BatchNorm2d):
            assert {len(module.weight), len(module.running_mean), len(module.running_var)} == {module.num_features}


@pytest.mark.parametrize("name", MODELS)
def test_multiply_adds_after_pruning_equal_those_of_its_shapes(name):
    small = prune_filters(built(name), filter_plan(built(name), 0.3))
    sizes: dict[nn.Module, int] = {}

    def remember(module: nn.Module, _args: object, output: torch.Tensor) -> None:
        sizes[module] = output.shape[-2] * output.shape[-1] if output.dim() == 4 else 1

    layers = [module for module in small.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(remember) for layer in layers]
    with torch.no_grad():
        small(images()[:1])
    for handle in handles:
        handle.remove()
    assert measure(small).macs == sum(layer.weight.numel() * sizes[layer] for layer in layers)


@pytest.mark.parametrize("name", MODELS)
def test_double_pruning_works_in_either_order(name):
    model = split(name)
    basis_first = prune_basis(model, basis_plan(model, 0.5))
    double = prune_filters(basis_first, plan := filter_plan(basis_first, 0.3))
    filters_first = prune_filters(model, filter_plan(model, 0.3))
    other = prune_basis(filters_first, basis_plan(filters_first, 0.5))
    for small in (double, other):
        small.train()
        small(images()).sum().backward()
        assert measure(small).parameters < measure(basis_first).parameters
    expected = copy.deepcopy(basis_first).double()
    again = prune_filters(expected, plan).eval()
    zeroed(expected.eval(), plan)
    with torch.no_grad():
        batch = images().double()
        assert torch.allclose(again(batch), expected(batch), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
def test_ranks_stay_and_widths_shrink_when_filters_of_pairs_go(name):
    model = split(name)
    small = prune_filters(model, filter_plan(model, 0.3))
    before = {key: pair for key, pair in model.named_modules() if isinstance(pair, BasisPair)}
    after = {key: pair for key, pair in small.named_modules() if isinstance(pair, BasisPair)}
    assert {key: pair.rank for key, pair in after.items()} == {key: pair.rank for key, pair in before.items()}
    assert sum(p.out_channels for p in after.values()) < sum(p.out_channels for p in before.values())
