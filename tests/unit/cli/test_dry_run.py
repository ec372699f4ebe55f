"""Laws of `basisprune compress --dry-run`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import compress_into, invoke


def test_a_dry_run_says_what_would_be_done_and_writes_nothing(photos, tmp_path):
    result = compress_into(tmp_path / "out", photos, "--dry-run")
    assert result.exit_code == 0, result.output
    for word in (
        "parameters",
        "train: 78 images",
        "lose at most 1 point of accuracy",
        "loss+basis",
        "about 2 candidates, rarely more than ",
        "time ",
        "promise  ",
        "certified",
        "report.html",
    ):
        assert word in result.stdout
    assert list(tmp_path.iterdir()) == []


ACCEPTED = [
    ("--basis-ratio", "90%"),
    ("--basis-ratio", "50%", "--filter-ratio", "30%", "--limit", "3"),
    ("--basis-ratio", "50%", "--test-fraction", "0"),
    ("--basis-ratio", "50%", "--mean", "-100", "--std", "1e3"),
]
REFUSED = [
    ("--basis-ratio", "99.999%"),
    ("--basis-ratio", "95%"),
    ("--filter-ratio", "99.999%"),
    ("--filter-ratio", "60%", "--basis-ratio", "90%"),
    ("--framework", "basis", "--basis-ratio", "99%"),
    ("--framework", "basis+l1", "--basis-ratio", "50%", "--filter-ratio", "99%"),
    ("--framework", "l1", "--basis-ratio", "50%"),
    ("--mean", "1e30"),
    ("--mean", "1e18", "--recipe", "paper"),
    ("--std", "1e-30"),
    ("--mean", "1,2"),
    ("--val-fraction", "0"),
    ("--val-fraction", "0", "--target-params", "1k"),
    ("--val-fraction", "99%"),
    ("--limit", "1"),
    ("--seed", "-1"),
    ("--epochs", "1000000000000"),
    ("--target-params", "0"),
    ("--confidence", "100%"),
    ("--weights", "nosuch.pt"),
    ("--groups", "nosuch.csv"),
    ("--device", "nosuch.json"),
    ("--task", "segmentation"),
    ("--optimize", "macs", "--basis-ratio", "50%"),
    ("--data", "nosuch"),
    ("--model", "auto", "--data", "nosuch"),
    ("--models", "resnet18,resnet50", "--weights-folder", "nosuch"),
    ("--config", "tracked.yaml"),
    ("--config", "tracked.yaml", "--trust-code"),
    ("--config", "patient.yaml", "--val-fraction", "0"),
]


@pytest.mark.parametrize("words", [*ACCEPTED, *REFUSED], ids=" ".join)
def test_a_dry_run_accepts_what_the_run_accepts_and_nothing_else(words, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tracked.yaml").write_text("recipe: {train: {tracker: wandb}}")
    Path("patient.yaml").write_text("recipe: {train: {patience: 3}}")
    monkeypatch.setattr("basisprune.training.trainer.find_spec", lambda _name: None)
    out = tmp_path / "out"
    given = () if "--epochs" in words else ("--epochs", 1)
    model = () if {"--model", "--models"} & set(words) else ("--model", "tiny:tiny_backbone")
    start = ("compress", *model, "--data", photos, "--output", out, "--no-onnx", *given)
    size = () if "auto" in words or "--models" in words else ("--size", 16)
    codes = [invoke(*start, *size, *words, *dry).exit_code for dry in (("--dry-run",), ())]
    assert [code == 0 for code in codes] == [words in ACCEPTED] * 2, codes
    assert words in ACCEPTED or not out.exists()


def test_a_dry_run_knows_that_a_folder_was_begun_with_other_weights(photos, tmp_path, monkeypatch):
    words = ("--basis-ratio", "50%", "--no-onnx", "--epochs", 1)
    assert compress_into(tmp_path / "out", photos, *words).exit_code == 0
    monkeypatch.setattr("tiny.tiny_backbone", lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 9, 3), torch.nn.ReLU()))
    for dry in (("--dry-run",), ()):
        done = compress_into(tmp_path / "out", photos, *words, *dry)
        assert (done.exit_code, "with other settings, weights or images" in done.stderr) == (1, True)
