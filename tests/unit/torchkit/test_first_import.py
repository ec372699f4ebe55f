"""Laws of the first import of torch: no library of the current folder is loaded, and the folder stays current."""

from __future__ import annotations

import subprocess
import sys

WATCHED = """
import os, sys
before = os.getcwd()
seen = []
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("torch."):
            seen.append(os.getcwd())
sys.meta_path.insert(0, Watch())
from basisprune.torchkit.first_import import import_torch_elsewhere
import_torch_elsewhere()
import_torch_elsewhere()
print("torch" in sys.modules)
import torch
print(os.getcwd() == before, before in seen, len(seen) > 10, torch.ones(1).item() == 1.0)
"""


def test_torch_is_imported_from_elsewhere_and_the_folder_stays_current(tmp_path):
    run = subprocess.run([sys.executable, "-c", WATCHED], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True", "False", "True", "True"]
