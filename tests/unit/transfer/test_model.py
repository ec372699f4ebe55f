from __future__ import annotations

import contextlib
import copy
import json
import sys
import zipfile
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import torchvision
from classifiers import IMAGES, Tiny, normed, refused, tv, weights_with_statistics
from networks import NETWORKS
from safetensors.torch import save_file
from torch import nn
from trained import HINTS, SPEC, Own, trained

from basisprune.basis.decompose import decompose
from basisprune.deploy.bundle import load_bundle, save_pretrained
from basisprune.deploy.fold import deploy
from basisprune.errors import BasisPruneError, ConfigError, ModelError
from basisprune.training.trainable import classes_of, find_classifiers
from basisprune.transfer.checkpoints import read_checkpoint
from basisprune.transfer.hints import Hints
from basisprune.transfer.model import GlobalPool, TransferModel, kept_model, transfer_model
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


IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SMALL = Hints(size=(32, 32))


def test_a_network_of_somebodys_own_is_copied_and_outputs_the_same():
    network = trained()
    model = kept_model(network, input_hints=HINTS)
    assert torch.equal(model(IMAGES), network(IMAGES))
    assert (model.input_spec, model.num_classes, classes_of(model)) == (SPEC, 3, 3)
    assert model.network is not network
    assert find_classifiers(model) == [model.network.last]


def test_weights_from_a_file_are_those_of_the_network(tmp_path):
    save_file(trained().state_dict(), tmp_path / "own.safetensors")
    model = kept_model("trained:own_network", weights=tmp_path / "own.safetensors", input_hints=HINTS)
    assert torch.equal(model(IMAGES), trained()(IMAGES))
    assert model.source.backbone == "trained:own_network"


def test_a_network_of_timm_in_a_folder_keeps_its_head(tmp_path):
    network = timm.create_model("mobilenetv3_small_050", num_classes=4).eval()
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    said = {"architecture": "mobilenetv3_small_050", "num_classes": 4, "pretrained_cfg": {"mean": [0.5] * 3}}
    said["pretrained_cfg"] |= {"std": [0.5] * 3, "input_size": [3, 32, 32], "num_classes": 4}
    (tmp_path / "config.json").write_text(json.dumps(said))
    model = kept_model(f"local-dir:{tmp_path}", pretrained=True)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), network(images))
    assert (model.input_spec.size, model.input_spec.mean, model.num_classes) == ((32, 32), (0.5,) * 3, 4)
    assert model.source.backbone == "mobilenetv3_small_050"
    with pytest.raises(ModelError, match=r"local-dir:.*Config file not found"):
        kept_model(f"local-dir:{tmp_path / 'none'}")


@pytest.mark.parametrize("named", ["stranger:network", "no_network_of_timm", "", 3])
@pytest.mark.parametrize("build", [kept_model, lambda name, **options: transfer_model(name, 3, **options)])
def test_what_a_folder_of_timm_says_is_never_called(named, build, tmp_path, monkeypatch):
    called = []
    stranger = ModuleType("stranger")
    stranger.network = lambda: called.append("network")
    monkeypatch.setitem(sys.modules, "stranger", stranger)
    (tmp_path / "folder").mkdir()
    facts = {"architecture": named, "mean": [0.5] * 3, "std": [0.5] * 3, "input_size": [3, 32, 32], "num_classes": 4}
    said = {"architecture": "mobilenetv3_small_050", "num_classes": 4, "pretrained_cfg": facts}
    (tmp_path / "folder" / "config.json").write_text(json.dumps(said))
    model = build(f"local-dir:{tmp_path / 'folder'}")
    assert model.source.backbone != named
    with contextlib.suppress(BasisPruneError):
        save_pretrained(model, tmp_path / "bundle")
    assert called == []


@pytest.mark.parametrize("asked", [{"layers": [1 << 20, 1, 1, 1]}, {"stem_width": 1 << 17, "stem_type": "deep"}])
def test_a_folder_of_timm_cannot_ask_for_a_giant(asked, tmp_path):
    said = {"architecture": "resnet10t", "pretrained_cfg": {"input_size": [3, 32, 32]}, "model_args": asked}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with torch.device("meta"), pytest.raises(ModelError, match="asks for too much"):
        transfer_model(f"local-dir:{tmp_path}", 2)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "weights.pth.tar", "x.pth", "model.pth"])
