"""Laws of a sweep from start to end: in two processes, and on a Ray cluster that loses a worker."""

from __future__ import annotations

import csv
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from commands import invoke
from tiny import Notes, tiny_images

from basisprune.files import unsealed
from basisprune.results import RunSummary
from basisprune.sweeps.sweep import run_sweep

TESTS = Path(__file__).parent.parent
FILE = """
models: [tiny:tiny_backbone]
datasets: [{{name: colours, data: {data}}}]
frameworks: [{frameworks}]
seeds: [{seeds}]
options:
  target_params: 0.3k
  size: 16
  onnx: false
  recipe:
    base: quick
    train: {{epochs: {epochs}, batch_size: 16}}
    finetune: {{epochs: 1, batch_size: 16}}
    plan: {{round_to: null}}
    filter_plan: {{round_to: null}}
resources: {{cpus: 1, memory: 50M}}
retries: 1
"""


@pytest.fixture(autouse=True)
def others_find_the_tests(monkeypatch):
    """The processes of the cells import the tiny network as the tests do."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("RAY_worker_niceness", "0")  # Ray would let its workers wait for everybody else


@pytest.fixture(scope="module")
def colours(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "colours.npz"
    images = tiny_images(90)
    pixels = np.stack([images[index][0].permute(1, 2, 0).numpy() for index in range(90)])
    labels = np.array([images[index][1] for index in range(90)])
    np.savez(path, x_train=pixels[:75], y_train=labels[:75], x_test=pixels[75:], y_test=labels[75:])
    return path


def written(path: Path, colours: Path, *, frameworks: str = "basis", seeds: str = "0", epochs: int = 1) -> Path:
    path.write_text(FILE.format(data=colours, frameworks=frameworks, seeds=seeds, epochs=epochs))
    return path


def starts(log: Path) -> list[int]:
    """The processes that worked on a cell, in order."""
    return [int(number) for number in re.findall(r"process (\d+) on", log.read_text())]


def test_a_sweep_in_two_processes_gathers_its_cells_and_repeats_nothing(colours, tmp_path):
    file, out = written(tmp_path / "sweep.yaml", colours, frameworks="baseline, basis"), tmp_path / "out"
    done = invoke("sweep", file, "--trust-code", "--output", out, "--jobs", 2)
    assert done.exit_code == 0, done.output
    assert "trained" in done.stdout
    assert "  within the budget" in done.stdout
    content = unsealed((out / "sweep.json").read_bytes())
    (row,) = [row for row in content["cells"] if row["framework"] == "basis"]
    summary = RunSummary.read(out / "cells" / "tiny_backbone-colours-basis-0" / "summary.json")
    assert (row["parameters"], row["accuracy"]) == (summary.chosen.parameters, summary.test.after.accuracy)
    assert row["parameters"] <= 300 < row["parameters_before"]
    assert content["fronts"]["colours"]
    with open(out / "sweep.csv") as table:
        assert [int(line["parameters"]) for line in csv.DictReader(table)][1] == row["parameters"]
    assert "front-0-parameters" in (out / "sweep.html").read_text()
    logs = sorted((out / "cells").glob("*.log"))
    assert len(logs) == 2
    before = {path: path.read_bytes() for path in logs}
    again = run_sweep(file, output=out, trust_code=True, jobs=2)
    assert [row.attempts for row in again.rows] == [0, 0]
    assert {path: path.read_bytes() for path in logs} == before


def kill_in_the_middle(cells: Path, victim: str, killed: list[int], over: threading.Event) -> None:
    """Kills the process of a cell as soon as it has stored something to go on from."""
    while not over.is_set():
        if (cells / victim / "candidates" / "dense.pt").exists():
            killed += starts(cells / f"{victim}.log")
            os.kill(killed[0], signal.SIGKILL)
            return
        time.sleep(0.01)


def test_a_sweep_on_ray_survives_a_worker_that_is_killed_in_the_middle(colours, tmp_path, monkeypatch):
    pytest.importorskip("ray")
    (tmp_path / "current").mkdir()  # whose files are not taken for installed packages
    (tmp_path / "current" / "timm.py").write_text("open('imported', 'w'); raise ImportError('of the current folder')")
    monkeypatch.chdir(tmp_path / "current")
    file, out, notes = written(tmp_path / "sweep.yaml", colours, seeds="0, 1", epochs=20), tmp_path / "out", Notes()
    victim, killed, over = "tiny_backbone-colours-basis-1", [], threading.Event()
    watcher = threading.Thread(target=kill_in_the_middle, args=(out / "cells", victim, killed, over))
    watcher.start()
    try:
        result = run_sweep(file, output=out, trust_code=True, jobs=2, ray_address="local", callback=notes)
    finally:
        over.set()
        watcher.join()
    assert not (tmp_path / "current" / "imported").exists()
    assert len(killed) == 1
    assert not result.failed, notes.lines
    assert [row.attempts for row in result.rows] == [1, 2]
    assert any("Ray worker died" in line for line in notes.lines)
    first, second = (starts(out / "cells" / f"tiny_backbone-colours-basis-{seed}.log") for seed in (0, 1))
    assert (len(first), len(second)) == (1, 2)  # the finished cell was not repeated, the other one was resumed
    assert second[0] == killed[0] != second[1]
    epochs = RunSummary.read(out / "cells" / victim / "summary.json").candidates[0].history
    assert [record.epoch for record in epochs] == list(range(20))
