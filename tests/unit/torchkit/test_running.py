"""Laws of running a network: its mode comes back, and what are its images."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from networks import NETWORKS
from tiny import tiny_backbone, tiny_images, tiny_model, tiny_training
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import basis_pairs
from basisprune.deploy.fold import fold
from basisprune.errors import ConfigError, DataError, ModelError
from basisprune.torchkit.running import (
    copied,
    cut_graphs,
    has_computed_weights,
    hooked,
    images_of,
    mode,
    odd_kinds,
    placed,
    plain_tensors,
    refuse_odd,
    refuse_other_precisions,
    relative_difference,
    tensors_in,
)
from basisprune.training.loop import fit
from basisprune.transfer.model import transfer_model


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "torch.uint8 tensor"),
        ((torch.zeros(2, dtype=torch.int64), 1), "torch.int64 tensor"),
        ("images", "str"),
    ],
)
def test_batches_that_hold_no_prepared_images_are_refused(batch, kind):
    with pytest.raises(DataError, match=f"a {kind} given"):
        images_of(batch)


def test_images_are_the_batch_or_its_first_part():
    x = torch.randn(2, 3, 4, 4)
    assert images_of(x) is x
    assert images_of((x, torch.zeros(2))) is x
    assert images_of([x]) is x


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_of_every_module_comes_back_even_after_an_error(training):
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.ReLU())).train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    with mode(model, training=training):
        assert all(module.training == training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ZeroDivisionError), mode(model, training=training):
        _ = 1 / 0
    assert [module.training for module in model.modules()] == before


def test_hooks_go_even_after_an_error():
    layer = nn.ReLU()
    with pytest.raises(KeyError), hooked([layer.register_forward_hook(lambda *_: None)]):
        raise KeyError
    assert not layer._forward_hooks


def test_tensors_are_found_in_nested_values_in_their_order():
    a, b, c = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    assert [len(tensor) for tensor in tensors_in({"x": (a, [b, None]), "y": 3, "z": c})] == [1, 2, 3]


@pytest.mark.parametrize(
    ("expected", "given", "difference"),
    [
        ([1.0, -4.0], [1.0, -3.0], 0.25),
        ([0.0], [0.0], 0.0),
        ([0.0], [1e-9], math.inf),
        ([1.0], [math.nan], math.inf),
        ([math.inf], [math.inf], math.inf),
        ([1.0, 2.0], [1.0], math.inf),
        ([], [], 0.0),
    ],
)
def test_differences_are_told_in_relation_to_the_largest_value(expected, given, difference):
    assert relative_difference(torch.tensor(expected), torch.tensor(given)) == difference


def test_small_values_can_count_as_larger_ones():
    assert relative_difference(torch.tensor([0.0]), torch.tensor([0.5]), least=2.0) == 0.25


class Remembering(nn.Module):
    """Keeps what it computed, as attentions keep their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(3))
        self.table: dict[str, torch.Tensor] = {}

    def forward(self, x):
        self.last = self.bias * 2
        return x + self.table.setdefault("bias", self.bias * 2) + self.last


def test_tensors_that_modules_keep_lose_their_graphs_and_stay():
    model = Remembering()
    for _ in range(2):
        model(torch.zeros(3)).sum().backward()
        cut_graphs(model)
    assert copy.deepcopy(model).table["bias"].tolist() == model.last.tolist() == [2, 2, 2]
    assert model.bias.requires_grad


def test_images_are_placed_in_the_precision_of_the_network():
    images = torch.zeros(1, 3)
    assert placed(images, nn.Linear(3, 2).double()).dtype == torch.float64
    assert placed(images, nn.Linear(3, 2).bfloat16()).dtype == torch.bfloat16
    assert placed(images, nn.ReLU()) is images


class Traced(torch.Tensor):
    """A tensor with notes, as MONAI's MetaTensor: what is computed with it is one, too."""


def test_tensors_of_a_subclass_are_read_as_plain_ones():
    inputs, targets = torch.randn(2, 3).as_subclass(Traced), {"mask": torch.ones(2).as_subclass(Traced), "name": "a"}
    read = plain_tensors((inputs, [targets]))
    assert type(read[0]) is type(read[1][0]["mask"]) is torch.Tensor
    assert read[1][0]["name"] == "a"
    assert read[0].data_ptr() == inputs.data_ptr()
    assert type(images_of([inputs])) is torch.Tensor
    plain = (torch.zeros(1), "a")
    assert plain_tensors(plain) is plain


class Listing(nn.Module):
    """Keeps its outputs in a list that a part of it shares, as networks with deep supervision do."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(3, 3), [torch.rand(1)] * 2
        self.body.heads = self.heads

    def forward(self, x):
        self.heads[0] = self.body(x)
        self.pair = self.heads[0], {"half": [self.heads[0] / 2]}
        return self.heads[0]


def test_outputs_that_a_network_keeps_in_lists_and_tuples_do_not_hold_on_to_graphs():
    model = Listing()
    for _ in range(2):
        model(torch.zeros(2, 3)).sum().backward()
        cut_graphs(model)
    twin = copy.deepcopy(model)
    assert twin.heads is twin.body.heads
    assert torch.equal(twin.pair[1]["half"][0], model.heads[0] / 2)


def test_a_network_with_outputs_of_its_last_training_step_is_copied_without_their_graph():
    model = Listing()
    model(torch.zeros(2, 3)).sum().backward()
    twin = copied(model)
    assert twin.heads is twin.body.heads
    assert torch.equal(twin.heads[0], model.heads[0])
    assert twin.heads[0].grad_fn is None
    assert model.heads[0].grad_fn is not None


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
