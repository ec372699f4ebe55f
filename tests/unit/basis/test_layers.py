"""Laws of the BasisScalingConv and of the pair."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import BasisPair, BasisScalingConv

POINTWISE = {0: None, 1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
SCALES = torch.tensor([1.0, 0.0, 1e-6, -0.7, 0.5, 1e-4, 2.0, -1e-5], dtype=torch.float64)


def layer_of(dims: int, groups: int = 1, *, outputs: int = 6, rank: int = 8, bias: bool = True) -> BasisScalingConv:
    torch.manual_seed(0)
    weight = torch.randn(outputs, rank // groups, *[1] * dims, dtype=torch.float64)
    offset = torch.randn(outputs, dtype=torch.float64) if bias else None
    return BasisScalingConv(weight, scale=SCALES[:rank].clone(), bias=offset, groups=groups)


def plainly(layer: BasisScalingConv, features: torch.Tensor) -> torch.Tensor:
    """s * features, then V-bar transposed, then b: the paper's equation word for word."""
    if layer.spatial_dims == 0:
        return F.linear(features * layer.scale, layer.weight, layer.bias)
    scaled = features * layer.scale.view(-1, *[1] * layer.spatial_dims)
    return POINTWISE[layer.spatial_dims](scaled, layer.weight, layer.bias, groups=layer.groups)


# Maps smaller and larger than the weight take different ways through the custom gradient.
CASES = [
    pytest.param(dims, groups, side, id=f"{dims}d-groups{groups}-side{side}")
    for dims in (1, 2, 3)
    for groups in (1, 2)
    for side in (1, 4)
]


def features_for(dims: int, side: int) -> torch.Tensor:
    return torch.randn(1 if side == 1 else 3, 8, *[side] * dims, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("dims", "groups", "side"), CASES)
def test_output_and_gradients_are_those_of_the_plain_formula(dims, groups, side):
    layer = layer_of(dims, groups)
    check_against_plain(layer, features_for(dims, side))


@pytest.mark.parametrize("shape", [(1, 8), (20, 8), (3, 5, 8), (2, 3, 4, 8)])
def test_a_linear_layer_scales_its_last_axis(shape):
    check_against_plain(layer_of(0), torch.randn(shape, dtype=torch.float64, requires_grad=True))


def check_against_plain(layer: BasisScalingConv, features: torch.Tensor) -> None:
    expected = plainly(layer, features)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [features, layer.scale], upstream)
    output = layer(features)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    found = torch.autograd.grad(output, [features, layer.scale], upstream)
    for gradient, truth in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dims", "groups", "side"), CASES)
def test_gradients_are_those_of_finite_differences(dims, groups, side):
    layer = layer_of(dims, groups, outputs=4, rank=4)
    features = features_for(dims, min(side, 2))[:, :4].detach().requires_grad_()

    def run(features: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"scale": scale}, (features,))

    assert torch.autograd.gradcheck(run, (features, layer.scale.detach().clone().requires_grad_()))


