"""Laws of what is trained."""

from __future__ import annotations

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import NETWORKS
from tiny import differing, tiny_decomposed, tiny_images, tiny_model, tiny_training
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import basis_pairs
from basisprune.errors import ModelError
from basisprune.training.config import TrainConfig
from basisprune.training.loop import fit
from basisprune.training.trainable import classes_of, make_optimizer, project_scales, set_trainable, weight_share

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(model: nn.Module | None = None, **settings) -> nn.Module:
    return fit(model or tiny_decomposed(), tiny_images(), None, tiny_training(**settings)).model


def test_norms_scales_and_classifier_are_trained_and_nothing_else():
    model = tiny_decomposed()
    chosen = set_trainable(model)
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert names == {
        *(f"backbone.{i}.scaling.scale" for i in (0, 3)),
        *(f"backbone.{i}.{part}" for i in (1, 4) for part in ("weight", "bias")),
        "classifier.weight",
        "classifier.bias",
    }
    assert {id(parameter) for parameter in chosen} == {id(model.get_parameter(name)) for name in names}
    statistics = {f"backbone.{i}.{s}" for i in (1, 4) for s in ("running_mean", "running_var", "num_batches_tracked")}
    assert differing(trained(model), model) == names | statistics


def test_frozen_scales_stay_as_they_are_and_all_else_is_trained():
    model = tiny_decomposed()
    next(iter(basis_pairs(model).values())).scaling.scale.data[0] = -0.1  # nor are they projected
    changed = differing(trained(model, train_scales=False), model)
    assert not any("scale" in name for name in changed)
    assert {"backbone.1.weight", "classifier.weight"} <= changed


def test_a_classifier_that_is_a_pair_has_frozen_scales_too():
    model = decompose(NETWORKS["plain"]()[0], linear=True)
    every, rest = set_trainable(model), set_trainable(model, scales=False)
    scales = [pair.scaling.scale for pair in basis_pairs(model).values()]
    assert len(every) == len(rest) + len(scales)
    assert not any(scale.requires_grad for scale in scales)
    assert model[-1].basis.weight.requires_grad


def test_fixed_statistics_stay_as_they_are():
    model = tiny_decomposed()
    changed = differing(trained(model, norm_statistics="fixed"), model)
    assert "backbone.1.weight" in changed
    assert not any("running" in name or "tracked" in name for name in changed)


@pytest.mark.parametrize("network", [name for name, table in NETWORKS.items() if len(table.shape) == 4])
def test_in_a_bare_network_the_last_linear_layer_is_the_classifier(network):
    model, _ = NETWORKS[network]()
    for linear in (False, True):
        decomposed = decompose(model, linear=linear)
        set_trainable(decomposed)
        assert classes_of(decomposed) == 4
        last = list(decomposed.named_parameters())[-1]
        assert last[1].requires_grad


def test_timms_classifier_is_found_and_a_network_without_one_is_refused():
    model = timm.create_model("resnet10t", num_classes=7)
    set_trainable(model)
    assert classes_of(model) == 7
    assert model.fc.weight.requires_grad
    assert not model.layer1[0].conv1.weight.requires_grad
    with pytest.raises(ModelError, match="has no linear classifier"):
        classes_of(nn.Sequential(nn.Conv2d(3, 4, 1)))


def test_a_classifier_of_several_layers_gives_the_classes_of_its_last():
    model = nn.Module()
    model.classifier = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 5))
    assert classes_of(model) == 5


def test_scales_never_become_negative():
    model = tiny_decomposed()
    for pair in basis_pairs(model).values():
        nn.init.constant_(pair.scaling.scale, 1e-3)
    result = trained(model, lr=0.5)
    scales = torch.cat([pair.scaling.scale for pair in basis_pairs(result).values()])
    assert scales.min() == 0
    assert scales.max() > 0


def test_projection_sets_negative_scales_to_zero_and_leaves_the_others():
    model = tiny_decomposed()
    scale = basis_pairs(model)["backbone.0"].scaling.scale
    scale.data[:3] = torch.tensor([-1.0, -1e-9, 2.0])
    project_scales(model)
    assert scale[:4].tolist() == pytest.approx([0, 0, 2, 0.8])
    project_scales(nn.ReLU())


