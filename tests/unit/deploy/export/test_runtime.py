"""Laws of onnxruntime: what its files hold, and what is said where it is missing."""

from __future__ import annotations

import onnx
import pytest
import torch
from graphs import close, run
from networks import NETWORKS
from tiny import tiny_images, tiny_model

from basisprune.deploy.export import evaluate_onnx, export_onnx
from basisprune.deploy.fold import fold
from basisprune.errors import MissingExtraError


def test_statistics_that_say_nothing_are_not_in_the_file(tmp_path):
    model, x = NETWORKS["concat"](dtype=torch.float32)
    folded = fold(model, x)
    report = export_onnx(folded, tmp_path / "m.onnx", example_inputs=x)
    proto = onnx.load(report.path)
    norms = [node for node in proto.graph.node if node.op_type == "BatchNormalization"]
    assert [list(norm.input[3:]) for norm in norms] == [["fill.0.6", "fill.1.6"], ["fill.0.10", "fill.1.10"]]
    assert not any("running" in constant.name for constant in proto.graph.initializer)
    with torch.no_grad():
        assert close(model(x), run(report.path, x))
    onnx.checker.check_model(proto)
    int8 = export_onnx(folded, tmp_path / "m.onnx", example_inputs=x, int8=[x]).int8_path
    with torch.no_grad():
        expected = model(x)
    assert (run(int8, x) - expected).abs().max() < 0.05 * (expected.max() - expected.min())


def test_statistics_that_say_something_are_in_the_file(tmp_path):
    model, x = NETWORKS["concat"](dtype=torch.float32)
    report = export_onnx(model, tmp_path / "m.onnx", example_inputs=x)
    assert not any(node.op_type == "ConstantOfShape" for node in onnx.load(report.path).graph.node)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("basisprune.deploy.export.runtime.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'onnx' is needed.*basisprune\[onnx\]"):
        export_onnx(tiny_model(), tmp_path / "m.onnx")
    with pytest.raises(MissingExtraError, match=r"'onnx' is needed.*basisprune\[onnx\]"):
        evaluate_onnx(tmp_path / "m.onnx", tiny_images())
