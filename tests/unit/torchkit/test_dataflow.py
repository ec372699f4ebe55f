"""Laws of the dataflow: who reads what in one run."""

from __future__ import annotations

import torch
from networks import NETWORKS
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import BasisPair
from basisprune.torchkit.dataflow import Dataflow, dataflow_of
from basisprune.torchkit.surgery import TORCH_CONVS, find_layers


def observe(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Dataflow:
    layers = dict(find_layers(model, (*TORCH_CONVS, nn.Linear, BasisPair), opaque=BasisPair))
    return dataflow_of(model, inputs, layers, dict(find_layers(model, nn.modules.batchnorm._BatchNorm)))


def test_a_run_knows_each_call_of_a_layer() -> None:
    model, inputs = NETWORKS["used_twice"]()
    run = observe(decompose(model), (inputs,))
    assert {name: len(calls) for name, calls in run.calls.items()} == {"stem": 1, "shared": 2, "head.2": 1}
    assert [call.output_shape for call in run.calls["shared"]] == [(2, 6, 12, 12)] * 2


def test_a_run_knows_who_reads_what() -> None:
    model, inputs = NETWORKS["residual"]()
    run = observe(model, (inputs,))
    assert run.calls["conv1"][0].readers == ["bn1"]
    assert run.calls["down"][0].readers == [None]
    assert run.sources["bn2"] == ["conv2"]
    assert run.is_passage("conv2", "bn2")


def test_what_the_model_returns_is_read() -> None:
    run = observe(nn.Conv2d(3, 4, 1), (torch.zeros(1, 3, 2, 2),))
    assert run.calls[""][0].readers == [None]


def test_a_run_leaves_no_hook_and_no_mode_behind() -> None:
    model, inputs = NETWORKS["plain"]()
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    observe(model, (inputs,))
    assert all(part.training and not part._forward_hooks and not part._forward_pre_hooks for part in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class ReadTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.conv(x)
        return self.norm(features) + features


def test_what_reads_a_layer_beside_its_norm_is_noticed() -> None:
    run = observe(ReadTwice(), (torch.zeros(1, 3, 2, 2),))
    assert (run.sources["norm"], run.calls["conv"][0].readers[-1]) == (["conv"], None)
    assert not run.is_passage("conv", "norm")