# All weights


def test_with_all_every_parameter_is_trained_and_scales_stay_non_negative():
    model = tiny_decomposed()
    names = {name for name, _ in model.named_parameters()}
    for optimizer, lr in (("sgd", 0.05), ("adamw", 0.5)):
        result = trained(model, train="all", optimizer=optimizer, lr=lr)
        assert names <= differing(result, model)
        assert all(parameter.requires_grad for parameter in result.parameters())
        assert min(pair.scaling.scale.min() for pair in basis_pairs(result).values()) >= 0


def test_with_all_but_the_scales_these_stay_as_they_are():
    model = tiny_decomposed()
    scales = {f"{name}.scaling.scale" for name in basis_pairs(model)}
    names = {name for name, _ in model.named_parameters()}
    assert differing(trained(model, train="all", train_scales=False), model) & names == names - scales


def test_what_the_method_trains_comes_first_and_every_parameter_once():
    model = tiny_decomposed()
    method, every = set_trainable(model), set_trainable(model, train="all")
    assert [id(parameter) for parameter in every[: len(method)]] == [id(parameter) for parameter in method]
    assert sorted(map(id, every)) == sorted(map(id, model.parameters()))
    groups = make_optimizer(model, TrainConfig(train="all", optimizer="adamw")).param_groups
    assert [group["heavy"] for group in groups] == [False, *[True] * (len(groups) - 1)]
    assert sorted(id(parameter) for group in groups for parameter in group["params"]) == sorted(map(id, every))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_fused_optimizer_steps_as_the_plain_one_does(layout):
    images, config = torch.randn(4, 3, 16, 16), TrainConfig(train="all", optimizer="adamw", weight_decay=0.1)
    fused, plain = (tiny_decomposed().double().eval().to(memory_format=layout) for _ in range(2))
    plain.load_state_dict(fused.state_dict())
    for model, changes in ((fused, {}), (plain, {"fused": False})):
        optimizer = make_optimizer(model, config)
        for group in optimizer.param_groups:
            group |= changes
        for _ in range(3):
            optimizer.zero_grad()
            model(images.double()).square().sum().backward()
            optimizer.step()
    assert all(group["fused"] for group in make_optimizer(fused, config).param_groups)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], value, rtol=1e-9, atol=1e-12)


def test_nothing_is_written_between_the_numbers_of_a_weight_that_has_gaps():
    model = tiny_model()
    before = model.classifier.weight.detach().clone()
    memory = torch.zeros(len(before), 2 * before.shape[1])
    memory[:, ::2] = before
    model.classifier.weight = nn.Parameter(memory[:, ::2])
    optimizer = make_optimizer(model, TrainConfig(train="all", optimizer="adamw", lr=0.1))
    model.classifier.weight.sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.classifier.weight.detach(), before - 0.1, rtol=0, atol=1e-5)
    assert not memory[:, 1::2].any()


def test_a_device_without_a_fused_kernel_gets_the_plain_one():
    optimizer = make_optimizer(tiny_model().to("meta"), TrainConfig(optimizer="adamw"))
    assert not any(group["fused"] for group in optimizer.param_groups)


@given(size=st.floats(1e-2, 1e2), times=st.floats(0.1, 10), weight_lr=st.floats(0.01, 10))
@settings(deadline=None, max_examples=30)
def test_a_step_of_adam_changes_large_and_small_weights_by_the_same_part(size, times, weight_lr):
    config = TrainConfig(optimizer="adamw", weight_lr=weight_lr)
    weight = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    one, other = (weight_share(nn.Parameter(weight * factor), config) for factor in (size, size * times))
    assert other / one == pytest.approx(times, rel=0.12)  # each is rounded to two digits
    assert one == pytest.approx(weight_lr * size * weight.square().mean().sqrt().item(), rel=0.06)


def test_a_weight_of_zeros_learns_and_sgd_has_one_share_for_all():
    zeros = nn.Parameter(torch.zeros(8))
    assert weight_share(zeros, TrainConfig(optimizer="adamw", weight_lr=0.5)) == 0.5e-3
    assert weight_share(zeros, TrainConfig(optimizer="sgd", weight_lr=0.5)) == 0.5
