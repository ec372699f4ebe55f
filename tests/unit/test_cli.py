"""Laws of the command line."""

from __future__ import annotations

import json

import pytest
from tiny import tiny_images, tiny_model
from typer.testing import CliRunner

import basisprune
import basisprune.demo
from basisprune.cli import app
from basisprune.data import load_data
from basisprune.errors import MissingExtraError

runner = CliRunner()


def test_help_names_the_commands():
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "demo" in result.output


def test_no_command_shows_the_help():
    assert "demo" in runner.invoke(app, []).output


def test_the_version_is_shown():
    result = runner.invoke(app, ["--version"])
    assert (result.exit_code, result.output.strip()) == (0, basisprune.__version__)


@pytest.fixture
def tiny_demo(monkeypatch):
    monkeypatch.setattr(basisprune.demo, "demo_model", lambda input_size: tiny_model())
    monkeypatch.setattr(basisprune.demo, "demo_data", lambda: load_data(tiny_images(90), val_fraction=0.2))


def test_the_demo_compares_frameworks_and_goes_on_when_started_again(tiny_demo, tmp_path):
    command = ["demo", "--output", str(tmp_path / "run"), "--basis-ratio", "0.5", "--epochs", "1"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    for word in ("train: ", "val: ", "test: ", "removing 10 of 20 basis vectors", "basis+taylor"):
        assert word in result.output
    for framework in ("baseline", "taylor", "basis", "basis+taylor"):
        summary = json.loads((tmp_path / "run" / f"{framework}.json").read_text())
        assert summary["framework"] == framework
        assert summary["stages"][0]["name"] == ("decomposed" if "basis" in framework else "dense")
        assert "multiply-adds" in (tmp_path / "run" / f"{framework}.txt").read_text()
    assert runner.invoke(app, command).output == result.output


def test_an_error_is_told_without_a_traceback(tiny_demo, tmp_path, monkeypatch):
    result = runner.invoke(app, ["demo", "--output", str(tmp_path), "--basis-ratio", "1.5", "--epochs", "1"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: pruning_ratio: 1.5 given")

    def missing(**_settings):
        raise MissingExtraError("mlxtend", extra="demo")

    monkeypatch.setattr(basisprune.demo, "demo_data", missing)
    result = runner.invoke(app, ["demo", "--output", str(tmp_path)])
    assert result.exit_code == 1
    assert "basisprune[demo]" in result.stderr
