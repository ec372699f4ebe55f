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
    written = ("--config", tmp_path / "trained" / "config.yaml", "--trust-code")
    again = invoke("train", *written, "--output", tmp_path / "again")
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
    kept = {line for index, line in enumerate(sorted(copied.rglob("*.png"))) if index % 16 == 0}
    for index, file in enumerate(sorted(set(copied.rglob("*.png")) - kept)):
        Image.new("RGB", (16, 16), (index, 0, 0)).save(file)
    refused = invoke(*words, "--output", tmp_path / "out")
    assert (refused.exit_code, "112 faults" in refused.stderr) == (1, True)
    assert ".png: replaced, its content is another one" in refused.stderr
    assert (tmp_path / "out" / "summary.json").read_bytes() == before
    without = (*words, "--val-fraction", 0, "--output", tmp_path / "other")
    assert invoke(*without).exit_code == 0


def test_files_that_are_added_later_change_nothing_for_a_run(photos, tmp_path):
    copied = shutil.copytree(photos, tmp_path / "photos")
    words = ("train", "--model", "tiny:tiny_backbone", "--data", copied, "--size", 16, "--epochs", 1)
    assert invoke(*words, "--output", tmp_path / "out").exit_code == 0
    before = {name: (tmp_path / "out" / name).read_bytes() for name in ("images.json", "summary.json")}
    for index in range(30):
        Image.new("RGB", (16, 16), (index, 0, 255)).save(copied / "blue" / f"0{index}.png")
    (copied / "violet").mkdir()  # not even an empty class
    again = invoke(*words, "--output", tmp_path / "out")
    assert again.exit_code == 0, again.stderr
    assert (tmp_path / "out" / "images.json").read_bytes() == before["images.json"]
