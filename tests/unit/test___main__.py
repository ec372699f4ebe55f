"""The command line as a module."""

from __future__ import annotations

import subprocess
import sys

import basisprune


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "basisprune", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == basisprune.__version__
