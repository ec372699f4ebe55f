"""Laws of finding, matching and replacing modules, and of cloning convs."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
from networks import NETWORKS
from timm.layers import Conv2dSame, ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from tiny import tiny_model
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from basisprune.basis.decompose import decompose, recompose
from basisprune.basis.layers import BasisPair, BasisScalingConv
from basisprune.errors import LayerError, ModelError
from basisprune.torchkit.surgery import (
    TORCH_CONVS,
    clone_conv,
    find_layers,
    is_depthwise,
    is_norm,
    make_linear,
    match_layers,
    model_heads,
    plain_conv,
    plain_linear,
    replace_module,
)


def names(model: nn.Module, kinds=TORCH_CONVS, **settings) -> list[str]:
    return [name for name, _ in find_layers(model, kinds, **settings)]


def test_a_module_with_two_names_is_found_once_under_the_first():
    model, _ = NETWORKS["used_twice"]()
    assert names(model) == ["stem", "shared"]


def test_the_root_is_found_under_the_empty_name():
    assert names(nn.Conv2d(3, 4, 1)) == [""]


def test_nothing_inside_an_opaque_module_is_found():
    pair = BasisPair(nn.Conv2d(3, 2, 1), BasisScalingConv(torch.randn(4, 2, 1, 1), scale=torch.ones(2)))
    model = nn.Sequential(pair, nn.Conv2d(4, 4, 1))
    assert names(model, opaque=BasisPair) == ["1"]
    assert names(model, (BasisPair,), opaque=BasisPair) == ["0"]


@pytest.mark.parametrize("name", NETWORKS)
def test_a_clone_with_the_same_weights_computes_the_same(name):
    model, _ = NETWORKS[name]()
    for _, conv in find_layers(model, TORCH_CONVS):
        clone = clone_conv(conv, conv.weight.detach(), None if conv.bias is None else conv.bias.detach())
        x = torch.randn(2, conv.in_channels, *[9] * len(conv.kernel_size), dtype=torch.float64)
        assert torch.equal(clone(x), conv(x))
        assert str(clone) == str(conv)
        assert not any(parameter.requires_grad for parameter in clone.parameters())


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_channel_counts_of_a_clone_follow_its_weight(kind, groups):
    conv = kind(4, 6, 3, stride=2, padding=1, groups=groups)
    clone = clone_conv(conv, torch.randn(4, 4 // groups, 3, 3), None)
    assert (clone.in_channels, clone.out_channels, clone.bias) == (4, 4, None)
    assert clone(torch.randn(1, 4, 9, 9)).shape[1] == 4
    assert (conv.out_channels, conv.bias is None) == (6, False)


def test_a_replaced_module_is_replaced_under_all_its_names_and_hands_on_its_mode():
    model, _ = NETWORKS["used_twice"]()
    model.train()
    new = nn.Identity().eval()
    assert replace_module(model, "alias", new) is model
    assert model.shared is new
    assert model.alias is new
    assert new.training


def test_the_root_is_replaced_by_returning_the_new_module():
    new = nn.ReLU()
    assert replace_module(nn.Conv2d(3, 4, 1), "", new) is new


def test_an_unknown_name_is_refused():
    with pytest.raises(ModelError, match="nowhere: the model has no such module"):
        replace_module(nn.Sequential(nn.ReLU()), "nowhere", nn.ReLU())


def test_layers_are_matched_by_module_name_and_pattern():
    model, _ = NETWORKS["residual"]()
    assert match_layers(model, [model.conv1]) == {"conv1"}
    assert match_layers(model, ["conv2"]) == {"conv2"}
    assert match_layers(model, ["conv?", "down"]) == {"conv1", "conv2", "conv3", "down"}
    assert match_layers(model, ["stem"]) == {"stem", "stem.0", "stem.1", "stem.2"}
    assert match_layers(model, [model.stem]) == match_layers(model, ["stem"])
    assert match_layers(model, []) == frozenset()


def test_a_match_by_one_name_takes_all_names_of_the_module():
    model, _ = NETWORKS["used_twice"]()
    assert match_layers(model, ["alias"]) == {"alias", "shared"}


@pytest.mark.parametrize("pattern", ["nowhere", "layer9.*", nn.ReLU()])
def test_a_pattern_that_matches_nothing_is_an_error(pattern):
    model, _ = NETWORKS["plain"]()
    with pytest.raises(ModelError, match="matches no module of Sequential"):
        match_layers(model, ["0", pattern])


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (nn.BatchNorm2d(4), True),
        (nn.GroupNorm(2, 4), True),
        (nn.LayerNorm(4), True),
        (nn.LocalResponseNorm(2), False),
        (nn.Conv2d(3, 4, 1), False),
        (type("ConvNormAct", (nn.Sequential,), {})(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), False),
    ],
)
def test_a_norm_is_told_by_its_name_and_a_block_with_a_conv_is_none(module, expected):
    assert is_norm(module) is expected


def test_depthwise_means_one_input_channel_for_each_group():
    assert is_depthwise(nn.Conv2d(4, 8, 3, groups=4))
    assert not is_depthwise(nn.Conv2d(4, 8, 3, groups=2))
    assert not is_depthwise(nn.Conv2d(1, 8, 3))


@pytest.mark.parametrize("kind", [*TORCH_CONVS, Conv2dSame])
def test_a_plain_conv_is_taken_as_it_is(kind):
    conv = kind(3, 4, 3)
    assert plain_conv("conv", conv) is conv


def _hooked(register: str) -> nn.Module:
    conv = nn.Conv2d(3, 4, 3)
    getattr(conv, register)(lambda *_: None)
    return conv


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ],
)
def test_a_conv_with_hooks_is_refused_by_name(register):
    with pytest.raises(LayerError, match=r"^stem: has hooks"):
        plain_conv("stem", _hooked(register))


def test_a_lazy_conv_is_refused_as_lazy():
    with pytest.raises(LayerError, match=r"^stem: is a lazy conv"):
        plain_conv("stem", nn.LazyConv2d(4, 3))


class WithMask(nn.Conv2d):
    def forward(self, x, mask):
        return super().forward(x * mask)


def test_a_conv_that_cannot_be_tried_is_refused_by_name():
    with pytest.raises(LayerError, match=r"^stem: WithMask cannot be tried"):
        plain_conv("stem", WithMask(3, 4, 3))


class CastingLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)


class NormalisedLinear(nn.Linear):
    def forward(self, x):
        return F.linear(F.normalize(x), self.weight, self.bias)


def test_a_linear_layer_must_compute_what_its_weight_says():
    layer = CastingLinear(4, 3)
    assert plain_linear("head", layer) is layer
    with pytest.raises(LayerError, match=r"^head: NormalisedLinear does not compute a plain linear layer"):
        plain_linear("head", NormalisedLinear(4, 3))
    layer.register_forward_hook(lambda *_: None)
    with pytest.raises(LayerError, match=r"^head: has hooks"):
        plain_linear("head", layer)


SAME = {"padding": "same", "stride": 2}
SUBCLASSES = {
    "Conv2dSame": lambda: Conv2dSame(4, 6, 3, stride=2),
    "StdConv2d": lambda: StdConv2d(4, 6, 3, stride=2, padding=1),
    "StdConv2dSame": lambda: StdConv2dSame(4, 6, 3, **SAME),
    "ScaledStdConv2d": lambda: ScaledStdConv2d(4, 6, 3, stride=2, padding=1),
    "ScaledStdConv2dSame": lambda: ScaledStdConv2dSame(4, 6, 3, **SAME),
    "grouped ScaledStdConv2d": lambda: ScaledStdConv2d(4, 6, 3, groups=2),
    "weight_norm": lambda: weight_norm(nn.Conv2d(4, 6, 3, padding=1)),
    "spectral_norm": lambda: spectral_norm(nn.Conv2d(4, 6, 3, stride=2)),
    "weight_norm transposed": lambda: weight_norm(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2)),
    "only pads": lambda: OnlyPads(4, 6, 3),
}


class OnlyPads(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (2, 0, 1, 0)))


@pytest.mark.parametrize("side", [11, 12])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", SUBCLASSES)
def test_subclasses_of_conv_are_split_by_their_effective_weight(name, training, side):
    conv = SUBCLASSES[name]().double().train(training)
    if conv.bias is not None:
        nn.init.normal_(conv.bias)
    before = copy.deepcopy(conv.state_dict())
    pair = decompose(conv, scale_init=1.0)
    assert isinstance(pair, BasisPair)
    assert all(torch.equal(value, before[key]) for key, value in conv.state_dict().items())
    x = torch.randn(2, 4, side, side, dtype=torch.float64)
    conv.eval()  # in train mode spectral norm moves its weight whenever it runs
    torch.testing.assert_close(pair(x), conv(x), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(recompose(pair)(x), conv(x), rtol=1e-6, atol=1e-6)


class ThenRelu(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class ThenGain(nn.Conv2d):
    def __init__(self, *args, **settings) -> None:
        super().__init__(*args, **settings)
        self.gain = nn.Parameter(torch.linspace(1, 2, self.out_channels).view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


class Twice(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x.flip(-1))


class Frozen(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, torch.ones_like(self.weight))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("outputs", [6, 60])
@pytest.mark.parametrize("kind", [ThenRelu, ThenGain, Twice])
def test_a_subclass_that_does_something_else_is_refused_by_name(kind, outputs, bias):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), kind(4, outputs, 3, bias=bias))
    before = str(model)
    with pytest.raises(LayerError, match=rf"^1: {kind.__name__} (does not compute|cannot be tried)"):
        decompose(model, inplace=True)
    assert str(model) == before
    decompose(model, ignored_layers=["1"])


def test_a_subclass_with_another_weight_is_split_by_the_weight_it_uses():
    conv, x = Frozen(4, 6, 3, bias=False), torch.randn(1, 4, 8, 8)
    torch.testing.assert_close(decompose(conv, scale_init=1.0)(x), conv(x))


def test_one_name_or_module_is_one_pattern():
    model = nn.Sequential(*[nn.Conv2d(1, 1, 1) for _ in range(11)])
    assert match_layers(model, "10") == {"10"}
    assert match_layers(model, model[1]) == {"1"}


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_made_of_copies_of_its_weights(bias):
    layer = nn.Linear(5, 3, bias=bias).double()
    made = make_linear(layer.weight, layer.bias)
    x = torch.randn(2, 5, dtype=torch.float64)
    assert torch.equal(made(x), layer(x))
    assert (made.in_features, made.out_features) == (5, 3)
    assert not any(parameter.requires_grad for parameter in made.parameters())
    with torch.no_grad():
        made.weight.zero_()
    assert layer.weight.abs().sum() > 0


def test_heads_are_what_the_network_names():
    model = tiny_model()
    assert model_heads(model) == [model.classifier]
    assert model_heads(nn.Sequential(nn.Linear(3, 2))) == []
    vit = timm.create_model("test_vit", num_classes=3)
    assert model_heads(vit) == [vit.head]


def test_a_network_with_two_heads_names_both():
    model = timm.create_model("efficientformer_l1", depths=(1, 1, 1, 1), embed_dims=(8, 8, 8, 8), num_classes=3)
    assert model_heads(model) == [model.head, model.head_dist]
