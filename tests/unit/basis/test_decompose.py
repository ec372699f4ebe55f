"""Laws of the decomposition and of its inverse."""

from __future__ import annotations

import copy
import math

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import NETWORKS
from torch import Tensor, nn

from basisprune.basis.decompose import choose_layers, decompose, output_basis, recompose, weight_basis
from basisprune.basis.factors import balanced, full_rank, to_matrix
from basisprune.basis.layers import BasisPair, basis_pairs
from basisprune.basis.loss_axes import RIDGE, loss_basis, metric_roots, with_ridge
from basisprune.basis.refit import basis_statistics
from basisprune.errors import ConfigError, DataError, LayerError, ModelError
from basisprune.importance import basis_loss
from basisprune.torchkit.surgery import TORCH_CONVS, find_layers

BASES = ["weights", "outputs", "loss"]
FEW = settings(max_examples=40, deadline=None)


def split(model: nn.Module, x: Tensor, basis: str = "weights", **options) -> nn.Module:
    options = {"scale_init": 1.0, **options}
    batches = {"weights": None, "outputs": [x], "loss": [(x, torch.arange(len(x)) % 4)]}
    return decompose(model, basis=basis, batches=batches[basis], loss=any_loss, **options)


def any_loss(output: Tensor, labels: Tensor) -> Tensor:
    """A loss for outputs of any shape whose gradient differs from output to output."""
    return (output.flatten(1).cumsum(1).sin() + labels[:, None]).square().mean()


def pairs_of(model: nn.Module) -> dict[str, BasisPair]:
    return dict(find_layers(model, BasisPair))


def assert_close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("network", NETWORKS)
def test_full_rank_at_scale_one_preserves_the_output(network, basis, linear):
    model, x = NETWORKS[network]()
    before = copy.deepcopy(model.state_dict())
    result = split(model, x, basis, linear=linear)
    assert_close(result(x), model(x))
    assert_close(result(2 * x + 1), model(2 * x + 1))
    assert pairs_of(result)
    assert not pairs_of(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("network", NETWORKS)
def test_recompose_is_the_exact_inverse(network, basis):
    model, x = NETWORKS[network]()
    decomposed = split(model, x, basis, linear=True)
    back = recompose(decomposed)
    assert str(back) == str(model)
    assert back.state_dict().keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert_close(back.state_dict()[key], value)
    assert pairs_of(decomposed)


@pytest.mark.parametrize("network", NETWORKS)
def test_recompose_carries_the_scales(network):
    model, x = NETWORKS[network]()
    decomposed = split(model, x, scale_init=0.7)
    for pair in pairs_of(decomposed).values():
        nn.init.uniform_(pair.scaling.scale)
    assert_close(recompose(decomposed)(x), decomposed(x))


@pytest.mark.parametrize("network", NETWORKS)
def test_a_second_call_changes_nothing(network):
    model, x = NETWORKS[network]()
    once = split(model, x, scale_init=0.5)
    twice = split(once, x, scale_init=0.25)
    assert str(twice) == str(once)
    assert all(torch.equal(value, once.state_dict()[key]) for key, value in twice.state_dict().items())
    assert not any(choice.left_alone is None for choice in choose_layers(once))


@pytest.mark.parametrize("network", NETWORKS)
def test_at_scale_half_a_pair_computes_half_of_the_conv_and_the_whole_bias(network):
    model, _ = NETWORKS[network]()
    decomposed = decompose(model)
    for name, pair in pairs_of(decomposed).items():
        conv = model.get_submodule(name)
        features = torch.randn(1, conv.in_channels, *[9] * len(conv.kernel_size), dtype=torch.float64)
        bias = 0 if conv.bias is None else conv.bias.view(-1, *[1] * len(conv.kernel_size))
        assert_close(pair(features), 0.5 * (conv(features) - bias) + bias)


@pytest.mark.parametrize("network", NETWORKS)
def test_mode_dtype_and_frozen_parts_are_as_they_should_be(network):
    model, x = NETWORKS[network](dtype=torch.float32)
    assert not decompose(model).training
    decomposed = decompose(model.train())
    assert all(module.training for module in decomposed.modules())
    assert {value.dtype for value in decomposed.parameters()} == {torch.float32}
    for name, pair in pairs_of(decomposed).items():
        trainable = [part for part, parameter in pair.named_parameters() if parameter.requires_grad]
        assert trainable == ["scaling.scale"], name
        assert pair.basis.bias is None
        assert type(pair.basis) is type(model.get_submodule(name))
    torch.testing.assert_close(split(model.eval(), x)(x), model(x), rtol=1e-4, atol=1e-4)


def test_half_precision_is_kept():
    conv = nn.Conv2d(3, 8, 3).to(torch.bfloat16)
    assert {value.dtype for value in decompose(conv).state_dict().values()} == {torch.bfloat16}


def orthonormal(columns: Tensor) -> None:
    eye = torch.eye(columns.shape[-1], dtype=columns.dtype).expand(*columns.shape[:-2], -1, -1)
    torch.testing.assert_close(columns.mT @ columns, eye, rtol=0, atol=1e-9)


@st.composite
def matrices(draw) -> Tensor:
    """Batches of matrices: tall and wide, of full and of less than full rank, zero, badly scaled."""
    groups, k, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 14)), draw(st.integers(1, 14))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    inner = draw(st.integers(0, min(k, outputs)))
    shape = {"generator": generator, "dtype": torch.float64}
    low_rank = torch.randn(groups, k, inner, **shape) @ torch.randn(groups, inner, outputs, **shape)
    falling = 10.0 ** -torch.arange(outputs, dtype=torch.float64) if draw(st.booleans()) else 1.0
    return low_rank * falling * draw(st.sampled_from([1.0, 1e-8, 1e8]))


