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
        if name == "torch._C":  # which loads the libraries
            seen.append(os.getcwd())
sys.meta_path.insert(0, Watch())
import basisprune
from basisprune.torchkit.first_import import import_torch_elsewhere
import_torch_elsewhere()  # once more does no harm
print("torch" in sys.modules)
import torch
print(os.getcwd() == before, before in seen, len(seen) == 1, torch.ones(1).item() == 1.0)
"""


CONFIGURED = (
    WATCHED[: WATCHED.index("import basisprune")]
    + """
from basisprune.cli import app
try:
    app(["inspect", "no such model", "--config", "settings.yaml"])
except SystemExit:
    print("torch" in sys.modules, before in seen)
"""
)


def test_a_command_with_a_file_of_settings_imports_torch_from_elsewhere_too(tmp_path):
    (tmp_path / "settings.yaml").write_text("size: 32\n")
    run = subprocess.run([sys.executable, "-c", CONFIGURED], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "False"]


def test_torch_is_imported_from_elsewhere_and_the_folder_stays_current(tmp_path):
    run = subprocess.run([sys.executable, "-c", WATCHED], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True", "False", "True", "True"]
