from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from classifiers import IMAGES, Tiny, normed, refused, tv, weights_with_statistics
from networks import NETWORKS
from torch import nn

from basisprune.errors import ConfigError
from basisprune.transfer.checkpoints import read_checkpoint
from basisprune.transfer.model import GlobalPool, TransferModel, transfer_model
from basisprune.types import InputSpec

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.mark.parametrize("source", ["timm", "torchvision"])
def test_vgg16_counts_as_in_keras(source: str) -> None:
    backbone = "vgg16" if source == "timm" else tv("vgg16", init_weights=False)
    model = transfer_model(backbone, 10, input_size=32)
    assert len(normed(model)) == 13
    assert weights_with_statistics(model) == 14_736_714


@pytest.mark.parametrize("source", ["timm", "torchvision"])
@pytest.mark.parametrize(("name", "expected"), [("densenet121", 7_037_504 + 10_250), ("resnet50", 23_561_152 + 20_490)])
def test_networks_with_norms_count_as_in_keras(source: str, name: str, expected: int) -> None:
    model = transfer_model(name if source == "timm" else tv(name), 10, input_size=32)
    assert not normed(model)
    assert weights_with_statistics(model) == expected


@pytest.mark.parametrize("name", IMAGES)
def test_the_given_network_stays_as_it_was(name: str) -> None:
    network, x = NETWORKS[name]()
    network.train()
    next(network.parameters()).requires_grad_(False)
    before = copy.deepcopy(network.state_dict())
    model = transfer_model(network, 5, input_size=12)
    model.train()(x)
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert network.training
    assert not next(network.parameters()).requires_grad
    assert not any(module._forward_hooks for module in (*network.modules(), *model.modules()))


def test_the_result_is_in_eval_mode_trainable_and_of_the_networks_dtype() -> None:
    network, x = NETWORKS["residual"]()
    model = transfer_model(network.requires_grad_(False), 5, dropout=0.3, input_size=12)
    assert isinstance(model, TransferModel)
    assert [name for name, _ in model.named_children()] == ["backbone", "pool", "dropout", "classifier"]
    assert not any(module.training for module in model.modules())
    assert all(p.requires_grad and p.dtype is torch.float64 for p in model.parameters())
    assert model.dropout.p == 0.3
    assert model(x).shape == (2, 5)
    assert torch.equal(model(x), model.classifier(model.forward_features(x)))


def test_the_classifier_starts_small() -> None:
    torch.manual_seed(0)
    classifier = transfer_model(tv("resnet18"), 100, input_size=32).classifier
    assert not classifier.bias.any()
    assert classifier.weight.std().item() == pytest.approx(0.01, rel=0.05)


def test_building_draws_only_the_classifiers_weights() -> None:
    network, _ = NETWORKS["plain"]()
    torch.manual_seed(0)
    model = transfer_model(network, 5, input_size=12)
    torch.manual_seed(0)
    nn.Linear(6, 5, dtype=torch.float64)
    assert torch.equal(model.classifier.weight, nn.init.normal_(torch.empty(5, 6, dtype=torch.float64), std=0.01))


@pytest.mark.parametrize("name", ["vgg_like", "residual", "used_twice"])
def test_the_model_can_be_traced(name: str) -> None:
    network, x = NETWORKS[name](dtype=torch.float32)
    model = transfer_model(network, 5, input_size=12)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


@pytest.mark.parametrize(
    ("layout", "shape"), [("NCHW", (2, 6, 3, 5)), ("NHWC", (2, 3, 5, 6)), ("NLC", (2, 15, 6)), ("NC", (2, 6))]
)
def test_every_layout_is_pooled_to_vectors(layout: Any, shape: tuple[int, ...]) -> None:
    features = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    places = [axis for axis in range(1, len(shape)) if layout[axis] != "C"]
    expected = features.mean(places) if places else features
    torch.testing.assert_close(GlobalPool(layout)(features), expected)
    assert expected.shape == (2, 6)


def test_timm_knows_its_images() -> None:
    spec = transfer_model("mobilenetv3_small_050", 5).input_spec
    assert spec == InputSpec((224, 224), *IMAGENET, "bicubic")


def test_other_networks_get_imagenets_images() -> None:
    assert transfer_model(Tiny(), 5).input_spec == InputSpec((224, 224), *IMAGENET, "bilinear")


def test_input_size_and_input_spec_take_over() -> None:
    assert transfer_model(Tiny(), 5, input_size=(16, 20)).input_spec == InputSpec((16, 20), *IMAGENET)
    spec = InputSpec((8, 8), (0.5,), (0.25,), "nearest")
    grey = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    assert transfer_model(grey, 5, input_spec=spec).input_spec is spec


def test_all_wrong_settings_are_listed_at_once() -> None:
    refused(
        "(?s)5 faults.*num_classes: 0.*dropout: 1.*pretrained=True.*input_size= and input_spec=.*input_size: 0",
        "resnet18",
        ConfigError,
        num_classes=0,
        dropout=1.0,
        pretrained=True,
        weights="w.pth",
        input_size=0,
        input_spec=InputSpec((8, 8), *IMAGENET),
    )


def test_a_network_for_grey_images_knows_that_it_reads_one_channel():
    model = transfer_model(timm.create_model("resnet18", in_chans=1), 3, input_size=32)
    assert model.input_spec.channels == 1
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 3)


def test_the_body_comes_from_the_one_of_several_networks_that_was_named(tmp_path) -> None:
    both = {f"{name}.{key}": value + shift for name, shift in (("student", 0), ("teacher", 1))
            for key, value in Tiny().state_dict().items()}  # fmt: skip
    torch.save(both, tmp_path / "both.pt")
    refused("student, teacher", Tiny(), weights=tmp_path / "both.pt")
    weights = read_checkpoint(tmp_path / "both.pt", key="teacher")
    chosen = transfer_model(Tiny(), 3, weights=weights, input_size=16, insert_norm=False)
    own = chosen.backbone.state_dict()
    shared = [name for name in own if f"teacher.{name}" in both]
    assert shared
    assert all(torch.equal(own[name], both[f"teacher.{name}"]) for name in shared)
