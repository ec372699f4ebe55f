"""What the README and the pages of the documentation show runs as written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_images, tiny_model, tiny_recipe, tiny_training

import basisprune
import basisprune.demo
from basisprune.data import load_data
from basisprune.recipes import RECIPES

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def tiny_default(monkeypatch, tmp_path):
    """In place of the embedded default, what a test can train on; the folder to work in is empty."""
    monkeypatch.setattr(basisprune.demo, "demo_model", tiny_model)
    monkeypatch.setattr(basisprune.demo, "demo_data", lambda: load_data(tiny_images(90), val_fraction=0.2))
    monkeypatch.setitem(RECIPES, "quick", tiny_recipe(tiny_training(epochs=1)))
    monkeypatch.chdir(tmp_path)


def run_blocks(page: str) -> dict[str, Any]:
    """Runs the Python of a page from top to bottom, and gives the names that it left."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    names: dict[str, Any] = {}
    for block in blocks:
        exec(block, names)
    return names


@pytest.mark.usefixtures("one_thread", "tiny_default")
def test_the_python_examples_of_the_readme_run_as_written(tmp_path, capsys):
    names = run_blocks("README.md")
    assert "multiply-adds" in capsys.readouterr().out
    assert names["plan"].removed == 10
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "small" / "model.onnx").exists()


@pytest.mark.usefixtures("one_thread", "tiny_default")
def test_the_page_on_the_python_api_runs_as_written(tmp_path, capsys):
    names = run_blocks("docs/python.md")
    assert "basis+taylor" in capsys.readouterr().out
    sizes = [basisprune.measure(names[name]).parameters for name in ("split", "trained", "smaller")]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"report.html", "model", "model.onnx"}


@pytest.mark.usefixtures("one_thread", "tiny_default")
def test_the_page_on_tasks_runs_as_written(capsys):
    names = run_blocks("docs/tasks.md")
    assert "mean IoU" in capsys.readouterr().out
    assert names["result"].summary.task == "segmentation"
    assert names["found"].summary.metric == "points found"
    assert names["found"].summary.chosen.parameters < names["found"].summary.reference.parameters


def test_every_link_and_make_target_exists():
    readme = (ROOT / "README.md").read_text()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
