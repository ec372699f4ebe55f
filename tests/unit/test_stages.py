"""Laws of score, plan and prune: any small network, one call or step by step."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import NETWORKS
from torch import nn

import basisprune.stages as stages
from basisprune.basis.decompose import decompose
from basisprune.basis.layers import BasisPair
from basisprune.basis.refit import basis_statistics
from basisprune.coupling import trace_coupling
from basisprune.errors import ConfigError, PlanError, TooMuchError
from basisprune.importance import score_filters, taylor_scores
from basisprune.planning import PlanConfig, plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.stages import score
from basisprune.types import BasisPlan, FilterPlan, JointPlan

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL = PlanConfig(per="parameter", min_share=0.0)


def scene(name: str, count: int = 24) -> tuple[nn.Module, list[tuple[torch.Tensor, torch.Tensor]]]:
    """A network of the table, and two batches of labelled inputs."""
    model, _ = NETWORKS[name]()
    generator = torch.Generator().manual_seed(0)
    shape = (count, *NETWORKS[name].shape[1:])
    outputs = model(torch.zeros(NETWORKS[name].shape, dtype=torch.float64))
    batches = [
        (
            torch.randn(shape, generator=generator, dtype=torch.float64),
            torch.randint(outputs.shape[1], (count, *outputs.shape[2:]), generator=generator),
        )
        for _ in range(2)
    ]
    return model, batches


def same(one: nn.Module, other: nn.Module, images: torch.Tensor) -> bool:
    with torch.no_grad():
        return torch.allclose(one(images), other(images), atol=1e-8)


def parameters(model: nn.Module) -> int:
    """The parameters with each pair in its smaller form, without the scales, which merge into the weights."""
    pairs = [module for module in model.modules() if isinstance(module, BasisPair)]
    saved = [pair.basis.weight.numel() + pair.scaling.weight.numel() - pair.weight.numel() for pair in pairs]
    scales = sum(pair.scaling.scale.numel() for pair in pairs)
    return sum(each.numel() for each in model.parameters()) - scales - sum(max(0, each) for each in saved)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("remove", ["basis", "filters", "both"])
def test_removing_nothing_changes_nothing(name, remove):
    model, batches = scene(name)
    assert same(stages.prune(model, 0.0, batches, remove=remove), model, batches[0][0])


@pytest.mark.parametrize("name", ["plain", "residual", "depthwise", "one_dimensional"])
def test_the_fraction_is_that_of_the_parameters_and_the_network_given_stays(name):
    model, batches = scene(name)
    before = copy.deepcopy(model.state_dict())
    smaller = stages.prune(model, 0.3, batches, config=SMALL)
    assert parameters(smaller) <= 0.7 * parameters(model)
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in before.items())
    assert smaller(batches[0][0]).shape == model(batches[0][0]).shape


def test_one_call_is_score_plan_and_prune():
    model, batches = scene("residual")
    split = decompose(model, basis="loss", scale_init=1.0, batches=batches)
    scored = score(split, batches)
    made = stages.plan(split, scored, 0.3, SMALL)
    assert isinstance(made, JointPlan)
    by_steps = stages.prune(split, JointPlan.from_json(made.to_json()), importance=scored)
    assert same(by_steps, stages.prune(split, 0.3, batches, config=SMALL), batches[0][0])


def test_what_is_scored_decides_what_is_planned_and_how_it_is_made_up_for():
    model, batches = scene("plain")
    split = decompose(model, scale_init=1.0)
    of_basis, of_filters = score(split, batches, basis="taylor", filters=None), score(model, batches, filters="l1")
    basis, filters = stages.plan(split, of_basis, 0.4), stages.plan(model, of_filters, 0.4)
    assert isinstance(basis, BasisPlan)
    assert basis == plan_basis(taylor_scores(split, batches), 0.4)
    refit = prune_basis(split, basis, compensate="refit", statistics=basis_statistics(split, batches))
    assert same(stages.prune(split, basis, importance=of_basis), refit, batches[0][0])
    assert same(stages.prune(split, basis), prune_basis(split, basis), batches[0][0])
    assert isinstance(filters, FilterPlan)
    coupling = trace_coupling(model, batches[0][0][:2])
    assert filters == plan_filters(model, score_filters(model, "l1", coupling.layers), 0.4, coupling=coupling)
    assert same(stages.prune(model, filters), prune_filters(model, filters), batches[0][0])


def test_multiply_adds_count_where_that_is_asked_for():
    model, batches = scene("plain")
    split = decompose(model, basis="loss", scale_init=1.0, batches=batches)
    scored = score(split, batches)
    by_macs = stages.plan(split, scored, 0.3, PlanConfig(per="mac", min_share=0.0))
    by_parameters = stages.plan(split, scored, 0.3, SMALL)
    assert isinstance(by_macs, JointPlan)
    assert isinstance(by_parameters, JointPlan)
    assert by_macs.cost > by_parameters.cost


def test_what_cannot_be_done_is_refused():
    model, batches = scene("plain")
    with pytest.raises(ConfigError, match="batches"):
        stages.prune(model, 0.5)
    with pytest.raises(ConfigError, match="remove"):
        stages.prune(model, 0.5, batches, remove="vectors")
    with pytest.raises(ConfigError, match="importance"):
        stages.prune(model, stages.plan(model, score(model, batches), 0.3), compensate="refit")
    with pytest.raises(ConfigError, match="allowed are loss, taylor"):
        score(model, batches, basis="svd")
    with pytest.raises(PlanError, match="decompose"):
        stages.plan(model, score(model, batches, filters=None), 0.5)
    with pytest.raises(TooMuchError):
        stages.prune(model, 0.999, batches)
    split = decompose(model, scale_init=1.0)
    with pytest.raises(PlanError, match="only those in units of the loss"):
        stages.plan(split, score(split, batches, filters="l1"), 0.5)
