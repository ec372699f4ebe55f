"""What scores ask of a layer: the weights of its filters, and the norm right behind it."""

from __future__ import annotations

import pytest
import torch
from networks import NETWORKS
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.errors import DataError, LayerError
from basisprune.importance import score_filters
from basisprune.importance.layer_access import filter_weights, norms_behind


@pytest.mark.parametrize("name", NETWORKS)
def test_every_output_channel_has_its_weights(name):
    model, _ = NETWORKS[name]()
    for layer, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            weights = filter_weights(model, layer)
            assert len(weights) == module.out_channels
            assert weights.numel() == module.weight.numel()


def test_a_module_without_weights_has_no_filters():
    with pytest.raises(LayerError, match="0: ReLU has no weight to score"):
        filter_weights(nn.Sequential(nn.ReLU()), "0")


def test_the_norm_behind_is_found_through_pairs():
    model, images = NETWORKS["residual"]()
    split = decompose(model)
    found = norms_behind(split, ["conv1.scaling", "conv3.scaling"], [images])
    assert list(found) == ["conv1.scaling"]
    assert found["conv1.scaling"].weight is split.bn1.weight
    assert found["conv1.scaling"].bias is split.bn1.bias


def test_a_norm_over_another_axis_is_not_taken_for_the_filters_gate():
    model = nn.Sequential(nn.Conv1d(3, 8, 3, padding=1), nn.LayerNorm(8), nn.Flatten(), nn.Linear(64, 4)).double()
    images = torch.randn(2, 3, 8, dtype=torch.float64)
    assert norms_behind(model, ["0"], [images]) == {}
    labels = torch.zeros(2, dtype=torch.int64)
    assert len(score_filters(model, "taylor", ["0"], [(images, labels)]).layers["0"].values) == 8


def test_without_a_batch_no_norm_can_be_found():
    with pytest.raises(DataError, match="no batch came"):
        norms_behind(nn.Conv2d(3, 4, 1), [""], [])