@pytest.mark.parametrize("side", [1, 4])
def test_only_the_gradients_that_are_needed_are_made(side):
    layer, features = layer_of(2), features_for(2, side)
    layer(features.detach()).sum().backward()
    assert features.grad is None
    assert layer.scale.grad is not None
    layer.scale.grad = None
    layer.scale.requires_grad_(False)
    layer(features).sum().backward()
    assert features.grad is not None
    assert layer.scale.grad is None
    with torch.no_grad():
        assert not layer(features).requires_grad


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("side", [1, 4])
def test_a_trainable_weight_or_bias_gets_its_gradient(name, side):
    layer, features = layer_of(2), features_for(2, side)
    trained = layer.get_parameter(name).requires_grad_()
    expected = plainly(layer, features)
    upstream = torch.randn_like(expected)
    (truth,) = torch.autograd.grad(expected, [trained], upstream)
    (gradient,) = torch.autograd.grad(layer(features), [trained], upstream)
    torch.testing.assert_close(gradient, truth, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dims", "shape"), [(0, (8,)), (1, (8, 5)), (2, (8, 5, 5))])
def test_an_input_without_a_batch_works_as_in_torch(dims, shape):
    layer = layer_of(dims)
    features = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    check_against_plain(layer, features)


def test_channels_last_gives_the_same_numbers_in_channels_last():
    layer = layer_of(2)
    features = torch.randn(4, 8, 6, 6, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    output = layer(features.requires_grad_())
    torch.testing.assert_close(output, plainly(layer, features))
    assert output.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("smallest_scale", [0.5, 0.0])
@pytest.mark.parametrize("shape", [(4, 8), (4, 8, 5, 5), (1, 8, 1, 1)])
def test_autocast_to_bfloat16_has_the_same_gradients_but_for_rounding(shape, smallest_scale):
    layer = layer_of(len(shape) - 2).float()
    layer.scale.data[0] = smallest_scale
    features = torch.randn(shape).requires_grad_()
    expected = torch.autograd.grad(plainly(layer, features).square().sum(), (features, layer.scale))
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(features)
    assert output.dtype == torch.bfloat16
    torch.testing.assert_close(output.float(), plainly(layer, features), rtol=0.05, atol=0.05)
    gradients = torch.autograd.grad(output.float().square().sum(), (features, layer.scale))
    for gradient, exact in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - exact).norm() <= 0.03 * exact.norm()


def test_forward_changes_nothing_in_the_layer():
    layer = layer_of(2)
    before = copy.deepcopy(layer.state_dict())
    layer(features_for(2, 3)).sum().backward()
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


def test_only_the_scale_is_created_trainable():
    assert [name for name, p in layer_of(2).named_parameters() if p.requires_grad] == ["scale"]
    assert repr(layer_of(2, 2)) == "BasisScalingConv(rank=8, out_channels=6, bias=True, groups=2)"


CONVS = {
    "conv": nn.Conv2d(4, 6, (3, 1), stride=2, padding=(1, 0), dilation=(2, 1), bias=False),
    "grouped": nn.Conv2d(4, 6, 3, groups=2, padding="same", padding_mode="reflect"),
    "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1, groups=2),
    "conv1d": nn.Conv1d(4, 6, 3),
    "conv3d": nn.Conv3d(4, 6, 3),
}
ANSWERS = ["kernel_size", "stride", "padding", "padding_mode", "dilation", "groups", "in_channels", "out_channels"]


@pytest.mark.parametrize("name", CONVS)
def test_a_pair_answers_like_the_conv_it_replaced(name):
    conv = CONVS[name].double()
    pair = decompose(conv, scale_init=1.0)
    assert isinstance(pair, BasisPair)
    for answer in (*ANSWERS, "transposed", "output_padding"):
        assert getattr(pair, answer) == getattr(conv, answer), answer
    torch.testing.assert_close(pair.weight, conv.weight, rtol=0, atol=1e-12)
    assert pair.weight.device == conv.weight.device
    assert (pair.bias is None) == (conv.bias is None)
    assert conv.bias is None or torch.equal(pair.bias, conv.bias)
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = pair.no_such_thing


def test_a_pair_answers_like_the_linear_layer_it_replaced():
    linear = nn.Linear(5, 3).double()
    pair = decompose(linear, scale_init=1.0, linear=True)
    assert (pair.in_features, pair.out_features, pair.rank) == (5, 3, 3)
    torch.testing.assert_close(pair.weight, linear.weight, rtol=0, atol=1e-12)


def test_a_transposed_pair_takes_an_output_size():
    conv = nn.ConvTranspose2d(4, 6, 3, stride=2).double()
    pair, x = decompose(conv, scale_init=1.0), torch.randn(1, 4, 5, 5, dtype=torch.float64)
    for size in ([11, 11], [12, 12]):
        torch.testing.assert_close(pair(x, size), conv(x, output_size=size))
        torch.testing.assert_close(pair(x, output_size=size), conv(x, output_size=size))


@pytest.mark.parametrize("bias", [None, torch.randn(16)])
@pytest.mark.parametrize("size", [1, 2, 9])
def test_an_activation_in_place_may_follow_and_gradients_stay_right(size, bias):
    torch.manual_seed(0)
    layer = BasisScalingConv(torch.randn(16, 8, 1, 1), scale=torch.rand(8), bias=bias).double()
    features = torch.randn(1, 8, size, size, dtype=torch.float64, requires_grad=True)
    loss = torch.relu_(layer(features)).square().sum()
    found = torch.autograd.grad(loss, [features, layer.scale])
    plain = torch.nn.functional.conv2d(features, layer.scaled_weight(), layer.bias).relu().square().sum()
    expected = torch.autograd.grad(plain, [features, layer.scale])
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("dims", "groups", "side"), [(0, 1, 1), (0, 1, 4), *[case.values for case in CASES]])
def test_gradients_can_be_differentiated_again(dims, groups, side):
    layer = layer_of(dims, groups, outputs=4, rank=4)
    shape = (side, 4) if dims == 0 else (1, 4, *[min(side, 2)] * dims)
    features = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def run(features: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"scale": scale}, (features,))

    assert torch.autograd.gradgradcheck(run, (features, layer.scale.detach().clone().requires_grad_()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # torch's own, at the first jvp
@pytest.mark.parametrize("side", [1, 4])
def test_directional_derivatives_are_those_of_the_plain_formula(side):
    layer, features = layer_of(2), features_for(2, side).detach()
    direction = torch.randn_like(features)
    expected = torch.func.jvp(lambda x: plainly(layer, x), (features,), (direction,))
    for jvp in (torch.func.jvp, torch.autograd.functional.jvp):
        found = jvp(layer, (features,), (direction,))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    with torch.autograd.forward_ad.dual_level():
        dual = layer(torch.autograd.forward_ad.make_dual(features, direction))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, expected[1])


def test_gradients_of_each_image_by_vmap_are_those_of_one_image_after_the_other():
    layer, images = layer_of(2), torch.randn(3, 8, 4, 4, dtype=torch.float64)

    def loss(scale: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, {"scale": scale}, (image[None],)).square().sum()

    scale = layer.scale.detach()
    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(scale, images)
    one_by_one = [torch.autograd.functional.jacobian(lambda s, x=image: loss(s, x), scale) for image in images]
    torch.testing.assert_close(found, torch.stack(one_by_one))
    torch.testing.assert_close(torch.func.vmap(layer)(images), layer(images))
