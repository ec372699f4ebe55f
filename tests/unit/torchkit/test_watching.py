"""Laws of watching a run: every call is noted, and the network is as before."""

from __future__ import annotations

import pytest
import torch
from networks import NETWORKS
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import BasisPair
from basisprune.errors import ModelError
from basisprune.torchkit.surgery import TORCH_CONVS, find_layers
from basisprune.torchkit.watching import (
    Dataflow,
    dataflow_of,
    example_input,
    is_map,
    parameters_of,
    roomy_run,
    upstream,
    watch_run,
)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_watching_leaves_the_network_and_the_random_state_alone(name, train):
    model, x = NETWORKS[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random = torch.random.get_rng_state()
    run = watch_run(model, x, train=train)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random)
    assert not any(part._forward_hooks or part._forward_pre_hooks or part.training for part in model.modules())
    assert run.calls[0].module is model
    assert run.output_shape == run.calls[0].output_shape == tuple(model(x).shape)


def test_calls_know_their_callers_and_shapes():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU(), nn.Flatten()))
    run = watch_run(model, torch.zeros(2, 3, 5, 5))
    calls = {call.name: call for call in run.calls}
    assert [caller.name for caller in calls["1.0"].callers] == ["", "1"]
    assert (calls["0"].input_shape, calls["0"].output_shape) == ((2, 3, 5, 5), (2, 4, 3, 3))
    assert [name for name, call in calls.items() if call.is_leaf] == ["0", "1.0", "1.1"]
    assert [name for name, call in calls.items() if call.has_parameters] == ["", "0"]


def test_a_module_that_runs_twice_has_two_calls():
    model, x = NETWORKS["used_twice"]()
    assert sum(call.name == "shared" for call in watch_run(model, x).calls) == 2


def test_the_graph_tells_which_parameters_reach_the_output():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1))
    run = watch_run(model, torch.zeros(1, 3, 2, 2))
    assert parameters_of(upstream(run.output_nodes)) == {id(parameter) for parameter in model.parameters()}
    first = next(call for call in run.calls if call.name == "0")
    behind = parameters_of(upstream(run.output_nodes, without=first.nodes))
    assert behind == {id(parameter) for parameter in model[1].parameters()}


def test_a_network_that_does_not_run_is_refused_with_the_shape():
    with pytest.raises(ModelError, match=r"Conv2d does not run on an input of shape \(1, 2, 4, 4\)"):
        watch_run(nn.Conv2d(3, 4, 1), torch.zeros(1, 2, 4, 4))


def test_small_images_are_made_roomy_where_the_network_takes_them():
    assert roomy_run(nn.Conv2d(3, 4, 1), torch.zeros(2, 3, 8, 8)).output_shape == (2, 4, 128, 128)
    fixed = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    assert roomy_run(fixed, torch.zeros(2, 3, 8, 8)).output_shape == (2, 4)


def test_an_example_has_the_dtype_of_the_network_and_is_always_the_same():
    model = nn.Conv2d(3, 4, 1).double()
    example = example_input(model, (3, 4, 5))
    assert (example.shape, example.dtype) == ((2, 3, 4, 5), torch.float64)
    assert torch.equal(example, example_input(model, (3, 4, 5)))


def test_a_map_has_channels_at_more_than_one_position():
    assert [is_map(shape) for shape in ((2, 64, 7, 7), (2, 49, 64), (2, 64, 1, 1), (2, 64))] == [
        True,
        True,
        False,
        False,
    ]


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
