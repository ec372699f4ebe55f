"""Laws of `basisprune sweep`."""

from __future__ import annotations

import json
import re

import pytest
from commands import invoke

from basisprune.files import unsealed
from basisprune.sweeps.running import Running, open_pool
from basisprune.sweeps.worker import perform_logged

FILE = """
models: [tiny:tiny_backbone]
datasets: [{{name: photos, data: {photos}}}, {{name: nothing, data: {photos}/nothing}}]
frameworks: [basis]
options: {{target_params: 0.3k, size: 16, onnx: false}}
"""


@pytest.fixture
def file(photos, tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(FILE.format(photos=photos))
    return path


@pytest.fixture
def in_this_process(monkeypatch):
    """Cells run here, as a worker runs them, because a process takes seconds to start."""
    pool = lambda _, callback: open_pool(Running(), callback, lambda run: perform_logged(run, 1))  # noqa: E731
    monkeypatch.setattr("basisprune.sweeps.sweep.open_pool", pool)


def test_a_dry_run_lists_the_cells_says_which_would_fail_and_writes_nothing(file, tmp_path):
    words = ("sweep", file, "--trust-code", "--output", tmp_path / "out", "--dry-run")
    done = invoke(*words)
    assert done.exit_code == 1
    assert "2 cells, 0 of them done; nothing was written" in done.stdout
    assert done.stderr.startswith("error: tiny_backbone-nothing-basis-0: ")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    file.write_text(re.sub(r", \{name: nothing.*\}", "]", file.read_text()).replace("]]", "]"))
    assert invoke(*words).exit_code == 0


def test_cells_without_end_are_counted_before_they_are_made(tmp_path):
    path = tmp_path / "sweep.yaml"
    numbers = ", ".join(map(str, range(2000)))
    path.write_text(
        f"models: [{', '.join(f'm{n}' for n in range(2000))}]\ndatasets: [{', '.join(f'd{n}' for n in range(2000))}]\n"
        f"seeds: [{numbers}]\n"
    )
    for more in ((), ("--dry-run",)):
        done = invoke("sweep", path, "--output", tmp_path / "out", *more)
        assert done.exit_code == 1
        assert "8,000,000,000 cells described; at most 10,000 are allowed" in done.stderr


@pytest.mark.parametrize("place", ["model", "data", "task", "option of a model"])
def test_a_file_imports_no_code_that_nobody_trusts(place, photos, tmp_path, monkeypatch):
    mine = f"models: [{{model: resnet18, name: a{', options: {task: dire:f}' if 'option' in place else ''}}}]\n"
    mine += f"datasets: [{{data: {photos}, name: b}}]\n"
    text = mine.replace("resnet18" if place == "model" else str(photos) if place == "data" else "\0", "dire:f")
    (tmp_path / "sweep.yaml").write_text(text + ("options: {task: dire:f}\n" if place == "task" else ""))
    (tmp_path / "dire.py").write_text("from pathlib import Path\nPath('ran').touch()\nf = 1\n")
    monkeypatch.chdir(tmp_path)
    for more in ((), ("--dry-run",), ("--jobs", 2)):
        done = invoke("sweep", "sweep.yaml", "--output", "out", *more)
        assert done.exit_code == 1
        assert "'dire:f' would import and run code" in done.stderr
    (tmp_path / "sweep.yaml").write_text(mine + "options: {trust_code: true}\n")
    assert "a file cannot vouch for itself" in invoke("sweep", "sweep.yaml", "--output", "out", "--dry-run").stderr
    assert {path.name for path in tmp_path.iterdir()} == {"sweep.yaml", "dire.py"}


@pytest.mark.usefixtures("in_this_process")
def test_a_cell_that_fails_for_good_is_recorded_and_the_exit_code_tells(file, tmp_path):
    out = tmp_path / "out"
    done = invoke("sweep", file, "--trust-code", "--output", out, "--json")
    assert done.exit_code == 1
    good, bad = json.loads(done.stdout)
    assert (good["status"], good["kept_to_budget"], good["attempts"]) == ("done", True, 1)
    assert (bad["status"], bad["attempts"]) == ("failed", 1)  # wrong data stays wrong
    assert "nothing" in bad["error"]
    assert unsealed((out / "sweep.json").read_bytes())["cells"] == [good, bad]
    assert "1 of 2 cells are done, 1 failed." in (out / "sweep.html").read_text()
    listed = invoke("sweep", file, "--trust-code", "--output", out, "--dry-run", "--json")
    assert listed.exit_code == 1
    assert json.loads(listed.stdout) == {"tiny_backbone-photos-basis-0": True, "tiny_backbone-nothing-basis-0": False}


@pytest.mark.usefixtures("in_this_process")
def test_a_cell_whose_options_change_is_refused_and_others_may_be_added(file, tmp_path):
    out = tmp_path / "out"
    invoke("sweep", file, "--trust-code", "--output", out)
    before = file.read_text()
    file.write_text(before.replace("0.3k", "0.4k"))
    refused = invoke("sweep", file, "--trust-code", "--output", out)
    assert refused.exit_code == 1
    assert "belongs to a sweep with other settings" in refused.stderr
    assert "target_params: 300 -> 400" in refused.stderr
    file.write_text(before.replace("[basis]", "[basis, baseline]"))
    more = invoke("sweep", file, "--trust-code", "--output", out, "--json")
    rows = [(row["dataset"], row["framework"], row["attempts"]) for row in json.loads(more.stdout)]
    assert rows[:2] == [("photos", "basis", 0), ("photos", "baseline", 1)]


def test_a_bad_file_is_an_error_with_its_places(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("models: [a]\ndatset: [x]\n")
    done = invoke("sweep", path, "--output", tmp_path / "out")
    assert done.exit_code == 1
    assert "datset: no such setting. Did you mean 'datasets'?" in done.stderr


def test_without_ray_the_extra_is_named(file, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    done = invoke("sweep", file, "--trust-code", "--output", tmp_path / "out", "--ray-address", "auto")
    assert done.exit_code == 1
    assert "basisprune[ray]" in done.stderr