@FEW
@given(matrices())
def test_the_weight_basis_is_a_compact_svd(matrix):
    first, second = weight_basis(matrix)
    rank = min(matrix.shape[-2:])
    assert first.shape == (*matrix.shape[:-1], rank)
    orthonormal(first)
    size = matrix.abs().max().item()
    torch.testing.assert_close(first @ second, matrix, rtol=0, atol=1e-13 * 14 * size)
    lengths = torch.linalg.vector_norm(second, dim=-1)
    # By way of the Gram matrix the smallest values are known to the square root of the precision.
    torch.testing.assert_close(lengths, torch.linalg.svdvals(matrix), rtol=1e-9, atol=1e-6 * size)
    assert (lengths.diff(dim=-1) <= 1e-6 * size).all()


@FEW
@given(matrices(), st.booleans())
def test_the_output_basis_is_orthonormal_and_exact(matrix, constant):
    samples = torch.randn(1 if constant else 30, matrix.shape[1], dtype=torch.float64) @ matrix
    covariance = samples.mT @ samples / samples.shape[1]
    first, axes = output_basis(matrix, covariance)
    orthonormal(axes.mT)
    size = matrix.abs().max().item()
    torch.testing.assert_close(first @ axes, matrix, rtol=0, atol=1e-13 * 14 * size)
    variances = (axes @ covariance @ axes.mT).diagonal(dim1=-2, dim2=-1)
    assert (variances.diff(dim=-1) <= 1e-9 * covariance.abs().max()).all()


@st.composite
def convs(draw) -> nn.Module:
    dims, transposed = draw(st.integers(1, 3)), draw(st.booleans())
    groups = draw(st.integers(1, 3))
    inputs, outputs = groups * draw(st.integers(2, 4)), groups * draw(st.integers(2, 5))
    kernel = draw(st.tuples(*[st.integers(1, 3)] * dims))
    stride = draw(st.tuples(*[st.integers(1, 2)] * dims))
    kind = getattr(nn, f"Conv{'Transpose' * transposed}{dims}d")
    dilation, bias = draw(st.integers(1, 2)), draw(st.booleans())
    return kind(inputs, outputs, kernel, stride=stride, dilation=dilation, groups=groups, bias=bias).double()


@FEW
@given(convs(), st.sampled_from(BASES))
def test_any_conv_is_split_and_merged_exactly(conv, basis):
    x = torch.randn(2, conv.in_channels, *[6] * len(conv.kernel_size), dtype=torch.float64)
    pair = split(conv, x, basis)
    fan_in = conv.in_channels // conv.groups * math.prod(conv.kernel_size)
    assert pair.rank == conv.groups * min(fan_in, conv.out_channels // conv.groups)
    assert_close(pair(x), conv(x))
    assert_close(pair.weight, conv.weight)
    assert_close(recompose(pair).weight, conv.weight)


def test_each_group_of_a_grouped_pair_has_orthonormal_filters():
    conv = nn.Conv2d(8, 12, 3, groups=4).double()
    weight = decompose(conv).basis.weight
    orthonormal(weight.flatten(1).unflatten(0, (4, -1)).mT)


def test_zero_weights_are_split_into_finite_parts():
    conv = nn.Conv2d(3, 8, 3)
    nn.init.zeros_(conv.weight)
    for basis in BASES:
        pair = split(conv, torch.randn(2, 3, 8, 8), basis)
        assert all(value.isfinite().all() for value in pair.state_dict().values())
        assert (pair.weight == 0).all()


def test_layers_with_hooks_are_refused_by_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(4, 2))
    model[2].register_forward_hook(lambda *_: None)
    decompose(model)
    with pytest.raises(LayerError, match=r"^2: has hooks"):
        decompose(model, linear=True)
    model[0].register_forward_hook(lambda *_: None)
    with pytest.raises(LayerError, match=r"^0: has hooks"):
        decompose(model)


