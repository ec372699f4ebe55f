"""Laws of splitting and scoring by the loss, from end to end: the split changes nothing of a trained network."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import Notes, differing, tiny_images, tiny_model, tiny_recipe, tiny_training

import basisprune.method.pipeline
import basisprune.training.trainer
from basisprune.basis.layers import basis_pairs
from basisprune.budget import Ratios
from basisprune.callback import NullCallback
from basisprune.data import Splits, load_data
from basisprune.errors import CheckpointError
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import Tuning
from basisprune.planning import PlanConfig
from basisprune.recipes import DECOMPOSED, Recipe, find_framework
from basisprune.runs.compress import compress

pytestmark = pytest.mark.usefixtures("one_thread")


def recipe(**settings) -> Recipe:
    training = tiny_training(epochs=2, norm_statistics="fixed")
    return replace(tiny_recipe(training), **{"basis": "loss", "scores": "loss", **settings})


def data() -> Splits:
    return load_data(tiny_images(120), val_fraction=0.25, test_fraction=0.25)


class Impatient(NullCallback):
    """Stops a search with the first candidate that was pruned."""

    def judged(self, candidate) -> None:
        if candidate.basis_ratio > 0:
            raise KeyboardInterrupt


def test_the_split_computes_what_the_trained_network_does_and_is_not_trained_again(monkeypatch):
    trained = []
    original = basisprune.method.pipeline.fit
    monkeypatch.setattr(basisprune.method.pipeline, "fit", lambda *a, **k: trained.append(1) or original(*a, **k))
    pipeline = Pipeline(tiny_model(), data(), recipe())
    split, dense = pipeline.decomposed(), pipeline.dense()
    images = torch.randn(8, *pipeline.spec.shape)
    with torch.no_grad():
        assert torch.allclose(split.model.eval()(images), dense.model.eval()(images), atol=1e-5)
    assert (split.outcomes.hits == dense.outcomes.hits).all()
    assert split.stages == (*dense.stages, split.stages[-1])
    assert (split.steps, len(basis_pairs(split.model))) == ((DECOMPOSED,), 2)
    assert pipeline.decomposed() is split
    assert len(trained) == 1
    assert "dense" in {stage.name for stage in split.stages}


@pytest.mark.parametrize("settings", [{}, {"rebase": True}, {"compensate": "none"}, {"scores": "taylor"}])
def test_basis_vectors_go_by_what_the_loss_says(settings):
    result = Pipeline(tiny_model(), data(), recipe(**settings)).run("basis", basis_ratio=0.4)
    (plan,) = result.plans
    assert (plan.removed, plan.total) == (8, 20)
    assert [stage.name for stage in result.stages] == [
        "dense",
        "decomposed",
        "decomposed, basis 0.4, not tuned",
        "decomposed, basis 0.4",
    ]
    assert result.stages[-1].parameters < result.stages[1].parameters


@pytest.mark.parametrize("tuning", [Tuning(), Tuning(hopeless=0.0)])
def test_a_network_from_which_blocks_remove_nothing_is_not_tuned(tuning):
    blocks = PlanConfig(round_to=8)
    pipeline = Pipeline(tiny_model(), data(), recipe(plan=blocks))
    start, move = pipeline.decomposed(), find_framework("loss+basis").moves[0]
    untouched = pipeline.remove(start, move, Ratios(0.01, 0.01), tuning)
    assert [plan.removed for plan in untouched.plans] == [0, 0]
    assert (untouched.tuned, untouched.stages[-1].history) == (0, ())
    pruned = Pipeline(tiny_model(), data(), recipe()).remove(start, move, Ratios(0.4, 0.4), tuning)
    assert (pruned.tuned, len(pruned.stages[-1].history)) == (2, 2)


def test_a_network_that_was_trained_before_is_said_to_be_resumed(tmp_path):
    for expected in ("dense: training, 2 epochs", "dense: going on from its checkpoint, 2 epochs"):
        notes = Notes()
        Pipeline(tiny_model(), data(), recipe(), checkpoints=tmp_path, callback=notes).dense()
        assert expected in notes.lines


def test_the_scores_of_the_loss_see_no_validation_image():
    pipeline = Pipeline(tiny_model(), data(), recipe())
    start = pipeline.decomposed()
    pipeline.scoring = replace(pipeline.scoring, images=None)
    assert pipeline.prune_basis(start, 0.5).plans[0].removed == 10


def search(output=None, **settings):
    options = {"max_drop": 0.02, "recipe": recipe(), "framework": "basis+taylor", "onnx": False}
    return compress(tiny_model(), data(), output=output, **{**options, **settings})


def test_a_search_by_the_loss_ends_within_the_budget_and_goes_on_to_the_same_answer(tmp_path):
    whole = search(tmp_path / "whole")
    assert whole.chosen.passed
    assert whole.chosen.parameters < whole.history[0].parameters
    assert whole.summary.importance
    stopped = search(tmp_path / "stopped", callback=Impatient())
    assert stopped.summary.interrupted
    resumed = search(tmp_path / "stopped")
    assert resumed.history == whole.history
    assert not differing(resumed.trained, whole.trained)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("steps", [1, 9, 15])
def test_a_killed_run_goes_on_to_the_same_network(steps, monkeypatch, tmp_path):
    def once(folder):
        return Pipeline(tiny_model(), data(), recipe(), checkpoints=tmp_path / folder).run("basis", basis_ratio=0.5)

    expected = once("whole")
    original, left = basisprune.training.trainer.Trainer._step, iter(range(steps))

    def step(self, *args):
        if next(left, None) is None:
            raise Killed
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(basisprune.training.trainer.Trainer, "_step", step)
        with pytest.raises(Killed):
            once("killed")
    resumed = once("killed")
    assert not differing(resumed.model, expected.model)
    assert (resumed.stages, resumed.plans) == (expected.stages, expected.plans)


@pytest.mark.parametrize("other", [{"scores": "taylor"}, {"basis": "outputs"}])
def test_a_folder_of_another_basis_or_of_other_scores_is_refused(other, tmp_path):
    Pipeline(tiny_model(), data(), recipe(), checkpoints=tmp_path).run("basis")
    with pytest.raises(CheckpointError, match="other settings"):
        Pipeline(tiny_model(), data(), recipe(**other), checkpoints=tmp_path).run("basis")
