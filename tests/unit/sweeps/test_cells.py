"""Laws of cells: they survive JSON, and their names are those of folders."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from basisprune.errors import ConfigError, TrainingError
from basisprune.sweeps.cells import Backbone, Cell, Failure, read_cell, slug, write_cell


def test_a_cell_survives_its_file(tmp_path):
    options = {"max_drop": 0.01, "recipe": {"base": "quick", "train": {"epochs": 3}}, "onnx": None}
    best = Backbone("resnet50", "there", weights="w.safetensors", cached=True)
    cell = Cell("a", "search", Backbone("resnet18", str(tmp_path / "a")), "data", options, "root", 2, best, "command")
    write_cell(tmp_path / "a.cell", cell)
    assert read_cell(tmp_path / "a.cell") == cell


@given(st.text(max_size=200))
def test_a_name_becomes_that_of_a_folder(name):
    assert re.fullmatch(r"[A-Za-z0-9._+-]{0,100}", slug(name))
    assert slug(name) not in (".", "..")


def test_different_names_get_different_folders():
    names = ["a/b", "a-b", "a b", "a:b", "../a-b"]
    assert len({slug(name) for name in names}) == len(names)


def test_settings_that_are_wrong_stay_wrong():
    assert Failure.of(ConfigError("epochs: 0 given")) == Failure("epochs: 0 given", final=True)
    assert Failure.of(TrainingError("the loss is not finite")) == Failure("the loss is not finite", final=False)
    assert Failure.of(MemoryError("full")) == Failure("MemoryError: full", final=False)
