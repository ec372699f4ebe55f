"""The paper's own counts: its Table 4, and the unpruned rows of its Tables 1 to 3.

The paper counts as Keras does: the running statistics of BN are parameters too, though not trainable ones.
Its ResNet-50 is Keras', which differs from timm's in two ways: every conv has a bias (which BN makes
superfluous), and the stride of a stage is in the first 1x1 conv of its first block instead of the 3x3 conv.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from torch import nn

from basisprune.basis.decompose import choose_layers, decompose
from basisprune.basis.layers import BasisPair
from basisprune.costs import measure
from basisprune.recipes import RECIPES
from basisprune.torchkit.surgery import find_layers
from basisprune.training.trainable import set_trainable
from basisprune.transfer.model import TransferModel, transfer_model


@dataclass(frozen=True)
class Printed:
    """What the paper prints: millions, thousands, and giga multiply-adds by image size."""

    parameters: str
    total: str
    trainable: str
    flops: dict[int, float]
    keras_biases: int = 0


PAPER = {
    "vgg16": Printed("14.74M", "16.55M", "17.77k", {128: 5.03, 112: 3.85}),
    "densenet121": Printed("7.05M", "8.40M", "104.04k", {128: 0.93, 112: 0.71}),
    "resnet50": Printed("23.61M", "28.78M", "86.86k", {128: 1.29, 112: 1.05}, keras_biases=26_560),
}


@pytest.fixture(scope="module")
def network() -> Callable[[str], TransferModel]:
    built: dict[str, TransferModel] = {}

    def build(name: str) -> TransferModel:
        if name not in built:
            built[name] = transfer_model(name, 10, input_size=128)
        return built[name]

    return build


def millions(count: int) -> str:
    return f"{count / 1e6:.2f}M"


def test_keras_biases_are_one_for_each_filter_of_resnet(network):
    convs = [conv for _, conv in find_layers(network("resnet50"), nn.Conv2d)]
    assert all(conv.bias is None for conv in convs)
    assert sum(conv.out_channels for conv in convs) == PAPER["resnet50"].keras_biases
    assert len(convs) == 53  # "because of the four convolutional shortcuts", Figure 2


@pytest.mark.parametrize("name", PAPER)
def test_unpruned_parameters_are_those_of_tables_1_to_3(name, network):
    report = measure(network(name))
    assert millions(report.paper_parameters + PAPER[name].keras_biases) == PAPER[name].parameters


@pytest.mark.parametrize("name", PAPER)
def test_totals_and_trainables_before_pruning_are_those_of_table_4(name, network):
    decomposed = decompose(network(name), linear=RECIPES["paper"].linear)
    set_trainable(decomposed)
    report = measure(decomposed)
    # Keras' biases stay in the BasisScalingConv, frozen: they add to the total alone.
    assert millions(report.paper_parameters + PAPER[name].keras_biases) == PAPER[name].total
    assert f"{report.trainable / 1e3:.2f}k" == PAPER[name].trainable
    pairs = dict(find_layers(decomposed, BasisPair))
    for linear in (RECIPES["paper"].linear, "auto"):  # these networks have no linear layers but the classifier
        choices = choose_layers(network(name), linear=linear)
        ranks = {choice.name: choice.rank for choice in choices if choice.left_alone is None}
        assert ranks == {layer: pair.rank for layer, pair in pairs.items()}


def with_strides_of_keras(model: TransferModel) -> TransferModel:
    """ResNet-50 with the stride of each stage in the 1x1 conv before the 3x3 conv."""
    model = copy.deepcopy(model)
    for block in model.backbone.modules():
        if hasattr(block, "conv2") and block.conv2.stride == (2, 2):
            block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)
    return model


def norm_and_bias_operations(model: nn.Module, size: int, *, biases_everywhere: bool) -> int:
    """One multiply-add for each number that a BN outputs, and one for each that a conv adds a bias to."""
    counts: list[int] = []

    def count(module: nn.Module, _args: object, output: object) -> None:
        if isinstance(module, nn.modules.batchnorm._BatchNorm) or biases_everywhere or module.bias is not None:
            counts.append(output.numel())

    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.modules.batchnorm._BatchNorm)]
    handles = [layer.register_forward_hook(count) for layer in layers]
    measure(model, size)
    for handle in handles:
        handle.remove()
    return sum(counts)


@pytest.mark.parametrize("size", [128, 112])
@pytest.mark.parametrize("name", PAPER)
def test_multiply_adds_are_those_of_tables_1_to_3(name, size, network):
    """Within 3 %: those of convs and the classifier, as `measure` counts, plus those of BN and biases."""
    keras = name == "resnet50"
    model = with_strides_of_keras(network(name)) if keras else network(name)
    products = measure(model, size).macs
    everything = products + norm_and_bias_operations(model, size, biases_everywhere=keras)
    assert everything / 1e9 == pytest.approx(PAPER[name].flops[size], rel=0.03)
    assert products / 1e9 == pytest.approx(PAPER[name].flops[size], rel=0.03)
