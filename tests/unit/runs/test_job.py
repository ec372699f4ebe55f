"""Laws of a job: the network and the images fit each other, whatever they came from."""

from __future__ import annotations

import pytest
import torch
from sources import write_images
from tiny import NAMES, differing, tiny_backbone, tiny_images, tiny_model

from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.fold import deploy
from basisprune.errors import ConfigError, ModelError
from basisprune.runs.job import prepare_job
from basisprune.runs.options import configure


@pytest.fixture
def photos(tmp_path):
    return write_images(tmp_path / "photos", {"ant": 10, "bee": 10, "cat": 10})


def test_a_model_that_knows_its_images_is_taken_as_it_is(photos):
    model = tiny_model()
    job = prepare_job(model, str(photos), configure({}))
    assert job.network is model
    assert job.splits.train[0][0].shape == (3, 16, 16)
    assert (job.model, job.data) == ("a TransferModel given in Python", str(photos))
    assert job.noted() == {"model": job.model, "data": job.data, **job.config.noted()}
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

    assert parts() == {"train": 84, "val": 12, "confirm": 12, "test": 12}
    assert parts(val_fraction=0.25, test_fraction=0.0, confirm_fraction=0.2) == {"train": 90, "val": 24, "confirm": 6}
    assert parts(limit=12)["train"] == 12


def test_the_seed_decides_on_the_split_and_on_a_new_classifier(photos):
    def job(seed):
        return prepare_job("tiny:tiny_backbone", tiny_images(60), configure({"size": 16, "seed": seed}))

    one, again, other = job(0), job(0), job(1)
    assert one.splits.val.labels.tolist() == again.splits.val.labels.tolist() != other.splits.val.labels.tolist()
    assert not differing(one.network, again.network)
    assert any(name.startswith("classifier") for name in differing(one.network, other.network))
