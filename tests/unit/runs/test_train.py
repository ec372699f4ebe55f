"""Laws of a training alone: its folder holds a model that can be used, and belongs to one run."""

from __future__ import annotations

import json

import pytest
from tiny import differing, tiny_images, tiny_model, tiny_recipe, tiny_training

from basisprune.callback import NullCallback
from basisprune.deploy.bundle import load_bundle
from basisprune.errors import CheckpointError
from basisprune.files import unsealed
from basisprune.runs.load import Job, prepare_job
from basisprune.runs.parsing import read_settings
from basisprune.runs.settings import configure
from basisprune.runs.train import train_job

pytestmark = pytest.mark.usefixtures("one_thread")


def job(images: int = 60, seed: int = 0, **options) -> Job:
    config = configure({"recipe": tiny_recipe(tiny_training(epochs=2)), **options})
    return prepare_job(tiny_model(seed), tiny_images(images), config)


def test_the_folder_holds_the_trained_model_and_what_is_known_of_it(tmp_path):
    given = job()
    found = train_job(given, tmp_path / "out", NullCallback(), command="basisprune train")
    assert unsealed((tmp_path / "out" / "summary.json").read_bytes()) == json.loads(found.to_json())
    assert (found.command, len(found.history)) == ("basisprune train", 2)
    assert (found.validation.images, found.test.images) == (12, 3)
    bundle = load_bundle(tmp_path / "out" / "model")
    assert bundle.metrics["test"]["accuracy"] == found.test.accuracy
    assert differing(bundle.model, given.network)
    assert not differing(given.network, tiny_model())


def test_only_settings_of_training_are_noted(tmp_path):
    found = train_job(job(), tmp_path, NullCallback())
    assert set(found.config) == {
        *("model", "data", "strict", "pretrained", "keep_head"),
        *("seed", "recipe"),
    }
    assert set(found.config["recipe"]) == {"train"}
    noted = read_settings(tmp_path / "config.yaml")
    assert configure({"recipe": noted["recipe"]}).recipe.train == job().config.recipe.train


def test_a_second_start_changes_nothing(tmp_path):
    first = train_job(job(), tmp_path, NullCallback())
    before = (tmp_path / "training.pt").read_bytes()
    assert train_job(job(), tmp_path, NullCallback()) == first
    assert (tmp_path / "training.pt").read_bytes() == before


@pytest.mark.parametrize("other", [{"seed": 1}, {"images": 63}])
def test_other_weights_or_images_by_the_same_name_are_refused(other, tmp_path):
    train_job(job(), tmp_path, NullCallback())
    before = (tmp_path / "summary.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"weights or images|other images"):
        train_job(job(**other), tmp_path, NullCallback())
    assert (tmp_path / "summary.json").read_bytes() == before


def test_without_images_to_judge_there_is_no_accuracy(tmp_path):
    found = train_job(job(val_fraction=0.0, test_fraction=0.0), tmp_path, NullCallback())
    assert (found.validation, found.test) == (None, None)
    assert load_bundle(tmp_path / "model").metrics == {}
