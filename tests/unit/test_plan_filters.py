"""Plans for filters: how many go, which ones, and what the smaller network computes."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import NETWORKS
from tiny import tiny_model
from torch import nn
from zeroing import zeroed

from basisprune.basis.split import decompose
from basisprune.coupling import trace_coupling
from basisprune.errors import PlanError
from basisprune.importance import score_filters
from basisprune.plan import PlanConfig, count_filters, plan_filters
from basisprune.prune import prune_filters
from basisprune.types import FilterPlan, LayerScores, Scores

FREE = PlanConfig(normalise="max", min_share=0.0)


def planned(name: str, ratio: float, config: PlanConfig = FREE, *, split: bool = False):
    model, images = NETWORKS[name]()
    if split:
        model = decompose(model, scale_init=1.0)
    coupling = trace_coupling(model, images)
    scores = score_filters(model, "l1", coupling.layers)
    return model, images, plan_filters(model, scores, ratio, config, coupling=coupling)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_pruned_network_computes_what_the_original_computes_with_those_filters_at_zero(name, split):
    model, images, plan = planned(name, 0.2, split=split)
    assert plan.removed > 0
    small = prune_filters(model, plan)
    zeroed(model, plan)
    with torch.no_grad():
        assert torch.allclose(small(images), model(images), atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_number_that_goes_is_exact_up_to_what_is_coupled(name):
    model, _, plan = planned(name, 0.25)
    counts = {k: m.out_channels for k, m in model.named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
    small = prune_filters(model, plan)
    after = {k: m.out_channels for k, m in small.named_modules() if isinstance(m, nn.modules.conv._ConvNd)}
    assert plan.total == sum(counts.values())
    assert plan.removed == sum(counts.values()) - sum(after.values())
    once = max(sum(group.filters.values()) // group.size * len(group.parts) for group in plan.coupling.groups)
    assert 0 <= round(0.25 * plan.total) - plan.removed < once
    assert min(after.values()) >= 1


@pytest.mark.parametrize("name", NETWORKS)
def test_every_plan_survives_json_and_does_the_same(name):
    model, images, plan = planned(name, 0.2)
    again = FilterPlan.from_json(plan.to_json())
    assert again == plan
    with torch.no_grad():
        assert torch.equal(prune_filters(model, again)(images), prune_filters(model, plan)(images))


@pytest.mark.parametrize("name", NETWORKS)
def test_an_empty_plan_changes_nothing(name):
    model, _, plan = planned(name, 0.0)
    small = prune_filters(model, plan)
    assert plan.removed == 0
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in small.state_dict().items())


def test_parameters_after_pruning_equal_a_hand_count():
    model, _, plan = planned("plain", 0.5)
    small = prune_filters(model, plan)
    a, b, c = (small[index].out_channels for index in (0, 3, 6))
    weights = 27 * a + a + 2 * a + 9 * a * b + b + 2 * b + b * c + c + 2 * c + 4 * c + 4
    assert sum(parameter.numel() for parameter in small.parameters()) == weights
    assert a + b + c == 26 - plan.removed == 13


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(["plain", "grouped", "residual"]), st.floats(0, 0.6), st.sampled_from([2, 3, 4]))
def test_round_to_keeps_multiples_or_all(name, ratio, multiple):
    config = dataclasses.replace(FREE, round_to=multiple)
    try:
        _, _, plan = planned(name, ratio, config)
    except PlanError:  # too much for blocks of this size; what is said then is tested below
        return
    for group in plan.coupling.groups:
        kept = len(plan.groups[group.name].keep)
        assert kept == group.size or kept % (multiple // math.gcd(multiple, len(group.parts))) == 0


def test_the_least_important_filters_go_and_coupled_ones_by_their_reduction():
    model, images = NETWORKS["residual"]()
    coupling = trace_coupling(model, images)
    group = next(group for group in coupling.groups if "stem.0" in group.layers)
    assert set(group.layers) == {"stem.0", "conv2"}
    flat = {name: LayerScores((1.0,) * model.get_submodule(name).out_channels) for name in coupling.layers}
    flat["stem.0"] = LayerScores((0.1, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0))
    flat["conv2"] = LayerScores((0.1, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0, 1.0))
    two_filters = 2 / count_filters(model, coupling)
    gone = {}
    for reduce in ("mean", "min", "max", "sum"):
        config = dataclasses.replace(FREE, reduce=reduce)
        plan = plan_filters(model, Scores("l1", flat), two_filters, config, coupling=coupling)
        gone[reduce] = set(range(8)) - set(plan.groups[group.name].keep)
    assert gone == {"mean": {0}, "min": {3}, "max": {0}, "sum": {0}}


def test_missing_scores_and_too_much_are_refused_by_name():
    model, images = NETWORKS["plain"]()
    coupling = trace_coupling(model, images)
    scores = score_filters(model, "l1", coupling.layers)
    missing = Scores("l1", {name: given for name, given in scores.layers.items() if name != "3"})
    with pytest.raises(PlanError, match="3: has no scores"):
        plan_filters(model, missing, 0.3, coupling=coupling)
    with pytest.raises(PlanError, match="pass at most"):
        plan_filters(model, scores, 0.99, coupling=coupling)
    short = Scores("l1", scores.layers | {"3": LayerScores((1.0,) * 5)})
    with pytest.raises(PlanError, match="3: 5 scores given"):
        plan_filters(model, short, 0.3, coupling=coupling)
    with pytest.raises(PlanError, match="fraction removed"):
        plan_filters(model, scores, 1.0, coupling=coupling)


def test_a_plan_for_a_narrower_network_is_refused():
    _, _, plan = planned("plain", 0.3)
    wider, _ = NETWORKS["plain"]()
    wider[0] = nn.Conv2d(3, 16, 3, padding=1)
    with pytest.raises(PlanError, match=r"0\.weight: the plan is for shape \(8, 3, 3, 3\), the model has \(16"):
        prune_filters(wider, plan)


def test_a_plan_for_another_network_is_refused():
    _, _, plan = planned("plain", 0.3)
    other, _ = NETWORKS["residual"]()
    with pytest.raises(PlanError, match=r"0\.weight: the plan is for shape \(8, 3, 3, 3\), the model has none"):
        prune_filters(other, plan)


def test_a_transfer_model_is_traced_where_no_coupling_is_given():
    model = tiny_model()
    coupling = trace_coupling(model, torch.zeros(2, *model.input_spec.shape))
    scores = score_filters(model, "l1", coupling.layers)
    assert plan_filters(model, scores, 0.3) == plan_filters(model, scores, 0.3, coupling=coupling)
    with pytest.raises(PlanError, match="pass coupling="):
        plan_filters(model.backbone, scores, 0.3)
