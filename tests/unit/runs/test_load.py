"""Laws of a job: the network and the images fit each other, whatever they came from."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from sources import write_images
from tiny import NAMES, differing, tiny_backbone, tiny_images, tiny_model
from torch import nn
from torchvision.datasets import ImageFolder
from trained import own_network, trained

import basisprune.runs.network
from basisprune.callback import NullCallback
from basisprune.data import Loaders, load_data
from basisprune.data.manifest import keep_images
from basisprune.data.split import names_of
from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.fold import deploy
from basisprune.errors import ConfigError, DataError, ModelError
from basisprune.runs.folder import OutputFolder, changed_settings
from basisprune.runs.load import code_of, factory_of, prepare_job
from basisprune.runs.settings import configure


@pytest.fixture
def photos(tmp_path):
    return write_images(tmp_path / "photos", {"ant": 10, "bee": 10, "cat": 10})


def test_a_model_that_knows_its_images_is_taken_as_it_is(photos):
    model = tiny_model()
    job = prepare_job(model, str(photos), configure({}))
    assert job.network is model
    assert job.splits.train[0][0].shape == (3, 16, 16)
    assert (job.model, job.data) == ("a TransferModel given in Python", str(photos))
    assert job.to_dict() == {"model": job.model, "data": job.data, **job.config.to_dict()}
    with pytest.raises(ConfigError, match="size: 32 given, but the model takes 16x16 images"):
        prepare_job(model, str(photos), configure({"size": 32}))
    assert prepare_job(model, photos, configure({"size": 16})).data == str(photos)


@pytest.mark.parametrize("source", ["factory", "backbone"])
def test_a_backbone_gets_the_classes_of_the_data_and_the_size_asked_for(source, photos):
    backbone = "tiny:tiny_backbone" if source == "factory" else tiny_backbone()
    job = prepare_job(backbone, photos, configure({"size": 24}))
    assert job.network.input_spec.size == (24, 24)
    assert job.network(torch.zeros(1, 3, 24, 24)).shape == (1, 3)
    assert job.splits.train[0][0].shape == (3, 24, 24)
    assert job.splits.classes == ("ant", "bee", "cat")


def test_a_folder_of_a_model_that_was_trained_is_read_and_a_folded_one_is_refused(photos, tmp_path):
    save_pretrained(tiny_model(), tmp_path / "model", classes=NAMES)
    job = prepare_job(str(tmp_path / "model"), photos, configure({}))
    assert not differing(job.network, tiny_model())
    assert job.model == str(tmp_path / "model")
    model = tiny_model()
    save_pretrained(deploy(model, model.input_spec, NAMES), tmp_path / "folded", classes=NAMES)
    with pytest.raises(ModelError, match="folded and cannot be trained"):
        prepare_job(str(tmp_path / "folded"), photos, configure({}))


def test_images_are_divided_as_the_settings_say(photos):
    def parts(**options):
        splits = prepare_job(tiny_model(), tiny_images(120), configure(options)).splits
        return {name: len(part) for name, part in splits.parts.items()}

    assert parts() == {"train": 90, "val": 24, "test": 6}
    assert parts(max_drop=0.1) == {"train": 42, "val": 24, "confirm": 48, "test": 6}
    assert parts(val_fraction=0.2) == {"train": 84, "val": 12, "confirm": 12, "test": 12}
    assert parts(val_fraction=0.25, test_fraction=0.0, confirm_fraction=0.2) == {"train": 90, "val": 24, "confirm": 6}
    assert parts(limit=12)["train"] == 12


@pytest.mark.parametrize(
    "goal", [{"max_drop": 0.02}, {"min_accuracy": 0.9}, {"target_params": 9}, {"basis_ratio": 0.5}]
)
def test_images_confirm_where_the_budget_is_about_accuracy(goal):
    splits = prepare_job(tiny_model(), load_data(tiny_images(120)), configure({**goal, "confirm_fraction": 0.5})).splits
    assert (splits.confirm is not None) == ("max_drop" in goal or "min_accuracy" in goal)
    assert len(splits.val) + len(splits.confirm or ()) == 24


def test_a_run_goes_on_with_the_images_that_it_has_chosen(photos, tmp_path):
    config, output = configure({"seed": 3}), tmp_path / "out"
    job = prepare_job(tiny_model(), photos, config, output=output)
    OutputFolder(output).claim(job.to_dict(), NullCallback())
    keep_images(output, job.splits)
    write_images(photos, {"ant": 30})
    assert names_of(prepare_job(tiny_model(), photos, config, output=output).splits) == names_of(job.splits)
    other = prepare_job(tiny_model(), tiny_images(120), config, output=output)  # whose settings are refused later
    assert len(other.splits.train) == 90
    (photos / "bee" / "3.png").write_bytes((photos / "bee" / "4.png").read_bytes())
    with pytest.raises(DataError, match=r"bee/3\.png: replaced"):
        prepare_job(tiny_model(), photos, config, output=output)


def test_images_are_divided_anew_for_another_budget(tmp_path):
    folder, data = OutputFolder(tmp_path / "out"), write_images(tmp_path / "photos", {"ant": 60, "bee": 60})
    job = prepare_job(tiny_model(), data, configure({}), output=folder.path)
    folder.claim(job.to_dict(), NullCallback())
    keep_images(folder.path, job.splits)
    later = prepare_job(tiny_model(), data, configure({"max_drop": 0.1}), output=folder.path)
    assert (job.splits.confirm, later.splits.confirm is None) == (None, False)


def test_units_count_once_when_shares_are_chosen(tmp_path):
    data = write_images(tmp_path / "photos", {"ant": 60, "bee": 60})
    rows = [f"{name}/{each}.png,{name}{each // 6}" for name in ("ant", "bee") for each in range(60)]
    (tmp_path / "groups.csv").write_text("\n".join(["file,group", *rows]))
    options = {"max_drop": 0.1, "groups": str(tmp_path / "groups.csv")}
    assert prepare_job(tiny_model(), data, configure(options)).splits.confirm is None


def test_images_of_a_class_that_has_too_few_do_not_confirm():
    splits = prepare_job(tiny_model(), tiny_images(120), configure({"max_drop": 0.1, "metric": "worst-class"})).splits
    assert splits.confirm is None


def test_images_of_other_settings_are_not_taken_over_and_those_beside_damaged_settings_are(photos, tmp_path):
    folder = OutputFolder(tmp_path / "out")
    job = prepare_job(tiny_model(), photos, configure({}), output=folder.path)
    folder.claim(job.to_dict(), NullCallback())
    keep_images(folder.path, job.splits, NullCallback())
    other = prepare_job(tiny_model(), photos, configure({"val_fraction": 0.4, "seed": 3}), output=folder.path)
    assert len(other.splits.train) < len(job.splits.train)
    settings = folder.path / "config.yaml"
    settings.write_bytes(settings.read_bytes()[:-40] + b"\xff")
    again = prepare_job(tiny_model(), photos, configure({}), output=folder.path)
    assert names_of(again.splits) == names_of(job.splits)


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_network_is_not_judged_by_what_trained_it_nor_confirmed_by_what_judged_it(share, photos, tmp_path):
    run = OutputFolder(tmp_path / "trained", "train")
    job = prepare_job(tiny_model(), photos, configure({"confirm_fraction": share}), output=run.path)
    run.claim(job.to_dict(), NullCallback())
    keep_images(run.path, job.splits, NullCallback())
    save_pretrained(job.network, run.path / "model", classes=list(job.splits.classes))
    for data in (photos, photos / ".." / photos.name):  # however the path is written
        later = prepare_job(run.path / "model", str(data), configure({"seed": 7}), output=tmp_path / "small")
        assert names_of(later.splits) == names_of(job.splits)
    assert ("confirm" in names_of(later.splits)) == (share > 0)
    elsewhere = prepare_job(tiny_model(), photos, configure({"seed": 7}))
    assert names_of(elsewhere.splits)["train"] != names_of(job.splits)["train"]


def test_settings_say_what_stays_together_and_what_is_refused(photos, tmp_path):
    (tmp_path / "groups.csv").write_text(
        "".join(f"{kind}/{number}.png,{number}\n" for kind in ("ant", "bee") for number in range(10))
    )
    job = prepare_job(tiny_model(), photos, configure({"groups": str(tmp_path / "groups.csv")}))
    held = [{name[4:] for name in names if name[0] != "c"} for names in names_of(job.splits).values()]
    assert sum(map(len, held)) == 10
    (photos / "cat" / "0.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"0\.png: not an image"):
        prepare_job(tiny_model(), photos, configure({"strict": True}))


@pytest.mark.parametrize("model", ["tiny:tiny_backbone", tiny_model()])
def test_photos_of_different_sizes_in_an_image_folder_become_those_of_the_network(photos, model):
    for index, path in enumerate(sorted(photos.rglob("*.png"))):
        Image.open(path).resize((20 + index, 60 - index)).save(path)
    for data in (photos, ImageFolder(str(photos))):
        job = prepare_job(model, data, configure({}))
        assert {image.shape[1:] for image, _ in job.splits.train} == {job.network.input_spec.size}


@pytest.mark.parametrize("model", ["tiny:tiny_backbone", tiny_model()])
def test_the_network_of_deep_images_knows_what_is_white(tmp_path, model):
    for number in range(12):
        folder = tmp_path / ("ant", "bee", "cat")[number % 3]
        folder.mkdir(exist_ok=True)
        Image.fromarray(np.full((16, 16), 3000 + number, dtype=np.uint16)).save(folder / f"{number}.png")
    job = prepare_job(model, tmp_path, configure({"val_fraction": 0.3}), callback=NullCallback())
    assert job.network.input_spec.white == 4095
    assert job.splits.train[0][0].max().item() in range(186, 189)
    if isinstance(model, nn.Module):
        assert model.input_spec.white is None
    bright = prepare_job(_with(job.network, 65535), tmp_path, configure({}), callback=NullCallback())
    assert bright.splits.train[0][0].max().item() == 12  # as the network has learnt to see


def _with(model: nn.Module, white: int) -> nn.Module:
    model = copy.copy(model)
    model.input_spec = replace(model.input_spec, white=white)
    return model


def test_the_seed_decides_on_the_split_and_on_a_new_classifier(photos):
    def job(seed):
        return prepare_job("tiny:tiny_backbone", tiny_images(60), configure({"size": 16, "seed": seed}))

    one, again, other = job(0), job(0), job(1)
    assert one.splits.val.labels.tolist() == again.splits.val.labels.tolist() != other.splits.val.labels.tolist()
    assert not differing(one.network, again.network)
    assert any(name.startswith("classifier") for name in differing(one.network, other.network))


def test_the_content_of_a_device_file_is_noted(tmp_path):
    path = tmp_path / "device.json"
    given = prepare_job(tiny_model(), tiny_images(60), configure({"device": str(path)}))
    noted = []
    for text in ("one", "one", "other"):
        path.write_text(text)
        noted.append(given.to_dict())
    assert noted[0] == noted[1]
    assert changed_settings(noted[0], noted[2]).keys() == {"device_sha256"}
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        given.to_dict()


def own_loaders() -> Loaders:
    train, val = ([(torch.randn(6, 3, 16, 16), torch.arange(6) % 3)] for _ in range(2))
    return Loaders(train=train, val=val)


def test_a_network_on_loaders_of_ones_own_gets_the_weights_that_are_named(tmp_path):
    save_file({f"model.{name}": value for name, value in trained().state_dict().items()}, tmp_path / "own.safetensors")
    config = configure({"weights": str(tmp_path / "own.safetensors"), "keep_head": True})
    job = prepare_job("trained:own_network", own_loaders(), config)
    assert not differing(job.network, trained())
    assert job.network.input_spec.shape == (3, 16, 16)
    given = own_network()
    before = copy.deepcopy(given)
    assert not differing(prepare_job(given, own_loaders(), config).network, trained())
    assert not differing(given, before)
    with pytest.raises(ModelError, match=r"(?s)do not fit.*missing"):
        prepare_job(nn.Sequential(nn.Conv2d(3, 3, 1)), own_loaders(), config)


def test_a_folder_whose_name_looks_like_code_is_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(tiny_model(), tmp_path / "net:v2")
    (tmp_path / "net.py").write_text("raise SystemExit('imported')")
    config = configure({"keep_head": True})
    job = prepare_job("net:v2", load_data(tiny_images(60), val_fraction=0.3), config)
    other = replace(job, network=own_network())  # which may need a function to be built again
    assert factory_of(other) is None
    assert code_of("net:v2", None, None) == ()
    assert factory_of(replace(other, model="trained:own_network")) == "trained:own_network"


def test_loaders_of_ones_own_are_taken_as_they_are():
    with pytest.raises(ConfigError, match=r"(?s)2 faults.*size: 32 given with loaders of your own.*mean: \[0.5\]"):
        prepare_job(own_network(), own_loaders(), configure({"size": 32, "mean": [0.5]}))


def test_a_name_with_loaders_of_ones_own_has_its_pretrained_weights(monkeypatch):
    asked = []

    def build(name, *, pretrained):
        asked.append((name, pretrained))
        return own_network()

    monkeypatch.setattr(basisprune.runs.network, "build_backbone", build)
    for settings in ({}, {"pretrained": False}):
        prepare_job("torchvision:fcn_resnet50", own_loaders(), configure(settings))
    assert asked == [("torchvision:fcn_resnet50", True), ("torchvision:fcn_resnet50", False)]
