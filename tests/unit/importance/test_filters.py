"""Scores of filters: each method against its definition."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from networks import NETWORKS
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.errors import ConfigError, DataError
from basisprune.importance import score_filters
from basisprune.importance.filters import FILTER_SCORES, FilterScore

METHODS = ["l1", "taylor", "taylor_behind", "loss", "hrank", "bn_scale", "random"]


def convs(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, nn.modules.conv._ConvNd)]


def labelled(images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return images, torch.arange(len(images)) % 4


def test_l1_is_the_sum_of_absolute_weights():
    model, _ = NETWORKS["plain"]()
    scores = score_filters(model, "l1", ["0", "3"]).layers
    assert scores["3"].values == pytest.approx(model[3].weight.abs().sum((1, 2, 3)).tolist())


def test_l1_of_a_transposed_grouped_conv_belongs_to_its_output_channels():
    model, _ = NETWORKS["transposed"]()
    scores = score_filters(model, "l1", ["5"]).layers["5"].values
    expected = model[5].weight.view(2, 3, 2, 3, 3).abs().sum((1, 3, 4)).flatten()
    assert scores == pytest.approx(expected.tolist())


def test_l1_of_a_pair_is_that_of_its_second_half_with_the_scales():
    model, _ = NETWORKS["plain"]()
    split = decompose(model, scale_init=0.5)
    scores = score_filters(split, "l1", ["3.scaling"]).layers["3.scaling"].values
    assert scores == pytest.approx((0.5 * split[3].scaling.weight).abs().sum((1, 2, 3)).tolist())


def test_taylor_uses_the_gate_behind_the_norm():
    model, images = NETWORKS["plain"]()
    batches = [labelled(images), labelled(images + 1)]
    norm, total = model[4], 0
    for batch, labels in batches:
        gamma, beta = torch.autograd.grad(F.cross_entropy(model(batch), labels), [norm.weight, norm.bias])
        total = total + (gamma * norm.weight + beta * norm.bias).square()
    values = score_filters(model, "taylor", ["3"], batches).layers["3"].values
    assert values == pytest.approx((total / 2).tolist())


def test_taylor_uses_the_layers_own_weights_where_no_norm_is_right_behind():
    model, images = NETWORKS["vgg_like"]()
    images, labels = labelled(images)
    conv = model[3]
    weight, bias = torch.autograd.grad(F.cross_entropy(model(images), labels), [conv.weight, conv.bias])
    expected = ((weight * conv.weight).sum((1, 2, 3)) + bias * conv.bias).square()
    values = score_filters(model, "taylor", ["3"], [(images, labels)]).layers["3"].values
    assert values == pytest.approx(expected.tolist())


def test_bn_scale_is_the_absolute_gamma():
    model, images = NETWORKS["residual"]()
    scores = score_filters(model, "bn_scale", ["conv1", "conv3"], [labelled(images)]).layers
    assert scores["conv1"].values == pytest.approx(model.bn1.weight.abs().tolist())
    assert scores["conv3"].values == pytest.approx(model.conv3.weight.abs().sum((1, 2, 3)).tolist())


def test_random_is_repeatable_and_follows_its_seed():
    model, _ = NETWORKS["plain"]()
    one, same, other = (score_filters(model, "random", ["0"], seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one != other


@pytest.mark.parametrize("method", FILTER_SCORES)
@pytest.mark.parametrize("name", NETWORKS)
def test_every_method_scores_every_filter_and_leaves_the_model_alone(name, method):
    model, images = NETWORKS[name]()
    model.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    scores = score_filters(model, method, convs(model), [labelled(images)])
    assert scores.method == method
    assert list(scores.layers) == convs(model)
    assert any(sum(given.values) > 0 for given in scores.layers.values())
    for layer, given in scores.layers.items():
        assert len(given.values) == model.get_submodule(layer).out_channels
        assert all(value >= 0 for value in given.values)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_an_unknown_method_is_answered_with_the_nearest():
    model, _ = NETWORKS["plain"]()
    with pytest.raises(ConfigError, match="Did you mean 'taylor'"):
        score_filters(model, "tailor", ["0"])


@pytest.mark.parametrize("method", [name for name, score in FILTER_SCORES.items() if score.needs_images])
def test_methods_that_need_images_say_so(method):
    model, _ = NETWORKS["plain"]()
    with pytest.raises(DataError, match="needs images"):
        score_filters(model, method, ["0"])
    with pytest.raises(DataError, match="no batch came"):
        score_filters(model, method, ["0"], [])


@pytest.mark.parametrize("method", FILTER_SCORES)
def test_no_layers_have_no_scores(method):
    assert score_filters(nn.Conv2d(3, 4, 1), method, [], []).layers == {}


def test_a_score_that_is_registered_is_a_method(monkeypatch):
    def first(model, layers, batches, seed):
        return {name: torch.arange(len(model.get_submodule(name).weight)) + seed for name in layers}

    monkeypatch.setitem(FILTER_SCORES, "order", FilterScore(first))
    model, _ = NETWORKS["plain"]()
    scores = score_filters(model, "order", ["0"], seed=2)
    assert (scores.method, scores.layers["0"].values[:3]) == ("order", (2.0, 3.0, 4.0))
    with pytest.raises(
        ConfigError, match=r"taylor_behind, loss, hrank, bn_scale, random, order\. Did you mean 'order'"
    ):
        score_filters(model, "oder", ["0"])
