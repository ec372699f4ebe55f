"""Laws of `basisprune demo`."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from commands import invoke


def test_the_demo_ends_with_a_table_and_files_that_can_be_used(tiny_demo, tmp_path):
    result = invoke("demo", "--output", tmp_path / "run")
    assert result.exit_code == 0, result.output
    for word in ("before", "test accuracy", "parameters", "multiply-adds", "file size", "one image", "report.html"):
        assert word in result.stdout
    assert f"next: basisprune predict {tmp_path / 'run'} {tmp_path / 'run' / 'digits'}" in result.stdout
    predicted = invoke("predict", tmp_path / "run", tmp_path / "run" / "digits", "--json")
    assert len(json.loads(predicted.stdout)) == 3
    assert (tmp_path / "run" / "config.yaml").read_text().startswith("model: ")  # no command repeats it from there
    refused = invoke("evaluate", tmp_path / "run")
    assert (refused.exit_code, "handwritten digits', the run's data" in refused.stderr) == (1, True)
    assert "pass --data" in refused.stderr
    again = invoke("demo", "--output", tmp_path / "run")
    keys = ("test accuracy", "parameters", "multiply-adds")
    rows = [[line.split() for line in run.stdout.splitlines() if line.startswith(keys)] for run in (result, again)]
    assert rows[0] == rows[1]


IMPORTED = """
import os, sys

class Demo:  # stands for the module that loads torch
    @property
    def run_demo(self):
        chosen = [os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")]
        print(*chosen, "torch" in sys.modules, file=sys.stderr, flush=True)
        os._exit(1)

sys.modules["basisprune.demo"] = Demo()
from basisprune.cli import app
app(["demo"])
"""


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1 PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE", "OMP_NUM_THREADS": "2"}, "2 ACTIVE")]
)
def test_the_demo_computes_on_one_thread_unless_the_user_decided_otherwise(given, expected):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")} | given
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr.strip() == f"{expected} False"  # torch reads it when it is loaded
