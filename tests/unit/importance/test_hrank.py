"""HRank: ranks by elimination, and where the feature maps are taken."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import NETWORKS
from torch import nn

from basisprune.errors import DataError
from basisprune.importance.hrank import matrix_ranks, mean_ranks


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9), st.integers(0, 2**31))
def test_ranks_equal_those_of_a_singular_value_decomposition(height, width, rank, seed):
    rank = min(rank, height, width)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(20, side, max(rank, 1)) for side in (height, width)]
    left, right = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    # Singular values of 1 and 0, rounded once: between those, the rank is a matter of the tolerance.
    maps = (torch.linalg.qr(left).Q @ torch.linalg.qr(right).Q.mT * (rank > 0)).float()
    assert torch.linalg.matrix_rank(maps).tolist() == [rank] * 20
    # Elimination may meet a small pivot, about once in 8,000 maps, and is then off by one.
    assert (matrix_ranks(maps.permute(1, 2, 0)) - rank).abs().sum() <= 1


def test_ranks_of_maps_with_dead_rows_and_columns():
    maps = torch.randn(200, 8, 8).relu() * (torch.rand(200, 8, 1) > 0.5) * (torch.rand(200, 1, 8) > 0.5)
    assert torch.equal(matrix_ranks(maps.permute(1, 2, 0)), torch.linalg.matrix_rank(maps))


def test_large_maps_have_ranks_too():
    maps = torch.randn(3, 70, 4) @ torch.randn(3, 4, 90)
    assert matrix_ranks(maps.permute(1, 2, 0)).tolist() == [4, 4, 4]


def test_the_map_is_taken_behind_norm_and_activation():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True)).eval()
    images = torch.randn(4, 3, 8, 8)
    expected = torch.linalg.matrix_rank(net(images).detach()).double().mean(0)
    assert torch.allclose(mean_ranks(net, ["0"], [images[:1], images[1:]])["0"], expected)


def test_layers_that_are_added_share_the_rank_behind_their_activation():
    model, images = NETWORKS["residual"](dtype=torch.float32)
    ranks = mean_ranks(model, ["down", "conv3"], [images])
    x = model.stem(images)
    x = torch.relu(x + model.bn2(model.conv2(torch.relu(model.bn1(model.conv1(x))))))
    expected = torch.linalg.matrix_rank(torch.relu(model.down(x) + model.conv3(x))).double().mean(0)
    assert torch.equal(ranks["down"], ranks["conv3"])
    assert torch.allclose(ranks["down"], expected)


def test_a_layer_without_activation_is_taken_as_it_is():
    model, images = NETWORKS["transposed"](dtype=torch.float32)
    expected = torch.linalg.matrix_rank(model[:6](images).detach()).double().mean(0)
    assert torch.allclose(mean_ranks(model, ["5"], [images])["5"], expected)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_conv_of_every_network_gets_its_ranks_and_the_model_stays_as_it_is(name):
    model, images = NETWORKS[name]()
    layers = [key for key, module in model.named_modules() if isinstance(module, nn.modules.conv._ConvNd | nn.Linear)]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ranks = mean_ranks(model.train(), layers, [images])
    assert ranks.keys() == set(layers)
    for key in layers:
        layer = model.get_submodule(key)
        assert len(ranks[key]) == (layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)
        assert ranks[key].min() >= 0
        assert ranks[key].max() > 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training
    assert not any(module._forward_hooks for module in model.modules())


def test_no_images_and_idle_layers_are_errors():
    model, _ = NETWORKS["plain"]()
    with pytest.raises(DataError, match="no batch came"):
        mean_ranks(model, ["0"], [])
    model, images = NETWORKS["residual"]()
    model.idle = nn.Conv2d(3, 3, 1)
    with pytest.raises(DataError, match="idle: never ran"):
        mean_ranks(model, ["conv1", "idle"], [images])
