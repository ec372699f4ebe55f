"""Laws of the first import of torch: no library of the current folder is loaded, and the folder stays current."""

from __future__ import annotations

import subprocess
import sys

WATCHED = """
import os, sys
seen = []
sys.meta_path.insert(0, type("Watch", (), {"find_spec": staticmethod(
    lambda name, path=None, target=None: seen.append(os.getcwd()) if name == "torch" else None)}))
from basisprune.torchkit.first_import import import_torch
before = os.getcwd()
import_torch()
print(os.getcwd() == before, before in seen, "torch" in sys.modules)
"""


def test_torch_is_imported_from_elsewhere_and_the_folder_stays_current(tmp_path):
    run = subprocess.run([sys.executable, "-c", WATCHED], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "False", "True"]
