"""Laws of networks that are loaded to be used: whatever their form, they say the same."""

from __future__ import annotations

import json
import os

import numpy as np
import onnx
import pytest
from tiny import NAMES, tiny_images, tiny_model

from basisprune.deploy.bundle import save_pretrained
from basisprune.errors import BundleError, CheckpointError, ModelError
from basisprune.files import digest
from basisprune.runs.load import load_any
from basisprune.training.evaluation import predict


@pytest.mark.parametrize("form", ["bundle", "pixels.onnx", "prepared.onnx"])
def test_every_form_says_what_the_model_says(forms, form):
    loaded = load_any(forms / form)
    expected, found = predict(tiny_model(), tiny_images()), predict(loaded.model, tiny_images())
    assert np.array_equal(expected.classes, found.classes)
    assert np.allclose(expected.probabilities, found.probabilities, atol=1e-3)
    assert loaded.classes == (("0", "1", "2") if form == "prepared.onnx" else NAMES)


def test_what_is_no_result_is_refused_by_name(forms, tmp_path):
    with pytest.raises(BundleError, match="does not exist"):
        load_any(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="is not a result"):
        load_any(tmp_path)
    (tmp_path / "config.yaml").write_text("model: x\n")
    with pytest.raises(BundleError, match="has not written its model yet"):
        load_any(tmp_path)
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="ONNX Runtime cannot take it"):
        load_any(tmp_path / "bad.onnx")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir, lambda _path: None])
def test_what_belongs_to_a_file_and_is_none_is_not_opened(make, tmp_path):
    (tmp_path / "model.xml").write_text("<net/>")
    make(tmp_path / "model.bin")
    with pytest.raises(ModelError, match=r"model\.bin: cannot be read \((it is a .*, no file|No such file.*)\)"):
        load_any(tmp_path / "model.xml")


def test_settings_are_taken_only_from_the_run_that_wrote_the_file(forms, tmp_path):
    for name in ("model.onnx", "mine.onnx"):
        (tmp_path / name).write_bytes((forms / "pixels.onnx").read_bytes())
    save_pretrained(tiny_model(), tmp_path / "model", classes=NAMES)
    for text in ("seed: 3\n", "- a list\n"):  # of something else
        (tmp_path / "config.yaml").write_text(text)
        assert load_any(tmp_path / "model.onnx").settings == {}
    text = "seed: 3\nversions: {torch: '2.6'}\n"
    (tmp_path / "config.yaml").write_text(f"{text}# sha256 {digest(text.encode())}\n")
    found = [load_any(tmp_path / name).settings.get("seed") for name in ("model", "model.onnx", "mine.onnx")]
    assert found == [3, 3, None]
    (tmp_path / "config.yaml").write_text(f"{text.replace('3', '2')}# sha256 {digest(text.encode())}\n")
    for name in ("model", "model.onnx"):
        with pytest.raises(CheckpointError, match=r"config\.yaml: is damaged or was changed"):
            load_any(tmp_path / name)


@pytest.mark.parametrize(
    "facts",
    [
        *("[]", '{"size": 3}', "no JSON", "null", "3", "[" * 100_000),
        '{"size": [16, 16], "mean": [1e999], "std": [1], "interpolation": "x", "prepares": true, "layout": "NHWC"}',
        '{"size": [16, 1000000000], "mean": [1], "std": [1], "interpolation": "x", "prepares": true, "layout": "NHWC"}',
        '{"size": [16, 16], "mean": [1], "std": [1], "interpolation": "x", "prepares": 7, "layout": "NHWC"}',
        '{"size": [16, 16], "mean": [1], "std": [1], "interpolation": "x", "prepares": true, "layout": ["NHWC"]}',
    ],
)
def test_an_onnx_file_that_does_not_say_what_it_takes_is_refused(forms, facts, tmp_path):
    proto = onnx.load(forms / "pixels.onnx")
    next(entry for entry in proto.metadata_props if entry.key == "basisprune.input").value = facts
    onnx.save(proto, tmp_path / "odd.onnx")
    with pytest.raises(ModelError, match="does not say how it wants its images"):
        load_any(tmp_path / "odd.onnx")
    without = onnx.load(forms / "pixels.onnx")
    entry = next(entry for entry in without.metadata_props if entry.key == "basisprune.input")
    entry.value = json.dumps({key: value for key, value in json.loads(entry.value).items() if key != "prepares"})
    onnx.save(without, tmp_path / "odd.onnx")
    with pytest.raises(ModelError, match="does not say how it wants its images"):
        load_any(tmp_path / "odd.onnx")


@pytest.mark.parametrize(
    "classes", ["3", "{}", '["a", 2, 3]', "[1, 2, 3]", '"abc"', "no JSON", '["a", "b"]', "[" * 100_000]
)
def test_an_onnx_file_with_other_class_names_than_outputs_is_refused(forms, classes, tmp_path):
    proto = onnx.load(forms / "pixels.onnx")
    next(entry for entry in proto.metadata_props if entry.key == "basisprune.classes").value = classes
    onnx.save(proto, tmp_path / "odd.onnx")
    with pytest.raises(ModelError, match=r"has no class names|has 2 classes and outputs"):
        load_any(tmp_path / "odd.onnx")
