"""The command line as a module."""

from __future__ import annotations

import subprocess
import sys

import pytest

import basisprune


@pytest.mark.parametrize("module", ["basisprune", "basisprune.cli"])
def test_the_module_is_the_command(module):
    command = [sys.executable, "-m", module, "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == basisprune.__version__
