"""Laws of basis pruning from end to end, on a network and images that train in a second."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny import Notes, differing, tiny_images, tiny_model, tiny_recipe, tiny_training

import basisprune.training.trainer
from basisprune.basis.layers import basis_pairs
from basisprune.callback import TrainingStep
from basisprune.costs import measure
from basisprune.data import Splits, load_data
from basisprune.errors import CheckpointError, ConfigError, DataError, PlanError
from basisprune.method.pipeline import Pipeline, run
from basisprune.method.states import NOT_AT_ALL, Tuning
from basisprune.recipes import BASIS, RECIPES, Recipe
from basisprune.training.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")


def recipe(name: str = "quick", **settings) -> Recipe:
    training = tiny_training(epochs=2, norm_statistics=RECIPES[name].train.norm_statistics)
    return replace(tiny_recipe(training, name), **settings)


class TrainingNotes(Notes):
    """Remembers how the training went, too."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: set[float] = set()
        self.shares: list[float] = []

    def trained(self, step: TrainingStep) -> None:
        self.epochs.add(step.epochs_here)
        self.shares.append(step.share)


def data() -> Splits:
    return load_data(tiny_images(90), val_fraction=0.2, test_fraction=0.2)


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return not differing(one, other)


@pytest.mark.parametrize("name", RECIPES)
def test_basis_pruning_removes_what_was_asked_and_tells_its_story(name):
    model, notes = tiny_model(), TrainingNotes()
    before = copy.deepcopy(model)
    result = Pipeline(model, data(), recipe(name), callback=notes).run("basis", basis_ratio=0.4)
    assert same_weights(model, before)
    (plan,) = result.plans
    assert (plan.removed, plan.total, plan.pruning_ratio) == (8, 20, 0.4)
    assert sum(pair.rank for pair in basis_pairs(result.model).values()) == 12
    *starts, untuned, tuned = result.stages
    decomposed = starts[-1]
    on_trained = recipe(name).basis == "loss"
    assert [stage.name for stage in starts] == ["dense"] * on_trained + ["decomposed"]
    assert [len(stage.history) for stage in result.stages] == [2] + [0] * on_trained + [0, 2]
    assert untuned.name.endswith("not tuned")
    assert tuned.parameters == untuned.parameters < decomposed.parameters
    assert tuned.macs == untuned.macs < decomposed.macs
    report = measure(result.model)
    assert (report.parameters, report.trainable, report.macs) == (tuned.parameters, tuned.trainable, tuned.macs)
    assert tuned.accuracy == pytest.approx(tuned.history[-1].val_accuracy)
    assert result.test_accuracy == evaluate(result.model, data().test).accuracy
    assert "removing 8 of 20 basis vectors" in notes.lines
    assert (notes.epochs, notes.shares[-1], notes.shares.count(1.0)) == ({2.0}, 1.0, 2)  # both trainings


def test_the_pruned_network_still_knows_the_classes():
    longer = replace(recipe().train, epochs=6)
    result = run(
        "basis", tiny_model(), data(), basis_ratio=0.5, recipe=replace(recipe(), train=longer, finetune=longer)
    )
    assert result.test_accuracy == 1


def test_several_iterations_remove_the_same_in_all():
    result = run("basis", tiny_model(), data(), basis_ratio=0.5, recipe=recipe(), iterations=2)
    assert [plan.removed for plan in result.plans] == [5, 5]


def test_what_frameworks_share_is_trained_once(monkeypatch):
    calls = []
    original = basisprune.method.pipeline.fit
    monkeypatch.setattr(basisprune.method.pipeline, "fit", lambda *a, **k: calls.append(1) or original(*a, **k))
    pipeline = Pipeline(tiny_model(), data(), recipe())
    one, two = pipeline.run("basis", basis_ratio=0.3), pipeline.run("basis", basis_ratio=0.6)
    assert len(calls) == 3
    assert one.stages[0] == two.stages[0]
    alone = run("basis", tiny_model(), data(), basis_ratio=0.6, recipe=recipe())
    assert same_weights(alone.model, two.model)


class Killed(BaseException):
    pass


@pytest.mark.parametrize("steps", [1, 7, 13])
def test_a_killed_run_goes_on_to_the_same_network(steps, monkeypatch, tmp_path):
    arguments = {"basis_ratio": 0.5, "recipe": recipe()}
    expected = run("basis", tiny_model(), data(), checkpoints=tmp_path / "whole", **arguments)
    original, left = basisprune.training.trainer.Trainer._step, iter(range(steps))

    def step(self, *args):
        if next(left, None) is None:
            raise Killed
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(basisprune.training.trainer.Trainer, "_step", step)
        with pytest.raises(Killed):
            run("basis", tiny_model(), data(), checkpoints=tmp_path / "killed", **arguments)
    resumed = run("basis", tiny_model(), data(), checkpoints=tmp_path / "killed", **arguments)
    assert same_weights(resumed.model, expected.model)
    assert (resumed.stages, resumed.plans) == (expected.stages, expected.plans)


