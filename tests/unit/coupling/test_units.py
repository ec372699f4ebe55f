"""Laws of where units lie: cutting a unit's channels cuts what is listed as read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from networks import NETWORKS
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.coupling import trace_coupling, unit_inputs, unit_outputs
from basisprune.errors import PlanError
from basisprune.torchkit.surgery import TORCH_CONVS, is_depthwise


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_what_a_layer_reads_of_a_unit_is_what_the_unit_makes(network, split):
    """With a unit's filters at zero, the channels listed are constant where layers read them, and no others change."""
    model, x = NETWORKS[network]()
    model = decompose(model, scale_init=1.0) if split else model
    coupling = trace_coupling(model, x)
    readers = unit_inputs(model, coupling)
    assert readers

    def reads() -> dict[str, torch.Tensor]:
        found = {}
        handles = [
            model.get_submodule(name).register_forward_pre_hook(
                lambda layer, args, name=name: found.__setitem__(
                    name, args[0].movedim(-1 if isinstance(layer, nn.Linear) else 1, 0).flatten(1)
                )
            )
            for name in readers
        ]
        with torch.no_grad():
            model(x)
        for handle in handles:
            handle.remove()
        return found

    before = reads()
    for group in coupling.groups:
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        for name in group.layers:  # the last unit outputs nothing but what norms add
            layer = model.get_submodule(name)
            outputs = torch.from_numpy(unit_outputs(model, group, name)[-1])
            weight = layer.weight.data
            if getattr(layer, "transposed", False):
                weight.view(layer.groups, -1, *weight.shape[1:])[:, :, outputs % weight.shape[1]] = 0
            else:
                weight[outputs] = 0
            if layer.bias is not None:
                layer.bias.data[outputs] = 0
        after = reads()
        for name, parts in readers.items():
            listed = parts[group.name][-1] if group.name in parts else np.array([], dtype=int)
            pooled = before[name].shape[1] == len(x)
            for channel in listed:
                assert pooled or after[name][channel].std() < 1e-12
            if parts.keys() == {group.name} and group.layers[0].startswith(min(readers)):
                others = [place for place in range(len(before[name])) if place not in listed]
                assert others or group.size == 1
        model.load_state_dict(saved)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_unit_has_equally_many_channels_and_none_twice(network):
    model, x = NETWORKS[network]()
    coupling = trace_coupling(model, x)
    for name, parts in unit_inputs(model, coupling).items():
        layer = model.get_submodule(name)
        read = np.concatenate([index.ravel() for index in parts.values()])
        assert len(set(read.tolist())) == len(read)
        width = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
        assert read.max() < width
        assert not (isinstance(layer, TORCH_CONVS) and is_depthwise(layer))


def test_a_flattened_map_is_read_at_every_position():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 2))
    found = unit_inputs(net, trace_coupling(net, torch.zeros(1, 3, 8, 8)))
    assert found["2"]["0"].tolist() == [list(range(36 * unit, 36 * (unit + 1))) for unit in range(4)]


def test_a_layer_whose_filters_cannot_be_told_apart_is_refused_by_name():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
    group = trace_coupling(net, torch.zeros(1, 3, 8, 8))["0"]
    with pytest.raises(PlanError, match=r"^2: its filters cannot be distinguished"):
        unit_outputs(net, group, "2")


def test_a_coupling_of_another_network_is_refused():
    small, large = (nn.Sequential(nn.Conv2d(3, width, 3), nn.Conv2d(width, 2, 1)) for width in (4, 8))
    coupling = trace_coupling(large, torch.zeros(1, 3, 8, 8))
    for other in (small, nn.Sequential(large[0]), decompose(large)):
        with pytest.raises(PlanError, match="the coupling is that of another network; call trace_coupling on this one"):
            unit_inputs(other, coupling)
