"""Laws of the statistics that the basis of the outputs is made from."""

from __future__ import annotations

import copy

import pytest
import torch
from networks import NETWORKS
from torch import nn
from torch.nn import functional as F

from basisprune.errors import DataError, LayerError, ModelError, TrainingError
from basisprune.torchkit.moments import input_statistics, loss_statistics, output_statistics
from basisprune.torchkit.surgery import TORCH_CONVS, find_layers


def gradient_moments(model, names, batches, **options):
    """The metric of the loss for each layer named."""
    return {name: found.metric for name, found in loss_statistics(model, names, batches, **options).items()}


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
    torch.testing.assert_close(found.covariance[0], truth, rtol=1e-4, atol=1e-5)  # what bfloat16 output, exactly
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
    with pytest.raises(LayerError, match=r"^used: outputs NaN"):
        output_statistics(Unused(), ["used"], [x, x / 0])


# The metric of the loss


def labelled_batches(x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, torch.tensor([0, 3])), (3 * x - 1, torch.tensor([2, 1])), (x[:1], torch.tensor([1]))]


def gradients_of(model: nn.Module, name: str, batches) -> torch.Tensor:
    """The gradients of every image's own loss at one layer's output, as rows (positions, channels)."""
    caught = []
    layer = model.get_submodule(name)

    def note(_module, _args, output):
        output.register_hook(lambda gradient: caught.append(gradient))

    handle = layer.register_forward_hook(note)
    for images, labels in batches:
        for image, label in zip(images, labels, strict=True):
            F.cross_entropy(model(image[None].clone().requires_grad_(True)), label[None]).backward()
    handle.remove()
    axis = -1 if isinstance(layer, nn.Linear) else 1
    return torch.cat([gradient.movedim(axis, -1).flatten(0, -2) for gradient in caught])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
def test_the_metric_sums_over_positions_and_averages_over_images(network, frozen):
    model, x = NETWORKS[network]()
    batches = labelled_batches(x)
    layers = dict(find_layers(model, (*TORCH_CONVS, nn.Linear)))
    model.requires_grad_(not frozen)
    with torch.no_grad():  # whatever the caller has switched off
        found = loss_statistics(model.train(), list(layers), batches)
        alone = gradient_moments(model, list(layers), batches)
    assert model.training
    assert all(value.grad is None and value.requires_grad is not frozen for value in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())
    outputs = output_statistics(model.eval(), list(layers), batches)
    for name, layer in layers.items():
        groups = getattr(layer, "groups", 1)
        rows = gradients_of(model, name, batches)
        truth = torch.stack([part.mT @ part / 5 for part in rows.unflatten(1, (groups, -1)).unbind(1)])
        torch.testing.assert_close(found[name].metric, truth)
        torch.testing.assert_close(found[name].mean, outputs[name].mean)
        torch.testing.assert_close(found[name].covariance, outputs[name].covariance)
        assert torch.equal(alone[name], found[name].metric)


def test_the_gradient_may_be_taken_at_another_layer():
    model, x = NETWORKS["plain"]()
    found = loss_statistics(model, ["0"], labelled_batches(x), gradients_at=["3"])["0"]
    assert found.mean.shape == (8,)
    assert torch.equal(found.metric, gradient_moments(model, ["3"], labelled_batches(x))["3"])


def test_it_works_under_the_callers_inference_mode():
    model, x = NETWORKS["vgg_like"]()  # whose activations work in place
    expected = gradient_moments(model, ["0"], labelled_batches(x))["0"]
    with torch.inference_mode():
        found = gradient_moments(model, ["0"], labelled_batches(x.clone()))["0"]
    assert torch.equal(found, expected)


def test_a_layer_that_the_loss_does_not_read_has_a_metric_of_zero():
    model = Unused()
    model.forward = lambda x: (model.used(x), model.unused(x))[0].mean((2, 3))
    batches = [(torch.randn(2, 3, 4, 4), torch.tensor([0, 1]))]
    found = gradient_moments(model, ["used", "unused"], batches)
    assert found["used"].any()
    assert not found["unused"].any()


class CutOff(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        with torch.no_grad():
            x = self.early(x)
        return self.late(x).mean((2, 3))


def test_metrics_that_cannot_be_measured_are_refused_by_name():
    x, labels = torch.randn(2, 3, 4, 4), torch.tensor([0, 1])
    model = nn.Sequential(Unused(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(DataError, match="no batch came"):
        gradient_moments(model, ["0.used"], [])
    with pytest.raises(DataError, match=r"\(images, labels\) are needed, Tensor given"):
        gradient_moments(model, ["0.used"], [x])
    with pytest.raises(LayerError, match=r"^0\.unused: never ran"):
        gradient_moments(model, ["0.used", "0.unused"], [(x, labels)])
    with pytest.raises(TrainingError, match="the loss of batch 1 is nan"):
        gradient_moments(model, ["0.used"], [(x, labels), (x * torch.nan, labels)])
    with pytest.raises(LayerError, match=r"^0\.used: the gradient of the loss there is NaN"):
        gradient_moments(model, ["0.used"], [(x, labels)], loss=lambda out, _: (out - out).sum().sqrt())
    with pytest.raises(LayerError, match=r"^early: no gradient can reach it"):
        gradient_moments(CutOff(), ["early", "late"], [(x, labels)])
    with pytest.raises(ModelError, match="CutOff lets no gradient through"):
        gradient_moments(CutOff().requires_grad_(False), ["early"], [(x, labels)])
    assert not any(module._forward_hooks for module in model.modules())


def test_images_that_two_processes_saw_count_once_when_correlations_are_judged():
    class Copies(list):
        copies = 2

    torch.manual_seed(0)
    layer, images = nn.Sequential(nn.Linear(3, 2)), torch.randn(8, 3)
    images[:, 1] += images[:, 0]
    once, half = (input_statistics(layer, ["0"], kind([images]))["0"].covariance for kind in (list, Copies))
    twice = input_statistics(layer, ["0"], Copies([images, images]))["0"].covariance
    assert 0 < half[0, 0, 1] < once[0, 0, 1]
    torch.testing.assert_close(twice, once)
