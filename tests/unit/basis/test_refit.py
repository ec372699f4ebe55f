"""Laws of the least squares that pruning can end with."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from networks import NETWORKS
from torch import Tensor, nn

from basisprune.basis.decompose import decompose, recompose
from basisprune.basis.factors import to_matrix
from basisprune.basis.layers import BasisPair, BasisScalingConv, basis_pairs
from basisprune.basis.refit import basis_statistics, least_squares, rebase, refit_scaling
from basisprune.errors import ConfigError, DataError, ModelError, PlanError
from basisprune.importance import loss_scores, taylor_scores
from basisprune.planning import PlanConfig, plan_basis
from basisprune.pruning import prune_basis
from basisprune.torchkit.moments import OutputStatistics
from basisprune.types import BasisPlan, LayerPlan


def decomposed(network: str, **options) -> tuple[nn.Module, list[Tensor]]:
    """The network with scales of all sizes, and batches that are enough for a covariance of full rank."""
    model, x = NETWORKS[network]()
    model = decompose(model, **options)
    for pair in basis_pairs(model).values():
        nn.init.uniform_(pair.scaling.scale, 0.2, 1.0)
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, *x.shape[1:], generator=generator, dtype=x.dtype) + shift for shift in (0.0, 0.5, -1.0)]
    return model, batches


def planned(model: nn.Module, batches: list[Tensor], ratio: float = 0.4) -> BasisPlan:
    labelled = [(batch, torch.arange(len(batch)) % 4) for batch in batches]
    return plan_basis(taylor_scores(model, labelled), ratio, PlanConfig(min_share=0.0))


def features_of(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """All basis features (positions, rank) of each pair."""
    caught: dict[str, list[Tensor]] = {name: [] for name in basis_pairs(model)}
    handles = []
    for name, pair in basis_pairs(model).items():
        axis = 1 if pair.scaling.spatial_dims else -1

        def note(_module, args, into=caught[name], axis=axis):
            into.append(args[0].movedim(axis, -1).flatten(0, -2))

        handles.append(pair.scaling.register_forward_pre_hook(note))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(features) for name, features in caught.items()}


def outputs(scaling: BasisScalingConv, features: Tensor) -> Tensor:
    """What the layer makes of features (positions, rank): (positions, c_o)."""
    with torch.no_grad():
        return scaling(features.view(*features.shape, *[1] * scaling.spatial_dims)).flatten(1)


def statistics_of(features: Tensor, groups: int = 1) -> OutputStatistics:
    parts = features.double().unflatten(1, (groups, -1)).unbind(1)
    covariance = torch.stack([part.mT.cov(correction=0).reshape(2 * [part.shape[1]]) for part in parts])
    return OutputStatistics(features.double().mean(0), covariance)


def scaling_layer(outputs: int, rank: int, groups: int = 1, *, bias: bool = True) -> BasisScalingConv:
    return BasisScalingConv(
        torch.randn(outputs, rank // groups, 1, 1, dtype=torch.float64),
        scale=torch.rand(rank, dtype=torch.float64) + 0.1,
        bias=torch.randn(outputs, dtype=torch.float64) if bias else None,
        groups=groups,
    )


def assert_close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# The statistics


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_statistics_are_those_of_all_basis_features(network, linear):
    model, batches = decomposed(network, linear=linear)
    before = copy.deepcopy(model.state_dict())
    found = basis_statistics(model.train(), [(batch, "label") for batch in batches])
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for name, features in features_of(model.eval(), batches).items():
        truth = statistics_of(features, basis_pairs(model)[name].scaling.groups)
        assert_close(found[name].mean, truth.mean)
        assert_close(found[name].covariance, truth.covariance)


def test_statistics_need_a_decomposed_network_and_images():
    with pytest.raises(ModelError, match=r"call decompose\(model\) first"):
        basis_statistics(NETWORKS["plain"]()[0], [])
    with pytest.raises(DataError, match="no batch came"):
        basis_statistics(decomposed("plain")[0], [])


# The fit


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_what_the_kept_features_determine_is_kept_exactly(groups, bias):
    torch.manual_seed(0)
    layer = scaling_layer(6 * groups, 5 * groups, groups, bias=bias)
    parts = []
    for _ in range(groups):
        free = torch.randn(200, 3, dtype=torch.float64) + 2
        parts.append(torch.cat([free, free @ torch.randn(3, 2, dtype=torch.float64) - 1], 1))
    features = torch.cat(parts, 1)
    keep = [5 * group + place for group in range(groups) for place in (0, 1, 2)]
    slim = refit_scaling(layer, keep, statistics_of(features, groups), ridge=0.0)
    assert_close(outputs(slim, features[:, keep]), outputs(layer, features))
    assert torch.equal(slim.scale, layer.scale[keep])
    assert slim.bias is not None


def test_it_is_the_least_squares_solution():
    torch.manual_seed(0)
    layer = scaling_layer(6, 5)
    features = torch.randn(300, 5, dtype=torch.float64) @ torch.randn(5, 5, dtype=torch.float64) + 3
    keep, goal = [0, 2, 3], outputs(layer, features)
    slim = refit_scaling(layer, keep, statistics_of(features), ridge=0.0)
    design = torch.cat([features[:, keep], torch.ones(300, 1, dtype=torch.float64)], 1)
    best = torch.linalg.lstsq(design, goal).solution
    assert_close(slim.scaled_weight().flatten(1), best[:3].mT)
    assert_close(slim.bias, best[3])


def test_from_uncorrelated_features_nothing_but_the_mean_is_left():
    layer = scaling_layer(6, 4)
    mean, variances = torch.randn(4, dtype=torch.float64), torch.rand(1, 4, dtype=torch.float64)
    slim = refit_scaling(layer, (1, 2), OutputStatistics(mean, torch.diag_embed(variances)))
    assert_close(slim.weight, layer.weight[:, 1:3])
    assert torch.equal(slim.scale, layer.scale[1:3])
    lost = layer.scaled_weight().flatten(1)[:, [0, 3]] @ mean[[0, 3]]
    assert_close(slim.bias, layer.bias + lost)


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_the_error_is_never_larger_than_with_the_mean_alone(seed, ridge):
    torch.manual_seed(seed)
    groups = seed % 2 + 1
    layer = scaling_layer(4 * groups, 6 * groups, groups)
    mixing = torch.randn(6 * groups, 6 * groups, dtype=torch.float64)
    features = torch.randn(12, 6 * groups, dtype=torch.float64) @ mixing * torch.rand(6 * groups, dtype=torch.float64)
    keep = [6 * group + place for group in range(groups) for place in (0, 2, 5)]
    statistics, goal = statistics_of(features, groups), outputs(layer, features)
    flat = OutputStatistics(statistics.mean, torch.zeros_like(statistics.covariance))
    errors = [
        (outputs(refit_scaling(layer, keep, known, ridge=ridge), features[:, keep]) - goal).square().sum()
        for known in (statistics, flat)
    ]
    assert errors[0] <= errors[1] * (1 + 1e-9)


@pytest.mark.parametrize("zero", [0.0, 1e-7])
def test_a_scale_of_zero_does_not_hide_what_its_feature_says(zero):
    torch.manual_seed(0)
    layer = scaling_layer(6, 4)
    layer.scale.data[1] = zero
    free = torch.randn(100, 3, dtype=torch.float64)
    features = torch.cat([free, 2 * free[:, 1:2]], 1)
    slim = refit_scaling(layer, (0, 1, 2), statistics_of(features), ridge=0.0)
    assert_close(outputs(slim, features[:, :3]), outputs(layer, features), 1e-6)
    assert slim.scale.tolist() == [layer.scale[0], 1.0, layer.scale[2]]


def test_features_that_are_constant_or_doubled_do_no_harm():
    torch.manual_seed(0)
    layer = scaling_layer(6, 5).float()
    free = torch.randn(400, 2)
    features = torch.cat([free, free[:, :1], torch.full((400, 1), 7.0), free.sum(1, keepdim=True)], 1)
    noise = statistics_of(features)
    noise.covariance[0, 3] += 1e-14 * torch.randn(5, dtype=torch.float64)  # rounding errors of the constant
    slim = refit_scaling(layer, (0, 1, 2, 3), noise, ridge=0.0)
    assert_close(outputs(slim, features[:, :4]), outputs(layer, features), 1e-4)
    assert slim.weight.abs().max() < 50
    assert_close(slim.weight[:, 3], layer.weight[:, 3], 1e-6)


def test_the_sizes_of_features_do_not_matter():
    torch.manual_seed(0)
    layer = scaling_layer(6, 5)
    features = torch.randn(50, 5, dtype=torch.float64) @ torch.randn(5, 5, dtype=torch.float64)
    sizes = torch.tensor([1e-3, 1.0, 1e2, 0.1, 10.0], dtype=torch.float64)
    other = copy.deepcopy(layer)
    other.weight.data /= sizes.view(1, -1, 1, 1)
    results = [
        outputs(refit_scaling(one, (0, 1, 3), statistics_of(values)), values[:, [0, 1, 3]])
        for one, values in ((layer, features), (other, features * sizes))
    ]
    assert_close(results[0], results[1])


# In a network


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_layer_comes_nearer_to_what_it_put_out(network, linear):
    model, batches = decomposed(network, linear=linear)
    plan, statistics = planned(model, batches), basis_statistics(model, batches)
    before = copy.deepcopy(model.state_dict())
    refitted = prune_basis(model, plan, compensate="refit", statistics=statistics)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    others = [prune_basis(model, plan, compensate=how) for how in ("mean", "none")]
    for name, features in features_of(model, batches).items():
        keep, goal = list(plan.layers[name].keep), outputs(basis_pairs(model)[name].scaling, features)
        errors = [
            (outputs(basis_pairs(net)[name].scaling, features[:, keep]) - goal).square().sum()
            for net in (refitted, *others)
        ]
        assert errors[0] <= errors[1] * (1 + 1e-9) + 1e-15
        assert errors[1] <= errors[2] * (1 + 1e-9) + 1e-15
    assert_close(recompose(refitted)(batches[0]), refitted(batches[0]))
    shapes = [[tuple(value.shape) for value in net.parameters()] for net in (refitted, others[0])]
    assert shapes[0] == shapes[1]


CONVS: list[Callable[..., nn.Module]] = [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d]


@pytest.mark.parametrize("kind", CONVS)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_layer_of_lower_rank_on_its_images_is_pruned_to_that_rank_for_free(kind, groups):
    torch.manual_seed(0)
    conv = kind(4 * groups, 8 * groups, 1, groups=groups).double()
    pair = decompose(conv, scale_init=0.7)
    dims = len(conv.kernel_size)
    seen = [torch.randn(3, 2, *[4] * dims, dtype=torch.float64) + 1 for _ in range(groups)]
    x = torch.cat([torch.cat([part, part.flip(1) * 3 - part], 1) for part in seen], 1)  # each group sees rank 2
    keep = tuple(4 * group + place for group in range(groups) for place in (1, 3))
    plan = BasisPlan({"": LayerPlan(keep, 4 * groups)}, 0.5)
    statistics = basis_statistics(pair, [x])
    pruned = prune_basis(pair, plan, compensate="refit", statistics=statistics)
    assert isinstance(pruned, BasisPair)
    assert pruned.rank == 2 * groups
    exact = refit_scaling(pair.scaling, plan.layers[""].keep, statistics[""], ridge=0.0)
    assert_close(exact(pruned.basis(x)), pair(x))
    plain = prune_basis(pair, plan, compensate="none")
    assert (pruned(x) - pair(x)).norm() < 0.2 * (plain(x) - pair(x)).norm()


def test_mode_dtype_and_what_is_trainable_are_kept():
    model, x = NETWORKS["residual"](dtype=torch.float32)
    model = decompose(model).train()
    basis_pairs(model)["conv1"].scaling.scale.requires_grad_(False)
    plan = planned(model, [x])
    pruned = prune_basis(model, plan, compensate="refit", statistics=basis_statistics(model, [x]))
    assert all(module.training for module in pruned.modules())
    assert {value.dtype for value in pruned.parameters()} == {torch.float32}
    trainable = {name for name, pair in basis_pairs(pruned).items() if pair.scaling.scale.requires_grad}
    assert trainable == set(basis_pairs(model)) - {"conv1"}
    assert not any(pair.scaling.weight.requires_grad for pair in basis_pairs(pruned).values())


def test_statistics_that_are_missing_or_of_another_network_are_refused():
    model, batches = decomposed("plain")
    plan, statistics = planned(model, batches), basis_statistics(model, batches)
    with pytest.raises(ConfigError, match="compensate='refit' and statistics go together"):
        prune_basis(model, plan, compensate="refit")
    with pytest.raises(ConfigError, match="compensate='refit' and statistics go together"):
        prune_basis(model, plan, statistics=statistics)
    with pytest.raises(ConfigError, match="compensate: 'fit' given; allowed are none, mean, refit"):
        prune_basis(model, plan, compensate="fit")
    pruned = prune_basis(model, plan)
    other = basis_statistics(pruned, batches)
    other.pop("0")
    with pytest.raises(PlanError) as caught:
        prune_basis(model, plan, compensate="refit", statistics=other)
    assert "0: covariances None given for rank 8; take basis_statistics of this model" in str(caught.value)
    assert "3: covariances (1, " in str(caught.value)


# New axes


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_new_axes_change_no_output_and_make_features_uncorrelated(network, linear, pruned):
    model, batches = decomposed(network, linear=linear)
    if pruned:
        model = prune_basis(model, planned(model, batches))
    before = copy.deepcopy(model.state_dict())
    turned = rebase(model, batches)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for x in (batches[0], 5 * batches[1].flip(-1)):  # exact on other images too
        assert_close(turned(x), model(x))
    assert str(turned) == str(model)
    for pair in basis_pairs(turned).values():
        assert torch.equal(pair.scaling.scale, torch.ones_like(pair.scaling.scale))
        axes = pair.scaling.weight.flatten(1).unflatten(0, (pair.scaling.groups, -1))
        assert_close(axes.mT @ axes, torch.eye(axes.shape[2], dtype=axes.dtype).expand(len(axes), -1, -1))
    for found in basis_statistics(turned, batches).values():
        variances = found.covariance.diagonal(dim1=-2, dim2=-1)
        assert_close(found.covariance, torch.diag_embed(variances), 1e-9 * float(variances.max()) + 1e-12)
        assert (variances.diff(dim=-1) <= 1e-9 * variances.max()).all()


@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_new_axes_in_the_metric_of_the_loss_change_no_output_and_fall_in_worth(network, linear, pruned):
    model, batches = decomposed(network, linear=linear)
    labels = [(batch, torch.arange(len(batch)) % 4) for batch in batches]
    if pruned:
        model = prune_basis(model, planned(model, batches))
    turned = rebase(model, labels, basis="loss")
    for x in (batches[0], 5 * batches[1].flip(-1)):
        assert_close(turned(x), model(x))
    assert str(turned) == str(model)
    for layer in loss_scores(turned, labels).layers.values():
        values = torch.tensor(layer.values).view(layer.groups, -1)
        assert (values.diff(dim=1) <= 1e-7 * values.max() + 1e-9).all()  # a layer that is worth nothing has noise
    for name, found in basis_statistics(turned, batches).items():
        pair = basis_pairs(turned)[name]
        assert torch.equal(pair.scaling.scale, torch.ones_like(pair.scaling.scale))
        deviations = found.covariance.diagonal(dim1=-2, dim2=-1).clamp_min(1e-20).sqrt()
        correlations = found.covariance / (deviations[..., None] * deviations[:, None] + 1e-9 * deviations.max() ** 2)
        assert_close(correlations.tril(-1), torch.zeros_like(correlations), 1e-4)
        second = pair.scaling.weight.flatten(1).unflatten(0, (pair.scaling.groups, -1)).norm(dim=1)
        assert_close(torch.linalg.vector_norm(to_matrix(pair.basis), dim=1), second, 1e-6)


def test_new_axes_of_another_kind_are_refused():
    model, batches = decomposed("plain")
    with pytest.raises(ConfigError, match="basis: 'weights' given; allowed are outputs, loss"):
        rebase(model, batches, basis="weights")


def test_new_axes_twice_are_new_axes_once():
    model, batches = decomposed("residual")
    once = rebase(model, batches)
    twice = rebase(once, batches)
    for name, found in basis_statistics(twice, batches).items():
        first = basis_statistics(once, batches)[name].covariance
        assert_close(found.covariance, first, 1e-8 * float(first.max()))


def test_the_axes_of_a_dense_layer_are_those_that_decompose_finds():
    conv = nn.Conv2d(3, 8, 3).double()
    images = [torch.randn(4, 3, 9, 9, dtype=torch.float64)]
    turned, direct = rebase(decompose(conv), images), decompose(conv, scale_init=0.5, basis="outputs", batches=images)
    dense = rebase(decompose(conv, scale_init=1.0), images)
    assert_close(dense.scaling.weight.abs(), direct.scaling.weight.abs(), 1e-7)
    assert_close(dense.weight, conv.weight)
    assert_close(turned.weight, 0.5 * conv.weight)


def test_scales_of_zero_leave_axes_without_features():
    model, batches = decomposed("plain")
    basis_pairs(model)["3"].scaling.scale.data[[0, 4]] = 0
    turned = rebase(model, batches)
    assert_close(turned(batches[0]), model(batches[0]))
    variances = basis_statistics(turned, batches)["3"].covariance[0].diagonal()
    assert (variances > 1e-12).sum() == 10
    plan = BasisPlan({"3": LayerPlan(tuple(range(10)), 12)}, 0.2)
    assert_close(prune_basis(turned, plan, compensate="none")(batches[0]), model(batches[0]))


@pytest.mark.parametrize("groups", [1, 2])
def test_more_basis_vectors_than_outputs_become_as_many(groups):
    basis = nn.Conv2d(4 * groups, 5 * groups, 3, groups=groups, bias=False).double()
    pair = BasisPair(basis, scaling_layer(3 * groups, 5 * groups, groups))
    x = torch.randn(2, 4 * groups, 6, 6, dtype=torch.float64)
    turned = rebase(pair, [x])
    assert turned.rank == 3 * groups
    assert_close(turned(x), pair(x))


def test_in_float32_the_network_stays_what_it_was():
    model, x = NETWORKS["residual"](dtype=torch.float32)
    model = decompose(model, scale_init=0.6).train()
    basis_pairs(model)["conv1"].scaling.scale.requires_grad_(False)
    turned = rebase(model, [x])
    assert all(module.training for module in turned.modules())
    assert {value.dtype for value in turned.parameters()} == {torch.float32}
    trainable = {name for name, value in turned.named_parameters() if value.requires_grad}
    assert trainable == {name for name, value in model.named_parameters() if value.requires_grad}
    assert_close(turned.eval()(x), model.eval()(x), 1e-4)
    assert rebase(model, [x], inplace=True) is model
    assert torch.equal(model.eval()(x), turned(x))
    used_twice, batches = decomposed("used_twice")
    again = rebase(used_twice, batches)
    assert again.shared is again.alias


@pytest.mark.parametrize("deviation", [1e-2, 1e-3, 1e-4])
def test_a_faint_feature_predicts_hardly_anything(deviation):
    # The first feature goes; it is a large multiple of the third, which hardly varies. The second is noise.
    covariance = torch.tensor([[1.0, 0.0, deviation], [0.0, 1.0, 0.0], [deviation, 0.0, deviation**2]]).double()[None]
    known = OutputStatistics(torch.zeros(3).double(), covariance)
    gone, kept = torch.tensor([[0]]), torch.tensor([[1, 2]])
    plain, careful = (least_squares(known, kept, gone, 1e-12, faint=faint)[0, 0] for faint in (0.0, 1.0))
    assert plain[1] == pytest.approx(1 / deviation, rel=0.01)
    assert 0 < careful[1] < min(25, 0.5 * plain[1])  # the ridge bounds it, however faint it is
    equal = covariance.new_tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 1.0]])[None]
    known = OutputStatistics(known.mean, equal)
    plain, careful = (least_squares(known, kept, gone, 1e-12, faint=faint) for faint in (0.0, 1.0))
    torch.testing.assert_close(careful, plain, rtol=2e-3, atol=0)