def test_weights_in_a_folder_of_timm_are_measured_before_they_are_read(name, tmp_path):
    said = {"architecture": "resnet10t", "pretrained_cfg": {"input_size": [3, 32, 32]}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    pickled = b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R."
    with zipfile.ZipFile(tmp_path / name, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
    with pytest.raises(ModelError, match="bytearray"):
        transfer_model(f"local-dir:{tmp_path}", 2, pretrained=True)


def test_networks_have_the_same_names_everywhere(monkeypatch):
    asked = []
    monkeypatch.setattr(timm, "create_model", lambda name, **_: asked.append(name) or nn.Conv2d(3, 4, 1))
    monkeypatch.setattr(torchvision.models, "get_model", lambda name, **options: asked.append((name, options)) or Own())
    transfer_model("hf-hub:me/mine", 3, input_size=16)
    transfer_model("timm:resnet18", 3, input_size=16)
    assert transfer_model("torchvision:resnet18", 3, pretrained=True, input_size=16).source.backbone
    assert asked == ["hf-hub:me/mine", "resnet18", ("resnet18", {"weights": "DEFAULT"})]


def test_torchvision_is_asked_by_name_and_heads_on_the_side_go():
    model = kept_model("torchvision:googlenet", input_hints=Hints(size=(64, 64)))
    assert (model.num_classes, model.train()(torch.randn(2, 3, 64, 64)).shape) == (1000, (2, 1000))
    with pytest.raises(ModelError, match=r"torchvision has no model 'resnet19'\. Did you mean 'resnet18'"):
        kept_model("torchvision:resnet19")


class Named(nn.Module):
    """Outputs as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.own = trained()

    def forward(self, images):
        return SimpleNamespace(loss=None, logits=self.own(images))


def test_of_an_output_with_logits_these_count():
    model = kept_model(Named(), input_hints=HINTS)
    assert torch.equal(model(IMAGES), trained()(IMAGES))
    assert torch.allclose(deploy(model, SPEC, ("r", "g", "b"))(IMAGES), trained()(IMAGES), atol=1e-5)


class Wrapped(nn.Module):
    def __init__(self, finish) -> None:
        super().__init__()
        self.own, self.finish = Own(), finish

    def forward(self, images):
        return self.finish(self.own(images))


@pytest.mark.parametrize(
    ("finish", "message"),
    [
        (lambda scores: (scores, scores), "returns tuple; one tensor of scores"),
        (lambda scores: scores[None], r"returns \(1, 2, 3\) for two images"),
        (lambda scores: scores.softmax(1), "returns probabilities; it must return the scores before the softmax"),
        (lambda scores: scores @ scores, "does not run on images of shape .*; if it wants another size"),
    ],
)
def test_a_network_that_gives_no_scores_is_refused(finish, message):
    with pytest.raises(ModelError, match=message):
        kept_model(Wrapped(finish), input_hints=HINTS)


def test_settings_that_exclude_each_other_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="exclude each other"):
        kept_model("resnet18", pretrained=True, weights=tmp_path)
    with pytest.raises(ConfigError, match="weights_key: 'ema' given without weights"):
        kept_model("resnet18", weights_key="ema")


def test_it_is_folded_saved_and_loaded_without_the_code_that_it_came_from(tmp_path):
    model = decompose(kept_model(trained(), input_hints=HINTS), scale_init=1.0)
    small = deploy(model, SPEC, ("r", "g", "b"))
    assert torch.allclose(small(IMAGES), trained()(IMAGES), atol=1e-4)
    save_pretrained(small, tmp_path / "small")
    bundle = load_bundle(tmp_path / "small")
    assert torch.equal(bundle.model(IMAGES), small(IMAGES))
    assert (bundle.classes, bundle.input_spec) == (("r", "g", "b"), SPEC)
    save_pretrained(bundle.model, tmp_path / "again")


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "torchvision:squeezenet1_1"])
def test_networks_by_name_are_saved_by_it_folded_or_not(name, tmp_path):
    model = kept_model(name, input_hints=SMALL)
    assert classes_of(model) == 1000
    images = torch.randn(2, 3, 32, 32)
    for form, network in (("whole", model), ("folded", deploy(model, model.input_spec, [str(i) for i in range(1000)]))):
        save_pretrained(network, tmp_path / form)
        assert torch.equal(load_bundle(tmp_path / form).model.eval()(images), network(images))
    assert classes_of(load_bundle(tmp_path / "folded").model) == 1000


FOLDERS = [
    ({}, {"mean": 5}, "what its config.json says of images"),
    ({"device": "meta"}, {}, "asks for a network without values"),
]


@pytest.mark.parametrize(("asked", "said", "message"), FOLDERS)
@pytest.mark.parametrize("build", [kept_model, lambda name: transfer_model(name, 3)])
def test_what_a_folder_of_timm_says_of_nothing_is_an_error_that_tells(asked, said, message, build, tmp_path):
    config = {"architecture": "resnet10t", "pretrained_cfg": {"input_size": [3, 32, 32], **said}, "model_args": asked}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        build(f"local-dir:{tmp_path}")
