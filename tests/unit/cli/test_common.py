"""Laws that every subcommand keeps: settings from a file, errors and exit codes."""

from __future__ import annotations

import json

import pytest
import yaml
from commands import invoke

import basisprune
import basisprune.demo
from basisprune.errors import MissingExtraError


def test_all_faults_of_a_file_are_told_at_once(tmp_path):
    bad = {"modell": "x", "max_drop": "lots", "epochs": "three", "pretrained": 7}
    bad |= {"recipe": {"train": {"epoch": 3, "lr": "fast"}}, "search": {"framewrk": "basis"}}
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(bad))
    result = invoke("compress", "--config", tmp_path / "bad.yaml")
    assert result.exit_code == 1
    assert "7 faults" in result.stderr
    for hint in ("'model'", "percentage", "a whole number", "true or false", "'epochs'", "a number", "'framework'"):
        assert hint in result.stderr


@pytest.mark.parametrize("text", ["- a list", "model: [", "just text"])
def test_a_file_that_is_no_configuration_is_refused(text, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    result = invoke("compress", "--config", tmp_path / "bad.yaml")
    assert (result.exit_code, "bad.yaml" in result.stderr) == (1, True)


def test_a_file_names_options_as_they_are_typed(compressed, photos, tmp_path):
    folder, _ = compressed
    image = photos / "blue" / "2.png"
    (tmp_path / "json.yaml").write_text("json: true\ntop: 2\n")
    shown = invoke("predict", folder, image, "--config", tmp_path / "json.yaml")
    assert len(json.loads(shown.stdout)[0]["classes"]) == 2
    (tmp_path / "csv.yaml").write_text("csv: true\n")
    assert invoke("predict", folder, image, "--config", tmp_path / "csv.yaml").stdout.startswith("file,class")
    (tmp_path / "bad.yaml").write_text("as_json: true\nhelp: true\n")
    assert "2 faults" in invoke("predict", folder, image, "--config", tmp_path / "bad.yaml").stderr


def test_an_error_is_told_without_a_traceback(tiny_demo, tmp_path, monkeypatch):
    def missing(**_settings):
        raise MissingExtraError("mlxtend", extra="demo")

    monkeypatch.setattr(basisprune.demo, "demo_data", missing)
    result = invoke("demo", "--output", tmp_path)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "basisprune[demo]" in result.stderr


def test_ctrl_c_is_an_exit_code(tiny_demo, tmp_path, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    monkeypatch.setattr(basisprune.demo, "demo_data", stop)
    result = invoke("demo", "--output", tmp_path)
    assert (result.exit_code, "again to resume" in result.stderr) == (130, True)
