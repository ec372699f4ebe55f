"""Laws of what a portfolio can start from: what is on the machine is taken, and a silent hub keeps nobody waiting."""

from __future__ import annotations

import threading

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from tiny import Notes, tiny_images

from basisprune.callback import NullCallback
from basisprune.data import load_data
from basisprune.errors import ConfigError, ModelError
from basisprune.runs.settings import configure
from basisprune.sweeps import backbones
from basisprune.sweeps.backbones import BackboneSource, available, common_size, is_cached, start_from

NAME = "test_resnet.r160_in1k"
OTHER = "test_efficientnet.r160_in1k"


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """An empty cache of the hub, and no hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    return timm.create_model(NAME)


def put_into_cache(cache, network) -> None:
    """The weights as the hub's library keeps them."""
    folder = cache / f"models--timm--{NAME}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("a" * 40)
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    save_file(network.state_dict(), folder / "snapshots" / ("a" * 40) / "model.safetensors")


def first_weights(model) -> torch.Tensor:
    return next(parameter for parameter in model.parameters() if parameter.ndim == 4)


def test_weights_in_the_cache_of_the_hub_are_found_and_loaded_without_it(empty_cache, network, tmp_path, monkeypatch):
    assert not is_cached(NAME)
    put_into_cache(empty_cache, network)
    assert is_cached(NAME)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(backbones, "_why_unreachable", lambda: pytest.fail("the hub was asked"))
    (found,) = available([NAME], BackboneSource(), NullCallback()).backbones
    assert found.cached
    data = load_data(tiny_images(30), val_fraction=0.3)
    job = start_from(found, None, data, configure({"size": 32}), tmp_path / "out", NullCallback())
    assert torch.equal(first_weights(job.network.backbone), first_weights(network))
    assert job.model == NAME
    assert constants.HF_HUB_OFFLINE is False


def test_weights_in_a_folder_are_taken_by_name(network, tmp_path):
    save_file(network.state_dict(), tmp_path / "test_resnet.safetensors")
    (found,) = available([NAME], BackboneSource(tmp_path), NullCallback()).backbones
    assert found.weights == str(tmp_path / "test_resnet.safetensors")
    data = load_data(tiny_images(30), val_fraction=0.3)
    job = start_from(found, None, data, configure({"size": 32}), tmp_path / "out", NullCallback())
    assert torch.equal(first_weights(job.network.backbone), first_weights(network))
    assert job.network.input_spec.size == (32, 32)
    assert job.config.pretrained


def test_what_cannot_be_had_is_told_and_the_others_are_taken(empty_cache, network, tmp_path):
    put_into_cache(empty_cache, network)
    notes = Notes()
    found = available([NAME, OTHER], BackboneSource(), notes)
    assert [each.name for each in found.backbones] == [NAME]
    assert list(found.missing) == [OTHER]
    assert "HF_HUB_OFFLINE" in found.missing[OTHER]
    assert any(line.startswith(f"{OTHER} is not available") for line in notes.lines)


def test_it_is_an_error_if_nothing_can_be_had(tmp_path):
    with pytest.raises(ModelError) as caught:
        available([NAME, OTHER], BackboneSource(), NullCallback())
    assert len(caught.value.faults) == 2


def test_a_hub_that_never_answers_is_asked_once_and_not_waited_for(tmp_path, monkeypatch):
    asked, never = [], threading.Event()

    class Session:
        def head(self, *_args, **_options):
            asked.append(1)
            never.wait()

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(backbones, "_SECONDS", 0.05)
    monkeypatch.setattr(backbones.huggingface_hub, "get_session", Session)
    try:
        with pytest.raises(ModelError, match="the hub does not answer"):
            available([NAME, OTHER], BackboneSource(), NullCallback())
    finally:
        never.set()
    assert len(asked) == 1


def test_without_pretrained_weights_nothing_is_missing(tmp_path):
    source = BackboneSource(pretrained=False)
    found = available([NAME, "tiny:tiny_backbone"], source, NullCallback())
    assert ([each.name for each in found.backbones], found.missing) == ([NAME, "tiny:tiny_backbone"], {})


def test_unknown_names_and_names_given_twice_are_refused(tmp_path):
    with pytest.raises(ConfigError) as caught:
        available(["resnet5000", "resnet18", "resnet18"], BackboneSource(), NullCallback())
    assert len(caught.value.faults) == 2
    assert "Did you mean" in str(caught.value)


def test_all_get_images_of_the_size_that_most_were_made_for():
    names = ("resnet18", "resnet50", NAME)
    assert common_size(names, None) == 224
    assert common_size(names[1:], None) == 160  # of two, the smaller
    assert common_size(names, 96) == 96
    assert common_size(["tiny:tiny_backbone"], None) is None
