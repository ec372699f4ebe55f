"""Laws of a training that is killed or goes wrong: it ends in the same weights, or keeps its last good state."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time

import pytest
import torch
from tiny import differing, tiny_decomposed, tiny_images, tiny_model, tiny_training

import basisprune.training.trainer
from basisprune.data import Augment
from basisprune.errors import CheckpointError, TrainingError
from basisprune.training.evaluation import Evaluation
from basisprune.training.loop import fit

pytestmark = pytest.mark.usefixtures("one_thread")


PHOTOGRAPHS = Augment(flip=True, crop=0.5, colour=0.3, policy="rand", mixup=0.5, cutmix=1.0)


class Killed(BaseException):
    pass


def killed_after(epochs: int, monkeypatch) -> None:
    """From now on a run dies in the middle of the epoch after so many."""
    original = basisprune.training.trainer.Trainer._step
    steps = iter(range(3 * epochs + 1))

    def step(self, *args):
        if next(steps, None) is None:
            raise Killed
        return original(self, *args)

    monkeypatch.setattr(basisprune.training.trainer.Trainer, "_step", step)


@pytest.mark.parametrize("settings", [
    {"optimizer": "sgd", "augmentation": Augment(shift=0.1, flip=True)},
    {"optimizer": "adamw", "lr": 0.01, "norm_statistics": "fixed", "warmup": 0.2},
    {"optimizer": "adamw", "lr": 0.01, "train": "all", "head_first": 0.5, "warmup": 0.2, "clip_norm": 1.0},
    {"optimizer": "sgd", "train": "all", "weight_lr": 0.1},
    {"optimizer": "adamw", "lr": 0.02, "train": "all", "augmentation": PHOTOGRAPHS, "patience": 2},
])  # fmt: skip
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_killed_run_ends_in_the_same_weights(settings, epochs, monkeypatch, tmp_path):
    config, data, val = tiny_training(**settings), tiny_images(), tiny_images(9, seed=1)
    expected = fit(tiny_decomposed(), data, val, config, checkpoint=tmp_path / "whole.pt")
    path = tmp_path / "killed.pt"
    with monkeypatch.context() as patch:
        killed_after(epochs, patch)
        with pytest.raises(Killed):
            fit(tiny_decomposed(), data, val, config, checkpoint=path)
    torch.randn(5)
    resumed = fit(tiny_decomposed(), data, val, config, checkpoint=path)
    assert not differing(resumed.model, expected.model)
    assert resumed.history == expected.history
    states = [torch.load(file, weights_only=True)["optimizer"]["state"] for file in (path, tmp_path / "whole.pt")]
    assert all(torch.equal(states[0][key][part], value[part]) for key, value in states[1].items()
               for part in value if part != "step")  # fmt: skip


@pytest.mark.parametrize("killed", [1, 2, 3])
def test_a_run_that_is_killed_before_it_stops_early_has_the_same_best_weights(killed, monkeypatch, tmp_path):
    accuracies = [0.3, 0.9, 0.5, 0.4, 0.95]  # it stops after the fourth, with the weights of the second
    config = tiny_training(epochs=5, train="all", optimizer="adamw", augmentation=PHOTOGRAPHS, patience=2, lr=0.01)

    def run(path):
        return fit(tiny_decomposed(), tiny_images(), tiny_images(9), config, checkpoint=path)

    def judged_from(epoch):
        left = (Evaluation(1.0, accuracy, 9) for accuracy in accuracies[epoch:])
        monkeypatch.setattr(basisprune.training.trainer, "evaluate", lambda *_, **__: next(left))

    judged_from(0)
    expected = run(tmp_path / "whole.pt")
    judged_from(0)
    with monkeypatch.context() as patch:
        killed_after(killed, patch)
        with pytest.raises(Killed):
            run(tmp_path / "killed.pt")
    judged_from(killed)
    resumed = run(tmp_path / "killed.pt")
    assert not differing(resumed.model, expected.model)
    assert resumed.history == expected.history
    assert len(resumed.history) == 4
    last = torch.load(tmp_path / "killed.pt", weights_only=True)["model"]
    assert any(not torch.equal(value, resumed.model.state_dict()[key]) for key, value in last.items())
    killed_after(0, monkeypatch)  # nothing is left to train
    assert not differing(run(tmp_path / "killed.pt").model, expected.model)


def test_a_finished_run_is_not_trained_again(monkeypatch, tmp_path):
    config, path = tiny_training(), tmp_path / "run.pt"
    done = fit(tiny_decomposed(), tiny_images(), None, config, checkpoint=path)
    killed_after(0, monkeypatch)
    again = fit(tiny_decomposed(seed=3), tiny_images(), None, config, checkpoint=str(path))
    assert not differing(again.model, done.model)
    assert again.history == done.history


SLOW_RUN = """
import sys, time
import torch
import basisprune.training.loop
import basisprune.training.trainer
from tiny import tiny_decomposed, tiny_images, tiny_training

