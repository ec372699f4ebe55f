"""Laws of counting: integers worked out by hand."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import NETWORKS
from tiny import tiny_model
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import basis_pairs
from basisprune.costs import layer_reports, measure, weight_uses
from basisprune.deploy.fold import fold
from basisprune.errors import ModelError
from basisprune.pruning import prune_basis
from basisprune.types import BasisPlan, InputSpec, LayerPlan

# name: layer, input shape, parameters, multiply-adds
BY_HAND = {
    "conv": (nn.Conv2d(3, 8, 3, padding=1), (3, 10, 10), 8 * 3 * 9 + 8, 100 * 8 * 3 * 9),
    "strided": (nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), (3, 9, 9), 8 * 27, 25 * 8 * 27),
    "grouped": (nn.Conv2d(8, 12, 3, groups=4, bias=False), (8, 10, 10), 12 * 2 * 9, 64 * 12 * 2 * 9),
    "depthwise": (nn.Conv2d(8, 8, 5, padding=2, groups=8), (8, 6, 6), 8 * 25 + 8, 36 * 8 * 25),
    "transposed": (nn.ConvTranspose2d(4, 6, 2, stride=2), (4, 5, 5), 4 * 6 * 4 + 6, 25 * 4 * 6 * 4),
    "conv1d": (nn.Conv1d(3, 8, 5), (3, 20), 8 * 15 + 8, 16 * 8 * 15),
    "conv3d": (nn.Conv3d(2, 6, 3), (2, 5, 8, 8), 6 * 54 + 6, 3 * 6 * 6 * 6 * 54),
    "linear": (nn.Linear(20, 7), (20,), 147, 140),
    # rank 8 of min(27, 8): U has 8 filters of 27, then s, V-bar (8 x 8) and the bias
    "pair": (decompose(nn.Conv2d(3, 8, 3, padding=1)), (3, 10, 10), 216 + 8 + 64 + 8, 100 * (8 * 27 + 64)),
    # rank 3 of min(3, 8)
    "wide pair": (decompose(nn.Conv2d(3, 8, 1)), (3, 4, 4), 9 + 3 + 24 + 8, 16 * (3 * 3 + 3 * 8)),
    # each of two groups: rank 4 of min(18, 4)
    "grouped pair": (
        decompose(nn.Conv2d(4, 8, 3, groups=2, bias=False)), (4, 5, 5),
        8 * 18 + 8 + 8 * 4, 9 * (8 * 18 + 8 * 4),
    ),
    "transposed pair": (
        decompose(nn.ConvTranspose2d(4, 6, 2, stride=2, bias=False)), (4, 5, 5),
        4 * 6 * 4 + 6 + 36, 25 * 4 * 6 * 4 + 100 * 36,
    ),
    "linear pair": (decompose(nn.Linear(20, 7), linear=True), (20,), 140 + 7 + 49 + 7, 140 + 49),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_parameters_and_multiply_adds_are_those_worked_out_by_hand(name):
    layer, shape, parameters, macs = BY_HAND[name]
    for model in (layer, nn.Sequential(layer), nn.Sequential(nn.Sequential(nn.Identity(), layer))):
        report = measure(model, shape)
        assert (report.parameters, report.macs) == (parameters, macs)
        (row,) = report.layers
        assert (row.parameters, row.macs) == (parameters, macs)
        assert report.input_shape == shape


def test_a_pruned_pair_costs_what_is_left():
    pair = prune_basis(BY_HAND["pair"][0], BasisPlan({"": LayerPlan((0, 2, 5), 8)}, 0.5))
    report = measure(pair, (3, 10, 10))
    assert (report.parameters, report.macs) == (3 * 27 + 3 + 24 + 8, 100 * (3 * 27 + 24))
    assert (report.layers[0].rank, report.layers[0].full_rank) == (3, 8)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_layers_add_up_and_the_model_is_not_changed(network, split):
    model, x = NETWORKS[network]()
    model = decompose(model, linear=True) if split else model
    model.train()
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    report = measure(model, tuple(x.shape[1:]))
    assert sum(layer.macs for layer in report.layers) == report.macs
    assert all(layer.macs > 0 for layer in report.layers)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    inside = sum(layer.parameters for layer in report.layers)
    assert inside + sum(2 * norm.num_features for norm in norms) == report.parameters
    assert report.paper_parameters == report.parameters + sum(2 * norm.num_features for norm in norms)
    assert report.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    if split:
        ranks = {layer.name: layer.rank for layer in report.layers if layer.rank is not None}
        assert ranks == {name: pair.rank for name, pair in basis_pairs(model).items()}
        assert all(layer.full_rank == layer.rank for layer in report.layers if layer.rank is not None)


class SharedBetweenBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(3, 3, 1, bias=False)
        self.first = nn.Sequential(conv, nn.ReLU())
        self.second = nn.Sequential(conv, nn.ReLU())

    def forward(self, x):
        return self.second(self.first(x))


def test_a_conv_shared_by_two_blocks_has_the_multiply_adds_of_both_uses():
    report = measure(SharedBetweenBlocks(), (3, 4, 4))
    assert [(layer.name, layer.macs) for layer in report.layers] == [("first.0", 2 * 16 * 9)]
    assert (report.macs, report.parameters) == (2 * 16 * 9, 9)


def test_only_what_requires_gradients_counts_as_trainable():
    model = decompose(nn.Conv2d(3, 8, 3))
    assert measure(model, 8).trainable == 8
    model.requires_grad_(False)
    assert measure(model, 8).trainable == 0


def test_the_input_size_is_a_side_two_sides_a_shape_or_what_the_model_says():
    conv, model = nn.Conv2d(3, 4, 1), tiny_model()
    assert measure(conv, 6).input_shape == (3, 6, 6)
    assert measure(conv, (6, 8)).input_shape == (3, 6, 8)
    assert measure(nn.Conv2d(5, 4, 1), (5, 6, 8)).input_shape == (5, 6, 8)
    assert measure(model).input_shape == (3, 16, 16)
    assert measure(model, 32).macs > measure(model).macs
    with pytest.raises(ModelError, match="Conv2d does not know its input size; pass input_size="):
        measure(conv)


def test_kinds_and_notes_tell_what_a_layer_is_and_why_it_is_left():
    model, _ = NETWORKS["depthwise"]()
    report = measure(decompose(model), (3, 12, 12))
    assert [layer.kind for layer in report.layers] == [
        "conv 3x3", "depthwise 3x3", "depthwise 3x3", "conv 1x1", "linear"
    ]  # fmt: skip
    assert [layer.note.partition(":")[0] for layer in report.layers] == ["", "depthwise", "depthwise", "", ""]
    model, _ = NETWORKS["transposed"]()
    assert [layer.kind for layer in measure(model, 12).layers] == [
        "conv 3x3", "transposed conv 4x4", "transposed grouped conv 3x3", "linear"
    ]  # fmt: skip


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_uses_of_weights_add_up_to_the_multiply_adds(network, linear):
    model, x = NETWORKS[network]()
    shape = tuple(x.shape[1:])
    for net in (model, decompose(model, linear=linear)):
        sizes = {name: value.numel() for name, value in net.named_parameters()}
        assert sum(sizes[name] * uses for name, uses in weight_uses(net, shape).items()) == measure(net, shape).macs


def test_reports_of_layers_have_their_channels_before_and_after():
    torch.manual_seed(0)
    unpruned = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.ReLU(), nn.Conv2d(8, 6, 3, bias=False))
    small = nn.Sequential(nn.Conv2d(3, 5, 3, bias=False), nn.ReLU(), nn.Conv2d(5, 6, 3, bias=False))
    for network in (unpruned, small):
        network.input_spec = InputSpec((8, 8), (0.5,) * 3, (0.5,) * 3)
    pruned = decompose(small)
    found = layer_reports(pruned, fold(pruned, torch.zeros(1, 3, 8, 8)), unpruned)
    assert [(each.channels, each.full_channels) for each in found] == [(5, 8), (6, 6)]
    assert [each.full_channels for each in layer_reports(pruned, small)] == [None, None]
