"""Laws of `basisprune train`."""

from __future__ import annotations

import json
import shutil

import pytest
from commands import invoke
from PIL import Image


def test_a_trained_model_can_be_used_and_compressed(photos, tmp_path):
    start = ("--data", photos, "--size", 16, "--epochs", 6)
    result = invoke("train", "--model", "tiny:tiny_backbone", *start, "--output", tmp_path / "trained", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["test"]["accuracy"] > 0.5
    assert len(summary["history"]) == 6
    assert json.loads(invoke("evaluate", tmp_path / "trained", "--json").stdout)["accuracy"] == pytest.approx(
        summary["test"]["accuracy"]
    )
    again = invoke("train", "--config", tmp_path / "trained" / "config.yaml", "--output", tmp_path / "again")
    assert again.exit_code == 0, again.output
    small = tmp_path / "small"
    words = ("--model", tmp_path / "trained" / "model", *start, "--output", small, "--basis-ratio", "0.5", "--no-onnx")
    assert invoke("compress", *words).exit_code == 0
    other = ("compress", *words, "--size", 32, "--output", tmp_path / "y")
    assert "the model takes 16x16 images" in invoke(*other).stderr
    assert not (tmp_path / "y").exists()
    folded = invoke("compress", "--model", small / "model", *start, "--output", tmp_path / "x")
    assert (folded.exit_code, "folded" in folded.stderr) == (1, True)


def test_a_training_goes_on_only_with_its_own_images(photos, tmp_path):
    copied = shutil.copytree(photos, tmp_path / "photos")
    words = ("train", "--model", "tiny:tiny_backbone", "--data", copied, "--size", 16, "--epochs", 1)
    for _ in range(2):
        assert invoke(*words, "--output", tmp_path / "out").exit_code == 0
    before = (tmp_path / "out" / "summary.json").read_bytes()
    for file in copied.rglob("*.png"):
        Image.new("RGB", (16, 16)).save(file)
    refused = invoke(*words, "--output", tmp_path / "out")
    assert (refused.exit_code, "images" in refused.stderr) == (1, True)
    assert (tmp_path / "out" / "summary.json").read_bytes() == before
    without = (*words, "--val-fraction", 0, "--output", tmp_path / "other")
    assert invoke(*without).exit_code == 0
