"""The command line as a module."""

from __future__ import annotations

import subprocess
import sys

import basisprune


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "basisprune", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == basisprune.__version__


def test_no_module_of_the_current_folder_takes_the_place_of_an_installed_one(tmp_path):
    for name in ("lazy_loader", "typer", "torch", "scienceplots"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path; Path('ran').touch()")
    for module in ("basisprune", "basisprune.__main__"):
        command = [sys.executable, "-m", module, "predict", "nowhere", "x.png"]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert "nowhere: does not exist" in run.stderr
    assert not (tmp_path / "ran").exists()
