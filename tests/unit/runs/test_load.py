"""Laws of networks that are loaded to be used: whatever their form, they say the same."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import torch
from tiny import tiny_images, tiny_model

from basisprune.data import ArrayImages
from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.export import export_onnx
from basisprune.errors import BundleError, ConfigError, DataError, ModelError
from basisprune.runs.accuracy import accuracy_on
from basisprune.runs.answers import ask, image_files
from basisprune.runs.load import load_any
from basisprune.training.predict import predict

NAMES = ("r", "g", "b")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forms")
    model = tiny_model()
    save_pretrained(model, folder / "bundle", classes=NAMES)
    export_onnx(model, folder / "pixels.onnx", classes=NAMES, preprocess=True)
    export_onnx(model, folder / "prepared.onnx")
    return folder


@pytest.mark.parametrize("form", ["bundle", "pixels.onnx", "prepared.onnx"])
def test_every_form_says_what_the_model_says(folder, form):
    loaded = load_any(folder / form)
    expected, found = predict(tiny_model(), tiny_images()), predict(loaded.model, tiny_images())
    assert np.array_equal(expected.classes, found.classes)
    assert np.allclose(expected.probabilities, found.probabilities, atol=1e-3)
    assert loaded.classes == (("0", "1", "2") if form == "prepared.onnx" else NAMES)


def test_classes_are_matched_by_name_whatever_their_order(folder):
    loaded = load_any(folder / "bundle")
    images = tiny_images(60)
    same = ArrayImages(images.images.permute(0, 2, 3, 1).numpy(), images.labels, NAMES)
    turned = ArrayImages(images.images.permute(0, 2, 3, 1).numpy(), 2 - images.labels, NAMES[::-1])
    assert accuracy_on(loaded, same)["accuracy"] == accuracy_on(loaded, turned)["accuracy"]
    assert accuracy_on(loaded, same)["images"] == 60
    with pytest.raises(DataError, match="the class '0', which the model does not know"):
        accuracy_on(loaded, images)
    with pytest.raises(ConfigError, match="pass --data"):
        accuracy_on(loaded)


def test_what_is_no_result_is_refused_by_name(folder, tmp_path):
    with pytest.raises(BundleError, match="is no result"):
        load_any(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="holds no result"):
        load_any(tmp_path)
    (tmp_path / "config.yaml").write_text("model: x\n")
    with pytest.raises(BundleError, match="has not written its model yet"):
        load_any(tmp_path)
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="onnxruntime cannot read it"):
        load_any(tmp_path / "bad.onnx")


def test_settings_are_taken_only_from_the_run_that_wrote_the_file(folder, tmp_path):
    for name in ("model.onnx", "mine.onnx"):
        (tmp_path / name).write_bytes((folder / "pixels.onnx").read_bytes())
    save_pretrained(tiny_model(), tmp_path / "model", classes=NAMES)
    for text in ("seed: 3\n", "- a list\n"):  # of something else
        (tmp_path / "config.yaml").write_text(text)
        assert load_any(tmp_path / "model.onnx").settings == {}
    (tmp_path / "config.yaml").write_text("seed: 3\nversions: {torch: '2.6'}\n")
    found = [load_any(tmp_path / name).settings.get("seed") for name in ("model", "model.onnx", "mine.onnx")]
    assert found == [3, 3, None]


@pytest.mark.parametrize("facts", ["[]", '{"size": 3}', "no JSON"])
def test_an_onnx_file_that_does_not_say_what_it_takes_is_refused(folder, facts, tmp_path):
    proto = onnx.load(folder / "pixels.onnx")
    next(entry for entry in proto.metadata_props if entry.key == "basisprune.input").value = facts
    onnx.save(proto, tmp_path / "odd.onnx")
    with pytest.raises(ModelError, match="does not say how it wants its images"):
        load_any(tmp_path / "odd.onnx")
    without = onnx.load(folder / "pixels.onnx")
    entry = next(entry for entry in without.metadata_props if entry.key == "basisprune.input")
    entry.value = json.dumps({key: value for key, value in json.loads(entry.value).items() if key != "prepares"})
    onnx.save(without, tmp_path / "odd.onnx")
    with pytest.raises(ModelError, match="does not say how it wants its images"):
        load_any(tmp_path / "odd.onnx")


def test_answers_come_in_the_order_of_the_files_with_all_classes(folder, tmp_path):
    from basisprune.runs.summary import picture_of

    images = tiny_images(40)
    for index in range(40):
        picture_of(images[index][0]).save(tmp_path / f"{index:02}.png")
    (tmp_path / "07.png").write_text("broken")
    answers = list(ask(load_any(folder / "bundle"), image_files([tmp_path])))
    assert [answer.file.name for answer in answers] == [f"{index:02}.png" for index in range(40)]
    assert [bool(answer.error) for answer in answers] == [index == 7 for index in range(40)]
    good = [answer for answer in answers if not answer.error]
    assert all(set(dict(answer.classes)) == set(NAMES) for answer in good)
    assert torch.allclose(torch.tensor([sum(dict(answer.classes).values()) for answer in good]), torch.ones(39))
    assert all(answer.classes[0][1] == max(dict(answer.classes).values()) for answer in good)
