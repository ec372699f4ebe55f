from __future__ import annotations

import copy

import pytest
import timm
import torch
from classifiers import IMAGES, normed
from networks import NETWORKS
from torch import nn

from basisprune.transfer.model import transfer_model
from basisprune.transfer.norms import NormedConv


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
