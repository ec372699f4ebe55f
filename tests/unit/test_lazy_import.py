"""Laws of the package itself: quick to import, and every name is what it says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import basisprune


def run(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return result.stdout.strip()


@pytest.mark.parametrize("module", ["basisprune", "basisprune.cli", "basisprune.errors"])
def test_importing_does_not_import_the_heavy_packages(module):
    heavy = "{'torch', 'timm', 'torchvision', 'accelerate', 'numpy', 'torchmetrics'}"
    assert run(f"import sys, {module}; print({heavy} & set(sys.modules))") == "set()"


def test_every_public_name_resolves_to_something_of_that_name():
    assert basisprune.__all__ == sorted(basisprune.__all__)
    for name in basisprune.__all__:
        value = getattr(basisprune, name)
        assert getattr(value, "__name__", name) == name
        assert type(value).__name__ != "module", name
    assert set(basisprune.__all__) <= set(dir(basisprune))


def test_the_names_for_type_checkers_are_the_public_names():
    tree = ast.parse(Path(basisprune.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {alias.name: node.module for node in block.body for alias in node.names}
    assert declared == {name: f"basisprune.{home}" for name, home in basisprune._HOMES.items()}


def test_a_function_with_the_name_of_its_file_is_the_function_whoever_imports_the_file_first():
    code = "import basisprune.pipeline as p; from basisprune import decompose, measure; print(decompose, measure)"
    assert [word for word in run(code).split() if word in ("module", "decompose", "measure")] == [
        "decompose",
        "measure",
    ]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'basisprune' has no attribute 'nothing'"):
        _ = basisprune.nothing


def test_the_version_is_that_of_the_package():
    assert basisprune.__version__.count(".") == 2