torch.set_num_threads(1)
step = basisprune.training.trainer.Trainer._step
basisprune.training.trainer.Trainer._step = lambda self, *args: (time.sleep(0.2), step(self, *args))[1]
basisprune.training.loop.fit(tiny_decomposed(), tiny_images(), None, tiny_training(epochs=6), checkpoint=sys.argv[1])
"""


def test_a_process_that_is_killed_goes_on_to_the_same_weights(tmp_path):
    path = tmp_path / "run.pt"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", SLOW_RUN, str(path)], env=environment)
    try:
        while not path.exists():
            assert process.poll() is None, "the process ended before it could be killed"
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    done = torch.load(path, weights_only=True)["history"].count('"epoch"')
    assert 1 <= done < 6
    config = tiny_training(epochs=6)
    resumed = fit(tiny_decomposed(), tiny_images(), None, config, checkpoint=path)
    expected = fit(tiny_decomposed(), tiny_images(), None, config)
    assert not differing(resumed.model, expected.model)
    assert resumed.history == expected.history


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = tmp_path / "run.pt"
    fit(tiny_decomposed(), tiny_images(), None, tiny_training(epochs=1), checkpoint=path)
    with pytest.raises(CheckpointError, match="another configuration"):
        fit(tiny_decomposed(), tiny_images(), None, tiny_training(epochs=2), checkpoint=path)
    with pytest.raises(CheckpointError, match="another network"):
        fit(tiny_model(), tiny_images(), None, tiny_training(epochs=1), checkpoint=path)


@pytest.mark.parametrize("place", [10, 5000, -100, -10])
def test_a_damaged_checkpoint_is_set_aside_and_the_training_ends_in_the_same_weights(place, tmp_path, caplog):
    path, config = tmp_path / "run.pt", tiny_training(epochs=2)
    expected = fit(tiny_decomposed(), tiny_images(), None, config, checkpoint=path)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 16
    path.write_bytes(damaged)
    again = fit(tiny_decomposed(), tiny_images(), None, config, checkpoint=path)
    assert not differing(again.model, expected.model)
    assert (tmp_path / "run.pt.damaged").read_bytes() == damaged
    assert "run.pt.damaged, and is made again" in caplog.text


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoint(monkeypatch, tmp_path):
    path, config = tmp_path / "run.pt", tiny_training()
    with monkeypatch.context() as patch:
        killed_after(1, patch)
        with pytest.raises(Killed):
            fit(tiny_decomposed(), tiny_images(), None, config, checkpoint=path)
    before = path.read_bytes()
    original = basisprune.training.lessons.prepare
    monkeypatch.setattr(basisprune.training.lessons, "prepare", lambda *a, **k: original(*a, **k) * math.nan)
    with pytest.raises(TrainingError, match="epoch 1, step 0: the loss is nan at learning rate"):
        fit(tiny_decomposed(), tiny_images(), None, config, checkpoint=path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_weights_that_are_not_finite_never_reach_a_checkpoint(monkeypatch, tmp_path):
    path = tmp_path / "run.pt"
    original = basisprune.training.trainer.project_scales

    def explode(model):  # as an infinite gradient in an epoch's last step would do
        original(model)
        model.classifier.bias.data[0] = math.inf

    monkeypatch.setattr(basisprune.training.trainer, "project_scales", explode)
    with pytest.raises(TrainingError, match=r"epoch 0: weights are no longer finite .* lower lr"):
        fit(tiny_decomposed(), tiny_images(16), None, tiny_training(), checkpoint=path)
    assert not path.exists()
