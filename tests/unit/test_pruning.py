"""Laws of carrying out a basis plan."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import NETWORKS
from torch import Tensor, nn
from zeroing import planned_filters, zeroed

from basisprune.basis.decompose import decompose, recompose
from basisprune.basis.layers import BasisPair, basis_pairs
from basisprune.errors import ConfigError, ModelError, PlanError
from basisprune.importance import filter_statistics, taylor_scores
from basisprune.planning import PlanConfig, plan_basis
from basisprune.pruning import prune_basis, prune_filters
from basisprune.types import BasisPlan, FilterPlan, LayerPlan, LayerScores

EASY = PlanConfig(min_share=0.0)


def decomposed(network: str, **options) -> tuple[nn.Module, Tensor]:
    model, x = NETWORKS[network]()
    model = decompose(model, **options)
    for pair in basis_pairs(model).values():
        nn.init.uniform_(pair.scaling.scale, 0.2, 1.0)
    return model, x


def planned(model: nn.Module, x: Tensor, ratio: float = 0.4) -> BasisPlan:
    return plan_basis(taylor_scores(model, [(x, torch.tensor([0, 1]))]), ratio, EASY)


def silenced(model: nn.Module, plan: BasisPlan) -> nn.Module:
    """The same network with the scales of all removed vectors at zero."""
    model = copy.deepcopy(model)
    for name, layer in plan.layers.items():
        scale = basis_pairs(model)[name].scaling.scale
        removed = [index for index in range(layer.rank) if index not in layer.keep]
        scale.data[removed] = 0
    return model


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_a_removed_vector_is_one_whose_scale_is_zero(network, linear):
    model, x = decomposed(network, linear=linear)
    plan = planned(model, x)
    before, output = copy.deepcopy(model.state_dict()), model(x)
    pruned = prune_basis(model, plan, compensate="none")
    assert_close(pruned(x), silenced(model, plan)(x))
    assert_close(recompose(pruned)(x), pruned(x))
    for name, layer in plan.layers.items():
        small, large = basis_pairs(pruned)[name], basis_pairs(model)[name]
        assert small.rank == len(layer.keep)
        assert small.out_channels == large.out_channels
        assert small.weight.shape == large.weight.shape
        assert torch.equal(small.scaling.scale, large.scaling.scale[list(layer.keep)])
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(x), output)


@pytest.mark.parametrize("compensate", ["none", "mean"])
@pytest.mark.parametrize("network", NETWORKS)
def test_an_empty_plan_changes_nothing(network, compensate):
    model, x = decomposed(network)
    plan = planned(model, x, ratio=0.0)
    for nothing in (plan, BasisPlan({}, 0.0)):
        pruned = prune_basis(model, nothing, compensate=compensate)
        assert str(pruned) == str(model)
        assert torch.equal(pruned(x), model(x))


@pytest.mark.parametrize("network", NETWORKS)
def test_the_parameters_are_those_counted_by_hand(network):
    model, x = decomposed(network)
    plan = planned(model, x)
    pruned = prune_basis(model, plan, compensate="none")
    expected = sum(parameter.numel() for parameter in model.parameters())
    for name, layer in plan.layers.items():
        pair = basis_pairs(model)[name]
        fan_in = pair.in_channels // pair.groups * math.prod(pair.kernel_size)
        # a vector has its filter, its scale and its column of V-bar, which only its own group reads
        expected -= layer.removed * (fan_in + 1 + pair.out_channels // pair.groups)
    assert sum(parameter.numel() for parameter in pruned.parameters()) == expected


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_compensation_keeps_the_mean_output_of_a_layer(network, linear):
    model, x = decomposed(network, linear=linear)
    plan = planned(model, x)
    inputs: dict[str, list[Tensor]] = {name: [] for name in basis_pairs(model)}
    for name, pair in basis_pairs(model).items():
        pair.register_forward_pre_hook(lambda _m, args, name=name: inputs[name].append(args[0].clone()))
    with torch.no_grad():
        model(x)
    for pair in basis_pairs(model).values():
        pair._forward_pre_hooks.clear()
    pruned = prune_basis(model, plan)
    for name, layer in plan.layers.items():
        large, small = basis_pairs(model)[name], basis_pairs(pruned)[name]
        axis = -1 if isinstance(large.basis, nn.Linear) else 1
        before, after = (pair(torch.cat(inputs[name])).movedim(axis, -1).flatten(0, -2) for pair in (large, small))
        assert_close(after.mean(0), before.mean(0))
        assert torch.equal(before, after) or layer.removed


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_constant_is_compensated_exactly(kind, groups, bias):
    conv = kind(4, 8, 1, groups=groups, bias=bias).double()
    pair = decompose(conv, scale_init=0.7)
    dims = len(conv.kernel_size)
    x = torch.arange(1, 5, dtype=torch.float64).view(1, 4, *[1] * dims).expand(2, 4, *[3] * dims)
    means = tuple(pair.basis(x).transpose(0, 1).flatten(1).mean(1).tolist())
    width = pair.rank // groups
    keep = tuple(group * width for group in range(groups))
    plan = BasisPlan({"": LayerPlan(keep, pair.rank, means)}, 0.5)
    pruned = prune_basis(pair, plan)
    assert isinstance(pruned, BasisPair)
    assert_close(pruned(x), pair(x))
    assert pruned.bias is not None
    assert (prune_basis(pair, plan, compensate="none").bias is None) == (not bias)


def test_without_means_there_is_nothing_to_compensate():
    model, x = decomposed("residual")
    plan = planned(model, x)
    bare = BasisPlan({name: LayerPlan(layer.keep, layer.rank) for name, layer in plan.layers.items()}, 0.4)
    assert torch.equal(prune_basis(model, bare)(x), prune_basis(model, plan, compensate="none")(x))


@settings(max_examples=30, deadline=None)
@given(data=st.data(), dims=st.integers(1, 3), transposed=st.booleans(), groups=st.integers(1, 3))
def test_any_conv_can_be_pruned_to_any_vectors(data, dims, transposed, groups):
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{dims}d")
    conv = kind(2 * groups, 4 * groups, data.draw(st.integers(1, 3)), stride=2, groups=groups).double()
    pair = decompose(conv, scale_init=1.0)
    width = pair.rank // groups
    count = data.draw(st.integers(1, width))
    subsets = st.sets(st.integers(0, width - 1), min_size=count, max_size=count)
    keep = tuple(group * width + index for group in range(groups) for index in sorted(data.draw(subsets)))
    plan = BasisPlan({"": LayerPlan(keep, pair.rank)}, 0.5)
    x = torch.randn(2, 2 * groups, *[5] * dims, dtype=torch.float64)
    assert_close(prune_basis(pair, plan)(x), silenced(pair, plan)(x))


def test_mode_dtype_and_what_is_trainable_are_kept():
    model, x = NETWORKS["residual"](dtype=torch.float32)
    model = decompose(model).train()
    basis_pairs(model)["conv1"].scaling.scale.requires_grad_(False)
    pruned = prune_basis(model, planned(model, x))
    assert all(module.training for module in pruned.modules())
    assert {value.dtype for value in pruned.parameters()} == {torch.float32}
    trainable = {name for name, pair in basis_pairs(pruned).items() if pair.scaling.scale.requires_grad}
    assert trainable == set(basis_pairs(model)) - {"conv1"}
    assert not any(pair.scaling.weight.requires_grad or pair.basis.weight.requires_grad for pair in
                   basis_pairs(pruned).values())  # fmt: skip


def test_a_pair_used_twice_stays_one_pair():
    model, x = decomposed("used_twice")
    pruned = prune_basis(model, planned(model, x))
    assert pruned.shared is pruned.alias


def test_pruning_twice_is_pruning_once_more():
    model, x = decomposed("plain")
    once = prune_basis(model, planned(model, x, 0.3))
    twice = prune_basis(once, planned(once, x, 0.3))
    ranks = [sum(pair.rank for pair in basis_pairs(net).values()) for net in (model, once, twice)]
    assert ranks == [26, 18, 13]
    assert twice(x).isfinite().all()


def test_in_place_is_in_place():
    model, x = decomposed("plain")
    plan = planned(model, x)
    expected = prune_basis(model, plan)(x)
    assert prune_basis(model, plan, inplace=True) is model
    assert torch.equal(model(x), expected)


def test_all_misfits_are_told_at_once_and_nothing_is_changed():
    model, _ = decomposed("grouped")
    before = str(model)
    layers = {
        "0": LayerPlan((0, 1), 5),
        "3": LayerPlan((0, 1, 2), 12),
        "6": LayerPlan((0, 99), 8),
        "9": LayerPlan((0,), 8),
    }
    with pytest.raises(PlanError) as caught:
        prune_basis(model, BasisPlan(layers, 0.5), inplace=True)
    text = str(caught.value)
    assert "0: the plan is for rank 5, the layer has 8" in text
    assert "3: each of its 4 groups must keep equally many; [3, 0, 0, 0] given" in text
    assert "6: keep must lie in 0 to 7; 0 to 99 given" in text
    assert "9: no decomposed layer of that name" in text
    assert str(model) == before


@pytest.mark.parametrize("keep", [(), (1, 0), (0, 0), (-1, 0), ("0",), (0.5,)])
def test_a_list_of_kept_vectors_must_be_sorted_whole_and_inside(keep):
    model, _ = decomposed("plain")
    with pytest.raises(PlanError, match="0: keep must"):
        prune_basis(model, BasisPlan({"0": LayerPlan(keep, 8)}, 0.5))


def test_means_must_be_as_many_as_vectors():
    model, _ = decomposed("plain")
    with pytest.raises(PlanError, match="0: 2 means given for rank 8"):
        prune_basis(model, BasisPlan({"0": LayerPlan((0,), 8, (1.0, 2.0))}, 0.5))


def test_a_network_that_is_not_decomposed_cannot_be_pruned():
    with pytest.raises(ModelError, match=r"call decompose\(model\) first"):
        prune_basis(NETWORKS["plain"]()[0], BasisPlan({}, 0.5))


def test_scores_know_the_groups_of_a_pruned_layer():
    model, x = decomposed("grouped")
    pruned = prune_basis(model, planned(model, x))
    again = taylor_scores(pruned, [(x, torch.tensor([0, 1]))]).layers["3"]
    assert isinstance(again, LayerScores)
    assert again.groups == 4
    assert len(again.values) == basis_pairs(pruned)["3"].rank


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_pruned_network_computes_what_the_original_computes_with_those_filters_at_zero(name, split):
    model, images, plan = planned_filters(name, 0.2, split=split)
    assert plan.removed > 0
    small = prune_filters(model, plan)
    zeroed(model, plan)
    with torch.no_grad():
        assert torch.allclose(small(images), model(images), atol=1e-12)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_plan_survives_json_and_does_the_same(name):
    model, images, plan = planned_filters(name, 0.2)
    again = FilterPlan.from_json(plan.to_json())
    assert again == plan
    with torch.no_grad():
        assert torch.equal(prune_filters(model, again)(images), prune_filters(model, plan)(images))


@pytest.mark.parametrize("name", NETWORKS)
def test_an_empty_plan_of_filters_changes_nothing(name):
    model, _, plan = planned_filters(name, 0.0)
    small = prune_filters(model, plan)
    assert plan.removed == 0
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in small.state_dict().items())


def test_parameters_after_pruning_equal_a_hand_count():
    model, _, plan = planned_filters("plain", 0.5)
    small = prune_filters(model, plan)
    a, b, c = (small[index].out_channels for index in (0, 3, 6))
    weights = 27 * a + a + 2 * a + 9 * a * b + b + 2 * b + b * c + c + 2 * c + 4 * c + 4
    assert sum(parameter.numel() for parameter in small.parameters()) == weights
    assert a + b + c == 26 - plan.removed == 13


def test_a_plan_for_a_narrower_network_is_refused():
    _, _, plan = planned_filters("plain", 0.3)
    wider, _ = NETWORKS["plain"]()
    wider[0] = nn.Conv2d(3, 16, 3, padding=1)
    with pytest.raises(PlanError, match=r"0\.weight: the plan is for shape \(8, 3, 3, 3\), the model has \(16"):
        prune_filters(wider, plan)


def test_a_plan_for_another_network_is_refused():
    _, _, plan = planned_filters("plain", 0.3)
    other, _ = NETWORKS["residual"]()
    with pytest.raises(PlanError, match=r"0\.weight: the plan is for shape \(8, 3, 3, 3\), the model has none"):
        prune_filters(other, plan)


# What filters hand over


def test_without_compensation_filters_vanish_and_with_it_statistics_are_needed():
    model, images, plan = planned_filters("plain", 0.3)
    statistics = filter_statistics(model, plan.coupling, [images])
    expected = prune_filters(model, plan)(images)
    assert_close(prune_filters(model, plan, compensate="none")(images), expected)
    for how in ("mean", "refit"):
        with pytest.raises(ConfigError, match="statistics go together"):
            prune_filters(model, plan, compensate=how)
        before = copy.deepcopy(model.state_dict())
        small = prune_filters(model, plan, compensate=how, statistics=statistics)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        assert [value.shape for value in small.parameters()] == [
            v.shape for v in prune_filters(model, plan).parameters()
        ]
        assert not torch.allclose(small(images), expected)
    with pytest.raises(ConfigError, match="statistics go together"):
        prune_filters(model, plan, statistics=statistics)
    with pytest.raises(ConfigError, match="compensate: 'fit' given"):
        prune_filters(model, plan, compensate="fit", statistics=statistics)
    again = prune_filters(model, plan, compensate="refit", statistics=statistics, inplace=True)
    assert again is model
    assert_close(again(images), small(images))
