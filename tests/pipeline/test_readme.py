"""What the README shows runs as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tiny import tiny_images, tiny_model, tiny_recipe, tiny_training

import basisprune
import basisprune.demo
from basisprune.config import RECIPES
from basisprune.data import load_data

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.usefixtures("one_thread")
def test_the_python_examples_run_as_written(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(basisprune.demo, "demo_model", tiny_model)
    monkeypatch.setattr(basisprune.demo, "demo_data", lambda: load_data(tiny_images(90), val_fraction=0.2))
    monkeypatch.setitem(RECIPES, "quick", tiny_recipe(tiny_training(epochs=1)))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    assert "multiply-adds" in capsys.readouterr().out
    assert names["plan"].removed == 10
    assert (tmp_path / "report.html").exists()
    assert (tmp_path / "small" / "model.onnx").exists()


def test_every_link_and_make_target_exists():
    readme = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", readme):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", readme, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
