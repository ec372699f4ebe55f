"""Laws of the forms of a layer: each computes what the layer and its norm do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.deploy.forms import affine, drop_statistics, merged, plain_layers, plain_pair, subsampled

LAYERS = {
    "conv": (nn.Conv2d(6, 8, 3, stride=2), nn.BatchNorm2d(8), (2, 6, 9, 9)),
    "grouped": (nn.Conv2d(6, 8, 3, groups=2, bias=False), nn.BatchNorm2d(8, affine=False), (2, 6, 9, 9)),
    "transposed": (nn.ConvTranspose2d(6, 8, 3, groups=2), nn.BatchNorm2d(8), (2, 6, 9, 9)),
    "one dimension": (nn.Conv1d(6, 8, 3), nn.BatchNorm1d(8), (2, 6, 9)),
    "linear": (nn.Linear(6, 8), nn.BatchNorm1d(8), (2, 6)),
}


def trained(norm: Any) -> Any:
    generator = torch.Generator().manual_seed(0)
    norm.running_mean.normal_(generator=generator)
    norm.running_var.uniform_(0.5, 2, generator=generator)
    return norm.double().eval()


@pytest.mark.parametrize("name", LAYERS)
def test_every_form_computes_what_the_layer_and_its_norm_do(name: str) -> None:
    layer, norm, shape = LAYERS[name]
    norm, pair = trained(norm), decompose(layer.double(), scale_init=1.0, linear=True)
    images = torch.randn(shape, dtype=torch.float64)
    expected = norm(layer(images))
    for form in (merged(layer, norm), merged(pair, norm), plain_pair(pair, norm)):
        torch.testing.assert_close(form(images), expected)
        assert all(type(part).__module__.startswith("torch.") for part in plain_layers(form).values())


def test_without_a_norm_a_layer_is_its_own_form() -> None:
    conv = nn.Conv2d(3, 4, 1)
    assert merged(conv, None) is conv


def test_a_norm_without_statistics_cannot_go_into_a_layer() -> None:
    assert affine(nn.BatchNorm2d(4, track_running_stats=False)) is None
    assert affine(type("Odd", (nn.BatchNorm2d,), {})(4)) is None


def test_a_norm_without_its_statistics_computes_the_same() -> None:
    norm = trained(nn.BatchNorm2d(4))
    images = torch.randn(2, 4, 3, 3, dtype=torch.float64)
    expected = norm(images)
    drop_statistics(norm)
    torch.testing.assert_close(norm(images), expected)
    assert set(norm.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("side", [7, 8])
@pytest.mark.parametrize("stride", [2, (1, 3)])
def test_choosing_pixels_first_equals_a_strided_pointwise_conv(side: int, stride: Any) -> None:
    conv = nn.Conv2d(3, 6, 1, stride=stride).double()
    other: Any = subsampled(conv)
    images = torch.randn(2, 3, side, side, dtype=torch.float64)
    torch.testing.assert_close(other(images), conv(images))
    assert other.stride == conv.stride


@pytest.mark.parametrize("conv", [nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 3, 2), nn.Conv2d(3, 6, 1, 2, padding=1)])
def test_other_convs_need_all_their_pixels(conv: nn.Module) -> None:
    assert subsampled(conv) is None
