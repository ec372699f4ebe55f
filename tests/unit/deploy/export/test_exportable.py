"""Laws of what is exported, and of what its file says of itself."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import onnx
import pytest
from graphs import NAMES
from torch import nn

from basisprune.deploy.export import export_onnx
from basisprune.deploy.export.exportable import Exportable, read_input
from basisprune.errors import ModelError
from basisprune.transfer.model import transfer_model

EVIL = ["it's", 'say "x"', "__import__('os').abort()", "\\", "a b"]


def knowing(names, layout=None) -> Exportable:
    return Exportable.of(transfer_model("test_resnet", len(names), input_size=16), layout, classes=names)


def test_names_for_ultralytics_are_a_literal_whatever_they_are():
    known = knowing(EVIL).ultralytics_notes
    assert ast.literal_eval(known["names"]) == dict(enumerate(EVIL))
    assert ast.literal_eval(known["imgsz"]) == [16, 16]
    assert known["task"] == "classify"


@pytest.mark.parametrize("layout", ["NHWC", None])
def test_openvino_is_told_to_normalise_what_the_file_does_not(layout):
    what = knowing(EVIL, layout)
    spec, known = what.input.spec, what.openvino_notes
    mean = [float(value) for value in known["mean_values"].split()]
    assert mean == pytest.approx([0, 0, 0] if layout else [255 * value for value in spec.mean], abs=1e-3)
    assert len(known["labels"].split()) == len(EVIL)


def test_an_onnx_file_says_it_in_all_words(tiny):
    for path in tiny[1].values():
        said = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
        assert ast.literal_eval(said["names"]) == dict(enumerate(NAMES))
        assert said["model_info labels"] == " ".join(NAMES)
        assert said["basisprune.classes"]


@pytest.mark.parametrize("notes", [{}, {"input": "[]"}, {"input": "{"}, {"input": '{"size": [2, 2]}', "classes": "[]"}])
def test_a_file_that_says_nothing_is_refused(notes, tmp_path):
    with pytest.raises(ModelError, match=r"m\.x: does not say how it wants its images"):
        read_input(tmp_path / "m.x", notes)


def test_padding_is_explicit_in_every_file(tmp_path):
    model = transfer_model("tf_efficientnet_lite0", 3, input_size=32)  # whose convs are padded as TensorFlow does
    same = nn.Sequential(nn.Conv2d(3, 4, 3, padding="same"), nn.Conv2d(4, 4, (1, 5), padding="same"))
    for network, options in ((model, {}), (same, {"example_inputs": model.classifier.weight.new_zeros(2, 3, 9, 9)})):
        proto = onnx.load(export_onnx(network, tmp_path / "m.onnx", **options).path)
        convs = [node for node in proto.graph.node if node.op_type == "Conv"]
        said = [{entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute} for node in convs]
        assert convs
        assert all(each.get("auto_pad", b"NOTSET") == b"NOTSET" and "pads" in each for each in said)
        assert not any(node.op_type == "Pad" for node in proto.graph.node)


def test_a_file_that_says_it_prepares_what_is_no_image_is_refused():
    spec = {"size": [8], "mean": [0.5], "std": [0.5], "layout": "NHWC", "prepares": True}
    with pytest.raises(ModelError):
        read_input(Path("odd.onnx"), {"input": json.dumps(spec), "classes": "null"})
