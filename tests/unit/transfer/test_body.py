from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from classifiers import IMAGES, Tiny, input_of, normed, refused, tv, weights_with_statistics
from networks import NETWORKS
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.convnext import CNBlockConfig

from basisprune.transfer.body import NormedConv
from basisprune.transfer.model import transfer_model


@pytest.mark.parametrize("name", [name for name in IMAGES if name != "vgg_like"])
def test_features_are_what_reached_the_old_classifier(name: str) -> None:
    network, x = NETWORKS[name]()
    head = next(key for key, module in network.named_modules() if isinstance(module, nn.Linear))
    model = transfer_model(network, 5, input_size=12)
    torch.testing.assert_close(model.forward_features(x), input_of(network, head, x), rtol=1e-12, atol=1e-12)


TORCHVISION: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "resnet": (lambda: tv("resnet18"), "fc"),
    "mobilenet_v3": (lambda: tv("mobilenet_v3_small"), "classifier.0"),
    "efficientnet": (lambda: tv("efficientnet_b0"), "classifier.1"),
    "mnasnet": (lambda: tv("mnasnet0_5"), "classifier.0"),
    "shufflenet": (lambda: tv("shufflenet_v2_x0_5"), "fc"),
    "regnet": (lambda: tv("regnet_y_400mf"), "fc"),
    "convnext": (
        lambda: torchvision.models.ConvNeXt([CNBlockConfig(12, 24, 1), CNBlockConfig(24, None, 1)]),
        "classifier.0",
    ),
    "swin": (lambda: torchvision.models.SwinTransformer([4, 4], 12, [1, 1], [1, 2], [4, 4]), "head"),
    "vit": (lambda: torchvision.models.VisionTransformer(64, 16, 2, 2, 16, 32), "heads"),
}


@pytest.mark.parametrize(("build", "layer"), TORCHVISION.values(), ids=TORCHVISION.keys())
def test_features_of_torchvision_networks_are_exactly_the_old_ones(build: Callable[[], nn.Module], layer: str) -> None:
    network = build().eval()
    model = transfer_model(network, 5, input_size=64)
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(model.forward_features(x), input_of(network, layer, x).flatten(1))
    assert not normed(model)
    assert not any(name.startswith(f"backbone.{layer}") for name, _ in model.named_parameters())
    assert model.train()(x).shape == (2, 5)


@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050", "vit_tiny_patch16_224", "efficientvit_m0"])
def test_features_of_timm_networks_are_their_pooled_forward_features(name: str) -> None:
    torch.manual_seed(0)
    model = transfer_model(name, 5, input_size=64)
    x = torch.randn(2, 3, 64, 64)
    maps = model.backbone.forward_features(x)
    expected = maps[:, 1:].mean(1) if maps.dim() == 3 else maps.mean((2, 3))
    torch.testing.assert_close(model.forward_features(x), expected)
    assert model.train()(x).shape == (2, 5)


def test_channels_in_the_last_dimension_are_found() -> None:
    swin = timm.models.SwinTransformer(
        img_size=32, patch_size=4, embed_dim=8, depths=(1, 1), num_heads=(1, 2), window_size=4
    )
    model = transfer_model(swin, 5, input_size=32)
    assert model.pool.layout == "NHWC"
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(model.forward_features(x), swin.eval().forward_features(x).mean((1, 2)))


def test_small_images_do_not_shorten_the_body() -> None:
    model = transfer_model(tv("resnet18"), 5, input_size=32)
    assert model.classifier.in_features == 512
    assert isinstance(model.backbone.get_submodule("layer4.1.bn2"), nn.BatchNorm2d)


def test_a_conv_that_classifies_maps_belongs_to_the_body() -> None:
    model = transfer_model(tv("squeezenet1_1"), 5, input_size=64)
    assert model.classifier.in_features == 1000
    assert len(normed(model)) == 26


def test_the_last_pooling_goes_even_if_the_head_is_not_global() -> None:
    network, x = NETWORKS["vgg_like"]()
    model = transfer_model(network, 5, input_size=12)
    torch.testing.assert_close(model.forward_features(x), network[:5](x).mean((2, 3)))


def test_a_single_conv_is_a_body() -> None:
    model = transfer_model(nn.Conv2d(3, 6, 3), 5, input_size=16)
    assert isinstance(model.backbone, NormedConv)
    assert model.classifier.in_features == 6


def test_a_pooling_branch_is_no_tail() -> None:
    def finish(net: Tiny, x: Tensor) -> Tensor:
        branches = torch.cat([F.max_pool2d(x, 2), net.pool(x)], dim=1)
        return net.fc(branches.mean((2, 3))[:, :6])

    network = Tiny(finish)
    model = transfer_model(network, 5, input_size=16, insert_norm=False)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(model.forward_features(x), input_of(network, "fc", x))


def test_a_module_that_the_body_uses_too_survives_in_the_tail() -> None:
    class Shared(Tiny):
        def forward(self, x: Tensor) -> Any:
            return self.fc(self.pool(self.conv(self.pool(x))).mean((2, 3)))

    network = Shared()
    model = transfer_model(network, 5, input_size=16, insert_norm=False)
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(model.forward_features(x), input_of(network, "fc", x))