def test_weights_that_are_not_finite_are_refused_by_name():
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    model[0].weight.data[0, 0] = math.nan
    with pytest.raises(LayerError, match=r"^0: its weight holds NaN"):
        decompose(model)


def test_a_root_conv_becomes_a_pair():
    conv, x = nn.Conv2d(3, 8, 3).double(), torch.randn(1, 3, 8, 8, dtype=torch.float64)
    pair = decompose(conv, scale_init=1.0)
    assert isinstance(pair, BasisPair)
    assert_close(pair(x), conv(x))
    assert isinstance(recompose(pair), nn.Conv2d)


@pytest.mark.parametrize("basis", BASES)
def test_a_conv_used_twice_is_one_pair_under_both_names(basis):
    model, x = NETWORKS["used_twice"]()
    decomposed = split(model, x, basis)
    assert decomposed.shared is decomposed.alias
    assert set(pairs_of(decomposed)) == {"stem", "shared"}
    back = recompose(decomposed)
    assert back.shared is back.alias


def test_ignored_layers_stay_as_they_are():
    model, _ = NETWORKS["residual"]()
    everything = {"stem.0", "conv1", "conv2", "conv3", "down"}
    for ignored, left in [
        ([], set()),
        ([model.conv1], {"conv1"}),
        (["conv1", "down"], {"conv1", "down"}),
        (["conv*"], {"conv1", "conv2", "conv3"}),
        (["stem"], {"stem.0"}),
    ]:
        assert set(pairs_of(decompose(model, ignored_layers=ignored))) == everything - left
        reasons = {choice.name: choice.left_alone for choice in choose_layers(model, ignored_layers=ignored)}
        assert {name for name, reason in reasons.items() if reason == "ignored_layers"} == left
    with pytest.raises(ModelError, match=r"ignored_layers: 'layer9\.\*' matches no module"):
        decompose(model, ignored_layers=["layer9.*"])


def test_a_layer_is_ignored_by_any_of_its_names():
    model, _ = NETWORKS["used_twice"]()
    assert set(pairs_of(decompose(model, ignored_layers=["alias"]))) == {"stem"}


def test_depthwise_convs_are_left_alone_with_a_reason():
    model, _ = NETWORKS["depthwise"]()
    reasons = {choice.name: (choice.rank, choice.left_alone) for choice in choose_layers(model)}
    depthwise = "depthwise: a split gains nothing"
    assert reasons.pop("13") == (4, "the classifier: it is trained as it is")
    assert reasons == {"0": (8, None), "3": (8, depthwise), "6": (16, depthwise), "9": (12, None)}
    assert set(pairs_of(decompose(model))) == {"0", "9"}


def test_a_layer_of_rank_one_is_left_alone_with_a_reason():
    (choice,) = choose_layers(nn.Conv2d(8, 1, 3))
    assert (choice.rank, choice.left_alone) == (1, "rank 1")


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("network", NETWORKS)
def test_copies_and_state_dicts_of_a_decomposed_model_work(network, basis):
    model, x = NETWORKS[network]()
    decomposed = split(model, x, basis, scale_init=0.5)
    assert_close(copy.deepcopy(decomposed)(x), decomposed(x))
    other = decompose(NETWORKS[network](seed=1)[0])
    other.load_state_dict(decomposed.state_dict())
    expected = decomposed(x)
    assert_close(other(x), expected)


def test_in_place_is_in_place():
    model, x = NETWORKS["plain"]()
    expected = model(x)
    assert decompose(model, scale_init=1.0, inplace=True) is model
    assert_close(model(x), expected)
    assert recompose(model, inplace=True) is model
    assert not pairs_of(model)


@pytest.mark.parametrize("name", ["edgenext_xx_small", "davit_tiny"])
def test_networks_that_look_at_their_convs_run_when_decomposed(name):
    model = timm.create_model(name, num_classes=3).eval()
    x = torch.randn(2, 3, 64, 64)
    decomposed = decompose(model, scale_init=1.0)
    with torch.no_grad():
        torch.testing.assert_close(decomposed(x), model(x), rtol=1e-3, atol=1e-3)
    decomposed.train()(x).sum().backward()
    assert all(pair.scaling.scale.grad is not None for pair in pairs_of(decomposed).values())


