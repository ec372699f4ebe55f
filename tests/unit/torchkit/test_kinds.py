"""Laws of networks that are not what they seem: each kind is refused by its name."""

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
from basisprune.errors import ConfigError, ModelError
from basisprune.torchkit.kinds import copied, has_computed_weights, odd_kinds, refuse_odd, refuse_other_precisions
from basisprune.training.loop import fit
from basisprune.transfer.model import transfer_model

ODD = {
    "compiled": lambda: torch.compile(tiny_backbone()),
    "scripted": lambda: torch.jit.script(tiny_backbone()),
    "lazy": lambda: nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU()),
    "meta": lambda: tiny_backbone().to("meta"),
}


@pytest.mark.filterwarnings("ignore")  # torch's own, about scripting and lazy layers
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_network_is_refused_by_its_kind(kind):
    network = ODD[kind]()
    assert kind in odd_kinds(network)[0]
    for work in (lambda: refuse_odd(network), lambda: transfer_model(network, 3, input_size=16)):
        with pytest.raises(ModelError, match=f"{kind}.* given; pass the plain network"):
            work()


def test_a_plain_network_has_no_odd_kind():
    assert odd_kinds(tiny_model()) == []
    refuse_odd(tiny_model())


def test_training_refuses_a_precision_in_which_nothing_can_be_trained():
    model = tiny_model()
    model.classifier.weight = nn.Parameter(model.classifier.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ModelError, match=r"torch\.float8_e4m3fn, which cannot be trained; pass model\.float"):
        fit(model, tiny_images(), None, tiny_training())


def test_training_without_gradients_is_refused():
    with torch.no_grad(), pytest.raises(ConfigError, match=r"call it outside of torch\.no_grad"):
        fit(tiny_model(), tiny_images(), None, tiny_training())


@pytest.mark.filterwarnings("ignore")  # torch's own, about lazy layers
def test_a_network_with_lazy_layers_is_not_filled_by_folding_it():
    network = ODD["lazy"]()
    with pytest.raises(ModelError, match=r"^fold: a network with lazy layers .* run it once first"):
        fold(network, torch.zeros(2, 3, 16, 16))
    assert "lazy" in odd_kinds(network)[0]


def test_other_precisions_are_refused_where_float32_is_delivered():
    refuse_other_precisions(nn.Linear(2, 2), "compress")
    with pytest.raises(ModelError, match=r"^compress: the network has weights of torch\.float64; float32 is needed"):
        refuse_other_precisions(nn.Linear(2, 2).double(), "compress")


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
