"""The examples with a training loop of one's own, and the notebook, run as they are, and what they make is smaller."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
from nbclient import NotebookClient

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
