"""Laws of what a run does."""

from __future__ import annotations

import json

import pytest
from summaries import summary

from basisprune.callback import NullCallback
from basisprune.files import sealed
from basisprune.sweeps.running import Backbone, Run
from basisprune.sweeps.worker import is_done, perform


def run(folder, name: str = "resnet18", kind: str = "compress") -> Run:
    return Run("a", kind, folder, Backbone(name), "photos", {"max_drop": 0.02, "seed": 3})


def test_a_run_that_starts_from_auto_chooses_its_backbone(tmp_path, monkeypatch):
    calls = []
    chosen = lambda *args, **more: calls.append((args, more))  # noqa: E731
    monkeypatch.setattr("basisprune.sweeps.worker.compress_portfolio", chosen)
    perform(run(tmp_path, "auto"), NullCallback())
    ((args, more),) = calls
    assert args == ("auto", "photos")
    assert (more["output"], more["max_drop"], more["seed"]) == (tmp_path, 0.02, 3)


def test_a_run_is_done_if_its_summary_is_sound_and_it_was_not_stopped(tmp_path):
    assert not is_done(run(tmp_path))
    path = tmp_path / "summary.json"
    summary().write(path)
    assert is_done(run(tmp_path))
    summary(interrupted=True).write(path)
    assert not is_done(run(tmp_path))
    summary().write(path)
    path.write_bytes(path.read_bytes().replace(b"resnet18 on digits", b"resnet19 on digits"))
    assert not is_done(run(tmp_path))


@pytest.mark.parametrize(("text", "done"), [(sealed('{"seed": 0}'), True), ('{"seed": 0}', False)])
def test_a_training_is_done_if_its_summary_is_sound(tmp_path, text, done):
    (tmp_path / "summary.json").write_text(text)
    assert is_done(run(tmp_path, kind="train")) is done


@pytest.mark.parametrize("kind", ["train", "compress"])
def test_a_summary_that_is_too_large_is_not_read(tmp_path, kind, monkeypatch):
    (tmp_path / "summary.json").write_text(sealed(json.dumps({"seed": "x" * 1000})))
    monkeypatch.setattr("basisprune.results._MOST_BYTES", 500)
    monkeypatch.setattr("pathlib.Path.read_bytes", None)
    assert not is_done(run(tmp_path, kind=kind))
