"""Laws of `basisprune inspect`."""

from __future__ import annotations

import json

from commands import invoke


def test_inspecting_a_result_lists_its_layers_and_ranks(compressed):
    folder, done = compressed
    report = json.loads(invoke("inspect", folder, "--json").stdout)
    after = json.loads(done.stdout)["test"]["after"]
    assert (report["parameters"], report["macs"]) == (after["parameters"], after["macs"])
    assert [layer["name"] for layer in report["layers"]] == ["backbone.0", "backbone.3", "classifier"]
    assert sum(layer["parameters"] for layer in report["layers"]) == report["parameters"]
    assert "exported file" in invoke("inspect", folder / "model.onnx").stderr


def test_inspecting_a_model_by_name_can_measure_its_latency(monkeypatch):
    monkeypatch.setattr("basisprune.deploy.export.onnx.has_onnx", lambda: False)
    result = invoke("inspect", "tiny:tiny_backbone", "--size", 16, "--latency")
    assert result.exit_code == 0, result.output
    assert "onnxruntime" not in result.stdout
    assert "backbone.0" in result.stdout
    assert "eager, batch 32" in result.stdout