def test_modules_without_use_do_not_count() -> None:
    network = Tiny()
    network.spare = nn.Sequential(nn.Linear(9, 9), nn.ReLU())
    model = transfer_model(network, 5, input_size=16)
    assert weights_with_statistics(model) == (3 * 9 * 6 + 6) + 4 * 6 + (6 * 5 + 5)


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_auxiliary_heads_are_switched_off_and_dropped(name: str) -> None:
    network = tv(name, init_weights=False)
    model = transfer_model(network, 5, input_size=96)
    x = torch.randn(2, 3, 96, 96)
    assert network.aux_logits
    assert not any("aux" in name.lower() for name, _ in model.named_modules())
    assert torch.equal(model.forward_features(x), input_of(network, "fc", x))
    assert isinstance(model.train()(x), Tensor)


@pytest.mark.parametrize(
    ("finish", "message"),
    [
        (lambda net, x: {"out": x}, "returns dict in eval mode, one tensor is needed.*forward_features"),
        (lambda net, x: (x, x) if net.training else x, "returns tuple in train mode"),
        (lambda net, x: x[:, :, None], r"shape \(2, 6, 1, 128, 128\); allowed are"),
        (lambda net, x: F.log_softmax(net.fc(x.mean((2, 3))), 1), "ends in a softmax inside its forward"),
        (lambda net, x: net.fc(net.pool(x).view(-1, 384)[:, :6]), "'\\[-1, 384\\]' is invalid.*forward_features"),
    ],
    ids=["dict", "tuple", "five", "softmax", "view"],
)  # fmt: skip
def test_unsuitable_outputs_are_refused_with_a_way_out(finish: Callable[[Tiny, Tensor], Any], message: str) -> None:
    refused(message, Tiny(finish))


def test_networks_without_maps_are_refused() -> None:
    refused("Sequential has no layer that gives a feature map", nn.Sequential(nn.Flatten(), nn.Linear(768, 4)))


@pytest.mark.parametrize("name", ["one_dimensional", "three_dimensional"])
def test_networks_that_take_no_images_are_refused(name: str) -> None:
    refused(r"does not run on an input of shape \(2, 3, 16, 16\).*pass input_size= or input_spec=", NETWORKS[name]()[0])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("plain", 0), ("vgg_like", 2), ("residual", 2), ("concat", 1), ("grouped", 0), ("depthwise", 0),
        ("dilated", 2), ("reflect_padded", 3), ("used_twice", 2), ("transposed", 2),
    ],
)  # fmt: skip
def test_just_convs_without_a_norm_behind_them_get_one(name: str, expected: int) -> None:
    network, _ = NETWORKS[name]()
    assert len(normed(transfer_model(network, 5, input_size=12))) == expected


@pytest.mark.parametrize("name", IMAGES)
def test_inserted_norms_change_nothing_in_eval_mode(name: str) -> None:
    network, x = NETWORKS[name]()
    with_norms, without = (transfer_model(network, 5, input_size=12, insert_norm=flag) for flag in (True, False))
    assert not normed(without)
    torch.testing.assert_close(with_norms.forward_features(x), without.forward_features(x), rtol=1e-12, atol=1e-12)


def test_a_conv_used_twice_gets_one_norm_under_both_names() -> None:
    model = transfer_model(NETWORKS["used_twice"]()[0], 5, input_size=12)
    assert model.backbone.shared is model.backbone.alias
    assert isinstance(model.backbone.shared, NormedConv)


@pytest.mark.parametrize(
    "other", [nn.GroupNorm(2, 6), nn.LayerNorm(16), nn.InstanceNorm2d(6), timm.layers.FilterResponseNormAct2d(6)]
)
def test_networks_with_other_norms_keep_those(other: nn.Module) -> None:
    network = nn.Sequential(nn.Conv2d(3, 6, 1), other, nn.Conv2d(6, 6, 1), nn.AdaptiveAvgPool2d(1))
    assert not normed(transfer_model(network, 5, input_size=16))


def test_networks_with_standardised_weights_get_no_norm() -> None:
    network = nn.Sequential(timm.layers.ScaledStdConv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 6, 1))
    assert not normed(transfer_model(network, 5, input_size=16))


def test_gates_on_pooled_maps_get_no_norm() -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), timm.layers.SEModule(8), timm.layers.EcaModule(8))
    assert not normed(transfer_model(network, 5, input_size=16))


def test_a_normed_conv_answers_like_its_conv() -> None:
    conv = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2, bias=False, dtype=torch.float64)
    layer = copy.deepcopy(NormedConv(conv))
    for name in ("kernel_size", "stride", "padding", "groups", "in_channels", "out_channels", "bias"):
        assert getattr(layer, name) == getattr(conv, name)
    assert layer.weight is layer.conv.weight
    assert layer.norm.weight.dtype is torch.float64
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = layer.no_such_thing
