"""Laws of a run shared by two processes: both train the same network and come to the same results."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from networks import NETWORKS
from tiny import tiny_decomposed, tiny_images

from basisprune.torchkit.moments import loss_statistics
from basisprune.training.evaluation import evaluate

SCRIPT = """
import sys
import torch
torch.set_num_threads(1)
from basisprune import Pipeline, Recipe, evaluate, fit
from tiny import tiny_decomposed, tiny_images, tiny_model, tiny_training, with_idle_norm

config = tiny_training(epochs=2, norm_statistics="fixed")
result = fit(tiny_decomposed(), tiny_images(), tiny_images(9, seed=1), config, checkpoint=sys.argv[1] + "/fit.pt")
evaluation = evaluate(result.model, tiny_images(10, seed=2))
recipe = Recipe("outputs", 1.0, "mean", config, config)
data = (tiny_images(), tiny_images(9, seed=1), tiny_images(9, seed=2))
pipeline = Pipeline(tiny_model(), data, recipe, sys.argv[1] + "/run")
pruned = pipeline.run("basis+taylor", basis_ratio=0.5, filter_ratio=0.3)
idle = fit(with_idle_norm(), tiny_images(), None, tiny_training(epochs=2))
state = {"fit": result.model.state_dict(), "pruned": pruned.model.state_dict(), "idle": idle.model.state_dict()}
state |= {"accuracy": evaluation.accuracy, "count": evaluation.count, "processes": torch.distributed.get_world_size()}
torch.save(state, f"{sys.argv[1]}/{sys.argv[2]}.pt")
"""

TOGETHER = """
import sys
import torch
torch.set_num_threads(1)
from networks import NETWORKS
from basisprune.errors import ProcessError
from basisprune.torchkit.moments import loss_statistics
from basisprune.torchkit.processes import Processes

processes = Processes.joined()
model, x = NETWORKS["residual"]()
batches = [[(x, torch.tensor([0, 1]))], [(2 * x - 1, torch.tensor([3, 2]))]]
found = loss_statistics(model, ["conv1", "conv3"], batches[int(sys.argv[2])])
state = {name: vars(one) for name, one in found.items()}
alone = []
told = processes.from_main(lambda: alone.append(Processes.here().count) or b"a plan")
try:
    processes.on_main(lambda: 1 / 0)
except (ZeroDivisionError, ProcessError) as error:
    said = f"{type(error).__name__}: {error}"
layer = torch.nn.Linear(2, 2)
processes.agree(layer)
shares = [processes.share(list(range(count))) for count in (5, 1)]
state |= {"told": told.decode(), "alone": alone, "said": said, "weight": layer.weight.detach(), "shares": shares}
torch.save(state, f"{sys.argv[1]}/{sys.argv[2]}.pt")
"""

LONELY = """
import os
import signal
import sys
import torch
from basisprune.errors import ProcessError
from basisprune.torchkit.processes import Processes

processes = Processes.joined()
processes.wait()
if not processes.is_main:
    os.kill(os.getpid(), signal.SIGKILL)
said = []
for work in (lambda: processes.sum(torch.ones(3)), lambda: processes.on_main(lambda: None)):
    try:
        work()
    except ProcessError as error:
        said.append(str(error))
torch.save({"said": said}, f"{sys.argv[1]}/0.pt")
os._exit(0)
"""


# Without it, one process may still be listening to the other when it exits, which torch answers with an abort.
END = """
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def start_both(folder: Path, script: str) -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    shared |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    return [
        subprocess.Popen(
            [sys.executable, "-c", script, str(folder), str(rank)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def run_both(folder: Path, script: str = SCRIPT) -> list[dict]:
    runs = start_both(folder, script + END)
    faults = [run.communicate(timeout=300)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], faults
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_end_with_one_network(tmp_path):
    first, second = run_both(tmp_path)
    for stage in ("fit", "pruned", "idle"):
        assert first[stage].keys() == second[stage].keys()
        for name, value in first[stage].items():
            torch.testing.assert_close(value, second[stage][name], rtol=0, atol=0)
    assert first["processes"] == second["processes"] == 2
    alone = tiny_decomposed()
    alone.load_state_dict(first["fit"])
    assert first["accuracy"] == second["accuracy"] == evaluate(alone, tiny_images(10, seed=2)).accuracy
    assert first["count"] == second["count"] == 10
    assert (tmp_path / "fit.pt").exists()


def test_who_is_left_by_the_others_does_not_wait_for_them(tmp_path):
    runs = start_both(tmp_path, LONELY)
    faults = [run.communicate(timeout=60)[1] for run in runs]
    assert runs[0].returncode == 0, faults
    said = torch.load(tmp_path / "0.pt", weights_only=True)["said"]
    assert len(said) == 2
    assert all(line.startswith("another process of this run has ended or does not answer") for line in said)


def test_both_know_what_both_saw_and_what_the_main_one_did_alone(tmp_path):
    first, second = run_both(tmp_path, TOGETHER)
    model, x = NETWORKS["residual"]()
    whole = loss_statistics(model, ["conv1", "conv3"], [(x, torch.tensor([0, 1])), (2 * x - 1, torch.tensor([3, 2]))])
    for name, found in whole.items():
        for part, value in vars(found).items():
            torch.testing.assert_close(first[name][part], value)
            torch.testing.assert_close(first[name][part], second[name][part], rtol=0, atol=0)
    assert first["told"] == second["told"] == "a plan"
    assert (first["alone"], second["alone"]) == ([1], [])
    assert first["said"] == "ZeroDivisionError: division by zero"
    assert second["said"] == "ProcessError: the main process has ended: ZeroDivisionError: division by zero"
    assert torch.equal(first["weight"], second["weight"])
    assert (first["shares"], second["shares"]) == ([[0, 2, 4], [0]], [[1, 3], [0]])
