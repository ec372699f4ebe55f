"""Laws of `compress` under torchrun: several processes come to what one comes to, and none waits for a dead one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_images, tiny_model, tiny_recipe, tiny_training
from torch import nn

from basisprune.data import Splits
from basisprune.deploy.bundle import load_bundle
from basisprune.files import parse_json, read_checked
from basisprune.results import RunSummary
from basisprune.runs.compress import Compressed, compress
from basisprune.training.evaluation import predict

pytestmark = pytest.mark.usefixtures("one_thread")

SCRIPT = """
import os, signal, sys
import torch
torch.set_num_threads(1)
from test_distributed import compressed
from basisprune.training import trainer

folder, dies_at, seen = sys.argv[1], int(sys.argv[2]), 0
evaluate = trainer.evaluate

def mortal(*args, **options):
    global seen
    seen += 1
    if seen == dies_at and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return evaluate(*args, **options)

trainer.evaluate = mortal
result = compressed(folder + "/run")
if not dies_at:
    torch.save(result.model.state_dict(), f"{folder}/{os.environ['RANK']}.pt")
"""


def compressed(output: Path | str) -> Compressed:
    """The tiny network without half of its basis vectors and some filters, by scores of several batches."""
    parts = tiny_images(384), tiny_images(300, seed=1), tiny_images(30, seed=2)
    splits = Splits(*parts, parts[0].classes)
    recipe = tiny_recipe(tiny_training(epochs=2, batch_size=64, norm_statistics="fixed"))
    ratios = {"basis_ratio": 0.5, "filter_ratio": 0.3, "framework": "basis+taylor"}
    return compress(tiny_model(), splits, output=output, recipe=recipe, onnx=False, **ratios)


def torchrun(folder: Path, dies_at: int = 0) -> subprocess.CompletedProcess[str]:
    """Both processes, which have to end within a minute after one of them dies."""
    (folder / "script.py").write_text(SCRIPT)
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), os.environ.get("PYTHONPATH", "")]
    shared = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, str(folder / "script.py"), str(folder), str(dies_at)]
    return subprocess.run(
        command, env=os.environ | shared, capture_output=True, text=True, timeout=300, check=False, cwd=folder
    )


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The folder of one process."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("alone") / "run"
    compressed(folder)
    return folder


def kept(folder: Path) -> dict[str, object]:
    """What each plan of the run keeps; the scores beside it may differ in their last digits."""
    files = sorted((folder / "candidates").glob("*.plan.json"))
    found = {path.name: parse_json(read_checked(path)) for path in files}
    return {name: _kept(plan) for name, plan in found.items()}


def _kept(value: object) -> object:
    """The lists of what is kept, wherever they are in a plan."""
    if not isinstance(value, dict):
        return None
    return {key: each if key == "keep" else _kept(each) for key, each in value.items()}


def assert_same_weights(loaded: nn.Module, expected: nn.Module) -> None:
    """The weights agree within a tolerance; basis vectors up to their sign, which their other half has too."""
    found, wanted = dict(loaded.state_dict()), expected.state_dict()
    assert found.keys() == wanted.keys()
    for name in [name for name in wanted if name.endswith("basis.weight")]:
        other = name.replace("basis.weight", "scaling.weight")
        signs = (found[name] * wanted[name]).flatten(1).sum(1).sign()
        found[name] = found[name] * signs.view(-1, 1, 1, 1)
        found[other] = found[other] * signs.view(1, -1, 1, 1)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4, msg=lambda text, at=name: f"{at}: {text}")


def test_two_processes_plan_as_one_does_and_write_one_folder_that_loads(alone, tmp_path):
    ended = torchrun(tmp_path)
    assert ended.returncode == 0, ended.stderr
    summary = RunSummary.read(tmp_path / "run" / "summary.json")
    loaded = load_bundle(tmp_path / "run" / "model").model
    assert kept(tmp_path / "run") == kept(alone)
    assert_same_weights(loaded, load_bundle(alone / "model").model)
    states = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name, value in loaded.state_dict().items():
        assert torch.equal(states[0][name], states[1][name]), name
        assert torch.equal(states[0][name], value), name
    hits = predict(loaded, tiny_images(300, seed=1)).hits
    assert summary.chosen is not None
    assert summary.chosen.accuracy == hits.mean()
    assert not list((tmp_path / "run").rglob("*.damaged"))


def test_a_process_that_dies_ends_the_run_with_an_error_and_the_run_resumes(alone, tmp_path):
    ended = torchrun(tmp_path, dies_at=3)
    assert ended.returncode != 0
    assert f"Signal {signal.SIGKILL.value} (SIGKILL)" in ended.stderr
    assert not (tmp_path / "run" / "summary.json").exists()
    again = torchrun(tmp_path)
    assert again.returncode == 0, again.stderr
    loaded, expected = (load_bundle(folder / "model").model for folder in (tmp_path / "run", alone))
    assert_same_weights(loaded, expected)
