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
from tiny import tiny_decomposed, tiny_images, tiny_model, tiny_training

config = tiny_training(epochs=2, norm_statistics="fixed")
result = fit(tiny_decomposed(), tiny_images(), tiny_images(9, seed=1), config, checkpoint=sys.argv[1] + "/fit.pt")
evaluation = evaluate(result.model, tiny_images(10, seed=2))
recipe = Recipe("outputs", 1.0, "mean", config, config)
data = (tiny_images(), tiny_images(9, seed=1), tiny_images(9, seed=2))
pipeline = Pipeline(tiny_model(), data, recipe, sys.argv[1] + "/run")
pruned = pipeline.run("basis+taylor", basis_ratio=0.5, filter_ratio=0.3)
state = {"fit": result.model.state_dict(), "pruned": pruned.model.state_dict()}
state |= {"accuracy": evaluation.accuracy, "count": evaluation.count, "processes": torch.distributed.get_world_size()}
torch.save(state, f"{sys.argv[1]}/{sys.argv[2]}.pt")
"""

METRICS = """
import sys
import torch
torch.set_num_threads(1)
from networks import NETWORKS
from basisprune.torchkit.moments import loss_statistics

torch.distributed.init_process_group("gloo")
model, x = NETWORKS["residual"]()
batches = [[(x, torch.tensor([0, 1]))], [(2 * x - 1, torch.tensor([3, 2]))]]
found = loss_statistics(model, ["conv1", "conv3"], batches[int(sys.argv[2])])
torch.save({name: vars(one) for name, one in found.items()}, f"{sys.argv[1]}/{sys.argv[2]}.pt")
"""


# Without it, one process may still be listening to the other when it exits, which torch answers with an abort.
END = """
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""


def run_both(folder: Path, script: str = SCRIPT) -> list[dict]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    paths = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    shared |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script + END, str(folder), str(rank)],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    faults = [run.communicate(timeout=300)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], faults
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


def test_two_processes_end_with_one_network(tmp_path):
    first, second = run_both(tmp_path)
    for stage in ("fit", "pruned"):
        assert first[stage].keys() == second[stage].keys()
        for name, value in first[stage].items():
            torch.testing.assert_close(value, second[stage][name], rtol=0, atol=0)
    assert first["processes"] == second["processes"] == 2
    alone = tiny_decomposed()
    alone.load_state_dict(first["fit"])
    assert first["accuracy"] == second["accuracy"] == evaluate(alone, tiny_images(10, seed=2)).accuracy
    assert first["count"] == second["count"] == 10
    assert (tmp_path / "fit.pt").exists()


def test_the_metric_of_the_loss_is_that_of_the_images_of_both(tmp_path):
    first, second = run_both(tmp_path, METRICS)
    model, x = NETWORKS["residual"]()
    whole = loss_statistics(model, ["conv1", "conv3"], [(x, torch.tensor([0, 1])), (2 * x - 1, torch.tensor([3, 2]))])
    for name, found in whole.items():
        for part, value in vars(found).items():
            torch.testing.assert_close(first[name][part], value)
            assert torch.equal(first[name][part], second[name][part])
