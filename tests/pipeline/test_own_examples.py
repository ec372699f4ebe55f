"""The examples with a training loop of one's own, and the notebook, run as they are, and what they make is smaller."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from yolos import network_of

import basisprune as bp

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def example(monkeypatch):
    """The module of an example, which leaves the path as it was."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def assert_smaller(numbers: dict[str, dict[str, float]], share: float, drop: float) -> None:
    before, after = numbers["before"], numbers["after"]
    assert after["parameters"] < share * before["parameters"]
    assert after["accuracy"] > before["accuracy"] - drop
    assert before["accuracy"] > 0.8


def test_a_network_with_a_loop_of_its_own(example, tmp_path, capsys):
    module = example("own_model")
    assert_smaller(module.main(tmp_path, epochs=2), share=0.7, drop=0.08)
    assert "parameters" in capsys.readouterr().out
    assert (tmp_path / "small" / "report.html").exists()


@pytest.mark.filterwarnings("ignore")  # Lightning has advice to give
def test_lightning(example, capsys):
    assert_smaller(example("lightning").main(epochs=4), share=0.75, drop=0.08)
    assert "after" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # so has the Trainer
def test_the_trainer_of_hugging_face(example, tmp_path, capsys):
    assert_smaller(example("transformers_trainer").main(tmp_path, epochs=4), share=0.75, drop=0.08)
    assert "after" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")  # of the packages that run it
def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    source = Path(__file__).parents[2] / "src"
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    assert all(not cell.get("outputs") for cell in notebook.cells), "it is stored without what it printed"
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    printed = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("parameters" in text for text in printed)
    assert (tmp_path / "small" / "report.html").exists()


@pytest.mark.usefixtures("ultralytics")
@pytest.mark.filterwarnings("ignore")  # so has Ultralytics
def test_yolo_with_a_smaller_network_and_fewer_pictures(example, tmp_path, capsys):
    parts = {"train": 64, "val": 24, "confirm": 24, "test": 24}
    ratios = {"filter_ratio": 0.3, "basis_ratio": 0.3}
    model = network_of("detect", tmp_path)
    result = example("yolo").main(tmp_path, model=str(model), parts=parts, epochs=(30, 3), **ratios)
    before, after = result.summary.test.before, result.summary.test.after
    assert before.accuracy > 0.03  # it learns from 64 pictures
    assert after.parameters < 0.7 * before.parameters
    assert f"the same by Ultralytics, of small/yolo.pt: {after.accuracy:.1%}" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "small").iterdir()} >= {"yolo.pt", "model", "model.onnx", "report.html"}


def test_segmentation_models_pytorch(example, tmp_path, capsys):
    result = example("smp").main(str(tmp_path / "out"))
    before, after = result.summary.test.before, result.summary.test.after
    assert before.accuracy > 0.7
    assert before.accuracy - after.accuracy < 0.1
    assert after.parameters < 0.7 * before.parameters
    assert result.summary.certificate.tests
    assert "mean IoU on the test images" in capsys.readouterr().out
    loaded, pictures = bp.from_pretrained(tmp_path / "out" / "model", trust_remote_code=True), torch.rand(2, 3, 64, 64)
    assert torch.equal(loaded(pictures), result.model(pictures))