def test_a_folder_of_another_run_is_refused(tmp_path):
    def again(**settings):
        own = recipe(**{"basis": "outputs", **settings})
        return run("basis", tiny_model(), data(), basis_ratio=0.5, checkpoints=tmp_path, recipe=own)

    first = again()
    assert same_weights(again().model, first.model)
    plan, longer = replace(recipe().plan, normalise="max"), replace(recipe().train, epochs=3)
    others = {"plan": plan, "basis": "weights", "scale_init": 0.5, "compensate": "none", "train": longer}
    for name, value in others.items():
        with pytest.raises(CheckpointError, match="use another"):
            again(**{name: value})
    with pytest.raises(CheckpointError, match="use another"):
        run(
            "basis",
            tiny_model(),
            tiny_images(60),
            basis_ratio=0.5,
            checkpoints=tmp_path,
            recipe=recipe(basis="outputs"),
        )
    assert same_weights(again().model, first.model)


def test_another_ratio_may_share_the_folder_and_its_first_training(tmp_path):
    half = run("basis", tiny_model(), data(), basis_ratio=0.5, checkpoints=tmp_path, recipe=recipe())
    more = run("basis", tiny_model(), data(), basis_ratio=0.75, checkpoints=tmp_path, recipe=recipe())
    alone = run("basis", tiny_model(), data(), basis_ratio=0.75, recipe=recipe())
    assert half.stages[0] == more.stages[0]
    assert same_weights(more.model, alone.model)


def test_data_that_does_not_fit_is_refused_before_anything_is_trained():
    two = Splits(tiny_images(9), tiny_images(9), None, ("red", "green"))
    with pytest.raises(DataError, match=r"the data has 2 classes .* the model has 3"):
        Pipeline(tiny_model(), two)
    with pytest.raises(DataError, match="no validation images"):
        Pipeline(tiny_model(), Splits(tiny_images(9), None, None, ("a", "b", "c")))


def test_wrong_settings_are_refused_with_what_is_allowed():
    pipeline = Pipeline(tiny_model(), data(), recipe())
    with pytest.raises(ConfigError, match=r"'basic' given.*Did you mean 'basis'"):
        pipeline.run("basic")
    with pytest.raises(ConfigError, match="iterations: 0 given"):
        pipeline.run("basis", iterations=0)
    with pytest.raises(PlanError, match=r"0\.99 would remove 20 of 20"):
        pipeline.run("basis", basis_ratio=0.99)
    with pytest.raises(ConfigError, match="Did you mean 'quick'"):
        Pipeline(tiny_model(), data(), "quik")


def test_data_without_test_images_has_no_test_accuracy():
    splits = replace(data(), test=None)
    assert run("basis", tiny_model(), splits, basis_ratio=0.5, recipe=recipe()).test_accuracy is None


def test_a_folder_of_other_weights_or_another_split_is_refused(tmp_path):
    Pipeline(tiny_model(), data(), recipe(), checkpoints=tmp_path).run("baseline")
    with pytest.raises(CheckpointError, match="other settings, weights or images"):
        Pipeline(tiny_model(seed=1), data(), recipe(), checkpoints=tmp_path).run("baseline")
    other_split = load_data(tiny_images(90), val_fraction=0.2, test_fraction=0.2, seed=5)
    with pytest.raises(CheckpointError, match="other settings, weights or images"):
        Pipeline(tiny_model(), other_split, recipe(), checkpoints=tmp_path).run("baseline")


def test_ratios_that_differ_a_little_are_different_runs():
    pipeline = Pipeline(tiny_model(), data(), recipe())
    one = pipeline.run("basis", basis_ratio=0.37499)
    other = pipeline.run("basis", basis_ratio=0.37501)
    assert one.plans[0].removed == 7
    assert other.plans[0].removed == 8
    assert other.plans[0].fraction_removed == 0.4


def test_a_plan_on_disk_that_is_damaged_is_set_aside_and_made_again(tmp_path):
    def once():
        return run("basis", tiny_model(), data(), basis_ratio=0.5, checkpoints=tmp_path, recipe=recipe())

    before = once()
    (plan,) = tmp_path.glob("*.plan.json")
    whole = plan.read_bytes()
    plan.write_bytes(whole[:40])
    assert once().plans == before.plans
    assert plan.read_bytes() == whole
    assert plan.with_name(f"{plan.name}.damaged").read_bytes() == whole[:40]


def test_many_iterations_have_files_with_names_that_a_disk_takes(tmp_path):
    pruned = run("basis", tiny_model(), data(), basis_ratio=0.5, iterations=8, checkpoints=tmp_path, recipe=recipe())
    assert len(pruned.plans) == 8
    assert max(len(path.name) for path in tmp_path.iterdir()) < 255


def test_a_network_that_was_tuned_for_less_is_tuned_on_for_more():
    pipeline = Pipeline(tiny_model(), data(), recipe())
    start = pipeline.decomposed()
    assert not pipeline.prune_basis(start, 0.5, NOT_AT_ALL).stages[-1].history
    hopeless = Tuning(hopeless=1.1)  # after one epoch
    first = pipeline.prune_basis(start, 0.5, hopeless)
    assert len(first.stages[-1].history) == 1
    assert pipeline.prune_basis(start, 0.5, hopeless) is first
    assert pipeline.prune_basis(start, 0.5, NOT_AT_ALL) is first
    assert len(pipeline.prune(start, BASIS, 0.5).stages[-1].history) == 2
