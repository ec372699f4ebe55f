"""Laws of the statistics that the basis of the outputs is made from."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import NETWORKS
from torch import nn

from basisprune.errors import DataError, LayerError
from basisprune.torchkit.moments import output_statistics
from basisprune.torchkit.surgery import TORCH_CONVS, find_layers


def outputs_of(model: nn.Module, name: str, batches: list[torch.Tensor]) -> torch.Tensor:
    """All outputs of one layer as rows (positions, channels)."""
    caught = []
    layer = model.get_submodule(name)
    handle = layer.register_forward_hook(lambda _m, _a, output: caught.append(output.clone()))
    with torch.no_grad():
        for batch in batches:
            model(batch)
    handle.remove()
    axis = -1 if isinstance(layer, nn.Linear) else 1
    return torch.cat([output.movedim(axis, -1).flatten(0, -2) for output in caught])


@pytest.mark.parametrize("network", NETWORKS)
def test_means_and_covariances_are_those_of_all_outputs(network):
    model, x = NETWORKS[network]()
    batches = [x + 100, 3 * x - 1, x[:1]]
    layers = dict(find_layers(model, (*TORCH_CONVS, nn.Linear)))
    found = output_statistics(model, list(layers), batches)
    for name, layer in layers.items():
        rows = outputs_of(model, name, batches)
        groups = getattr(layer, "groups", 1)
        torch.testing.assert_close(found[name].mean, rows.mean(0), rtol=1e-10, atol=1e-10)
        per_group = rows.unflatten(1, (groups, -1)).unbind(1)
        truth = torch.stack([part.mT.cov(correction=0).reshape(2 * [part.shape[1]]) for part in per_group])
        torch.testing.assert_close(found[name].covariance, truth, rtol=1e-8, atol=1e-8)


def test_a_large_mean_does_not_swallow_the_variance():
    conv = nn.Conv2d(1, 2, 1)
    nn.init.constant_(conv.bias, 3000.0)
    batches = [torch.randn(64, 1, 8, 8) for _ in range(3)]
    found = output_statistics(conv, [""], batches)[""]
    truth = conv.weight.detach().flatten().double()
    torch.testing.assert_close(found.covariance[0], torch.outer(truth, truth), rtol=0.05, atol=1e-3)


def test_half_precision_is_summed_in_full():
    conv = nn.Conv2d(3, 4, 1)
    batches = [torch.randn(64, 3, 8, 8) + 2 for _ in range(3)]
    full = output_statistics(conv, [""], batches)[""]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = output_statistics(conv, [""], batches)[""]
    rows = torch.cat([conv.bfloat16()(batch.bfloat16()).detach().movedim(1, -1).flatten(0, -2) for batch in batches])
    truth = rows.double().mT.cov(correction=0)
    torch.testing.assert_close(found.covariance[0], truth, rtol=1e-4, atol=1e-5)  # what bfloat16 put out, exactly
    torch.testing.assert_close(found.covariance, full.covariance, rtol=0.05, atol=1e-2)
    whole = output_statistics(conv, [""], [batch.bfloat16() for batch in batches])[""]
    torch.testing.assert_close(whole.covariance[0], truth, rtol=1e-4, atol=1e-5)


def test_the_model_is_left_as_it_was():
    model, x = NETWORKS["plain"]()
    model.train()
    model[1].eval()
    modes = [module.training for module in model.modules()]
    before = copy.deepcopy(model.state_dict())
    output_statistics(model, ["0"], [x])
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not model[0]._forward_hooks


def test_hooks_and_modes_are_taken_back_after_an_error():
    model, x = NETWORKS["plain"]()
    model.train()
    with pytest.raises(RuntimeError):
        output_statistics(model, ["0"], [x[:, :1]])
    assert not model[0]._forward_hooks
    assert model.training


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.used(x)


def test_what_cannot_be_measured_is_refused_by_name():
    x = torch.randn(2, 3, 4, 4)
    with pytest.raises(DataError, match="no batch came"):
        output_statistics(Unused(), ["used"], [])
    with pytest.raises(LayerError, match=r"^unused: never ran"):
        output_statistics(Unused(), ["used", "unused"], [x])
    with pytest.raises(LayerError, match=r"^used: puts out NaN"):
        output_statistics(Unused(), ["used"], [x, x / 0])
