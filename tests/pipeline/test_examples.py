"""The examples run as they are, and make networks smaller."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", ["segmentation", "signals", "detection"])
def test_an_example_gives_a_smaller_network_of_about_the_same_quality(name, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    result = module.main(str(tmp_path / "out"))
    summary, said = result.summary, capsys.readouterr().out
    assert "before" in said
    assert "after" in said
    assert summary.task == module.main.__module__ or summary.task in ("segmentation", "regression", "detection")
    assert summary.test.before.accuracy > 0.7  # it had learnt something
    assert summary.test.before.accuracy - summary.test.after.accuracy < 0.1
    assert summary.chosen.parameters < 0.7 * summary.reference.parameters
    assert summary.certificate.tests  # on examples that nothing had seen
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {
        "report.html",
        "summary.json",
        "model",
        "model.onnx",
    }