def test_wrong_settings_are_listed_all_at_once():
    with pytest.raises(ConfigError, match="3 faults") as caught:
        decompose(nn.Conv2d(3, 4, 1), scale_init=0, basis="weight", batches=[])
    assert all(word in str(caught.value) for word in ("scale_init: 0", "'weight' given", "go together"))
    with pytest.raises(ConfigError, match="go together"):
        decompose(nn.Conv2d(3, 4, 1), basis="outputs")
    with pytest.raises(ConfigError, match="go together"):
        decompose(nn.Conv2d(3, 4, 1), basis="loss")


def test_the_output_basis_needs_prepared_images_that_reach_every_layer():
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    with pytest.raises(DataError, match="no batch came"):
        decompose(model, basis="outputs", batches=[])
    with pytest.raises(DataError, match=r"torch\.uint8 tensor given"):
        decompose(model, basis="outputs", batches=[torch.zeros(1, 3, 4, 4, dtype=torch.uint8)])


@pytest.mark.parametrize("basis", ["outputs", "loss"])
def test_layers_that_never_run_are_left_alone_and_listed_once(basis, caplog):
    torch.manual_seed(0)
    model, labels = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 3)), torch.arange(6) % 3
    model[0].one, model[0].other = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
    batches = [(torch.randn(6, 3, 4, 4), labels)]
    with caplog.at_level("INFO"):
        split = decompose(model, basis=basis, batches=batches)
    assert caplog.messages == ["left alone, because they never ran on the given images: 0.one, 0.other"]
    assert list(basis_pairs(split)) == ["0"]
    every = decompose(model)
    assert list(basis_loss(every, batches).scores.layers) == list(basis_statistics(every, batches)) == ["0"]


def test_the_output_basis_orders_vectors_by_the_variance_they_carry():
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 8, 3).double(), torch.randn(8, 3, 12, 12, dtype=torch.float64)
    pair = split(conv, x, "outputs")
    variances = pair.basis(x).transpose(0, 1).flatten(1).var(1)
    assert (variances.diff() <= 1e-12).all()
    # Keeping the first vectors is the best that can be done at that rank, better than the weights' own.
    errors = {}
    for basis in BASES:
        pair = split(conv, x, basis)
        pair.scaling.scale.data[4:] = 0
        errors[basis] = (pair(x) - conv(x)).var((0, 2, 3), correction=0).sum()
    assert errors["outputs"] <= errors["weights"]


def test_the_basis_of_the_outputs_is_that_of_the_weights_for_whitened_inputs():
    torch.manual_seed(0)
    conv = nn.Conv2d(6, 5, 1).double()
    x = torch.randn(4, 6, 3, 3, dtype=torch.float64) * torch.arange(1, 7).view(6, 1, 1) + 2
    coloured = torch.linalg.cholesky(torch.cov(x.movedim(1, 0).flatten(1)))  # x is this times white noise
    vectors = torch.linalg.svd(conv.weight.detach().flatten(1) @ coloured).U
    ours = split(conv, x, "outputs").scaling.weight.detach().flatten(1)
    torch.testing.assert_close((ours.mT @ vectors).abs(), torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-9)


def test_the_loss_basis_needs_labels():
    with pytest.raises(DataError, match=r"\(images, labels\) are needed, Tensor given"):
        decompose(nn.Conv2d(3, 4, 1), basis="loss", batches=[torch.randn(2, 3, 4, 4)])


@pytest.mark.parametrize("network", NETWORKS)
def test_the_factors_of_the_loss_basis_are_balanced(network):
    model, x = NETWORKS[network]()
    for pair in pairs_of(split(model, x, "loss", linear=True)).values():
        first = torch.linalg.vector_norm(to_matrix(pair.basis), dim=1).flatten()
        second = pair.scaling.weight.flatten(1).unflatten(0, (pair.scaling.groups, -1)).norm(dim=1).flatten()
        assert_close(first, second)


def test_a_decomposed_model_is_not_decomposed_inside_its_pairs():
    model, x = NETWORKS["plain"]()
    decomposed = split(model, x, linear=True)
    assert not list(find_layers(decomposed, (*TORCH_CONVS, nn.Linear), opaque=BasisPair))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_full_rank_is_that_of_a_fresh_pair(name):
    model, _ = NETWORKS[name]()
    for layer, pair in pairs_of(decompose(model)).items():
        original = model.get_submodule(layer)
        assert full_rank(original) == full_rank(pair.basis, pair.out_channels) == pair.rank


def test_linear_layers_that_are_spared_are_spared_when_the_rest_is_split():
    model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32, 8), nn.Linear(8, 4))
    once = decompose(model, scale_init=1.0)
    assert set(pairs_of(once)) == {"0", "1"}
    assert set(pairs_of(decompose(once, scale_init=1.0))) == {"0", "1"}


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
