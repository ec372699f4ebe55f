"""Laws of running a network: its mode comes back, and what are its images."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from basisprune.errors import DataError
from basisprune.torchkit.kinds import copied
from basisprune.torchkit.running import (
    cut_graphs,
    hooked,
    images_of,
    mode,
    placed,
    plain_tensors,
    relative_difference,
    tensors_in,
)


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "torch.uint8 tensor"),
        ((torch.zeros(2, dtype=torch.int64), 1), "torch.int64 tensor"),
        ("images", "str"),
        ([], "list"),
        ({"image": torch.zeros(2)}, "dict"),
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
