"""Laws of networks whose weights are computed by the hooks of torch's old weight_norm and spectral_norm."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import NETWORKS
from tiny import tiny_backbone, tiny_images, tiny_model, tiny_training
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import basis_pairs
from basisprune.deploy.fold import fold
from basisprune.torchkit.weight_norms import copied, has_computed_weights
from basisprune.training.loop import fit
from basisprune.transfer.model import transfer_model

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
NORMS = {"weight_norm": nn.utils.weight_norm, "spectral_norm": nn.utils.spectral_norm}


def normed(model: nn.Module, norm: str = "weight_norm") -> nn.Module:
    for layer in list(model.modules()):
        if isinstance(layer, nn.Linear | nn.modules.conv._ConvNd):
            NORMS[norm](layer)
            nn.init.uniform_(layer.weight_g if norm == "weight_norm" else layer.weight_orig, 0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", ["plain", "depthwise", "transposed", "one_dimensional"])
def test_a_network_with_old_hooks_is_decomposed_exactly_and_stays_as_it_is(name, norm):
    model, images = NETWORKS[name]()
    model = normed(model, norm).double()
    expected = model(images)
    state = copy.deepcopy(model.state_dict())
    pairs = decompose(model, scale_init=1.0)
    assert basis_pairs(pairs)
    assert not has_computed_weights(pairs)
    torch.testing.assert_close(pairs(images), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(fold(pairs, images)(images), expected, rtol=1e-8, atol=1e-8)
    assert has_computed_weights(model)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_a_copy_has_plain_weights_that_are_trained_where_they_were():
    model, images = NETWORKS["plain"]()
    model = normed(model)
    model[0].requires_grad_(False)
    twin = copied(model)
    torch.testing.assert_close(twin(images), model(images))
    assert isinstance(twin[0].weight, nn.Parameter)
    assert (twin[0].weight.requires_grad, twin[3].weight.requires_grad) == (False, True)
    assert not any("weight_" in name for name, _ in twin.named_parameters())


def test_backbones_with_old_hooks_are_taken_and_trained():
    model = transfer_model(normed(tiny_backbone()), 3, input_size=16)
    assert not has_computed_weights(model)
    dense = normed(tiny_model())
    assert fit(dense, tiny_images(), None, tiny_training()).history
