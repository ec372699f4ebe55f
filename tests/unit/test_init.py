"""Laws of the package itself: quick to import, and every name is what it says."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import basisprune
from basisprune.moved import MOVED


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.strip()


@pytest.mark.parametrize("module", ["basisprune", "basisprune.cli", "basisprune.errors", "basisprune.types"])
def test_importing_does_not_import_the_heavy_packages(module):
    heavy = "{'torch', 'timm', 'torchvision', 'accelerate', 'numpy', 'torchmetrics', 'pydantic'}"
    assert run(f"import sys, {module}; print({heavy} & set(sys.modules))") == "set()"


def test_every_public_name_resolves_to_something_of_that_name():
    assert basisprune.__all__ == sorted(basisprune.__all__)
    for name in basisprune.__all__:
        value = getattr(basisprune, name)
        assert getattr(value, "__name__", name) == name
        assert type(value).__name__ != "module", name
    assert set(basisprune.__all__) <= set(dir(basisprune))


def test_no_public_name_is_hidden_by_a_file_that_is_imported():
    code = (
        "import basisprune.cli.compress, basisprune.runs.compress, basisprune as bp; print(type(bp.compress).__name__)"
    )
    assert run(code) == "function"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="No basisprune attribute nothing"):
        _ = basisprune.nothing


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert basisprune.__version__ == project["version"]


@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in MOVED.items() for name in names])
def test_what_was_public_still_comes_with_a_warning_that_names_its_place(place, name):
    with pytest.warns(DeprecationWarning, match=rf"basisprune\.{name} goes: use basisprune\.{place}\.{name}"):
        value = getattr(basisprune, name)
    there = getattr(importlib.import_module(f"basisprune.{place}"), name)
    assert inspect.unwrap(value) is inspect.unwrap(there)
    assert name not in dir(basisprune)


def test_the_public_names_are_few():
    assert len(basisprune.__all__) <= 45
