"""Each framework of the paper, from end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import Notes, differing, tiny_images, tiny_model, tiny_recipe, tiny_training

from basisprune.basis.layers import BasisPair
from basisprune.callback import Callback, NullCallback, TrainingStep
from basisprune.costs import measure
from basisprune.data import Splits, load_data, take
from basisprune.demo import demo_data, demo_model
from basisprune.errors import ConfigError, DataError
from basisprune.method.pipeline import Pipeline
from basisprune.recipes import FRAMEWORKS, Recipe
from basisprune.report import framework_table
from basisprune.training.evaluation import evaluate
from basisprune.types import BasisPlan, FilterPlan

pytestmark = pytest.mark.usefixtures("one_thread")


def recipe(name: str = "quick") -> Recipe:
    return tiny_recipe(tiny_training(epochs=1), name)


@pytest.fixture(scope="module")
def embedded() -> Pipeline:
    """The embedded default with 100 digits at 32x32, shared so that the frameworks share their starts."""
    digits = demo_data()
    parts = (take(part, range(0, len(part), len(part) // count)) for part, count in
             ((digits.train, 60), (digits.val, 20), (digits.test, 20)))  # fmt: skip
    torch.manual_seed(0)
    return Pipeline(demo_model(input_size=32), Splits(*parts, digits.classes), recipe())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_runs_on_the_embedded_default(framework, embedded):
    result = embedded.run(framework, basis_ratio=0.4, filter_ratio=0.2)
    kinds = [type(plan) for plan in result.plans]
    axes = [axis for move in FRAMEWORKS[framework].moves for axis in move.axes]
    assert kinds == [BasisPlan if axis == "basis" else FilterPlan for axis in axes]
    assert any(isinstance(module, BasisPair) for module in result.model.modules()) == ("basis" in axes)
    for plan in result.plans:
        asked = 0.4 if isinstance(plan, BasisPlan) else 0.2
        assert plan.removed == pytest.approx(asked * plan.total, abs=20)
    costs = [stage.parameters for stage in result.stages]
    pruned = [stage.parameters for stage in result.stages if "," in stage.name]  # after the first step
    assert pruned == sorted(pruned, reverse=True)
    assert measure(result.model).parameters == costs[-1]
    assert result.test_accuracy == evaluate(result.model, embedded.splits.test).accuracy


def test_frameworks_share_their_starting_points():
    notes = Notes()
    data = load_data(tiny_images(90), val_fraction=0.2, test_fraction=0.2)
    pipeline = Pipeline(tiny_model(), data, recipe(), callback=notes)
    results = [pipeline.run(framework, basis_ratio=0.3, filter_ratio=0.2) for framework in FRAMEWORKS]
    trainings = [line for line in notes.lines if ": training, " in line]
    # dense, four ways to prune its filters, basis, four ways to prune filters on top, filters and basis at once
    assert len(trainings) == 11
    starts = {
        result.framework: [stage for stage in result.stages if stage.name in ("dense", "decomposed")]
        for result in results
    }
    assert starts["l1"] == starts["taylor"] == starts["hrank"] == starts["baseline"]
    assert starts["basis+taylor"] == starts["basis+hrank"] == starts["basis+l1"] == starts["basis"]
    table = framework_table(results)
    assert all(line.startswith(name) for name, line in zip(FRAMEWORKS, table.splitlines()[2:], strict=True))


@pytest.mark.parametrize(("asked", "set_apart"), [(None, 39), (10, 10), (1000, 19)])
def test_images_that_score_are_set_apart_from_those_that_judge(asked, set_apart):
    data = load_data(tiny_images(200), val_fraction=0.2)
    pipeline = Pipeline(tiny_model(), data, replace(recipe("paper"), score_images=asked))
    judging, scoring = (
        {image.numpy().tobytes() for image, _ in part} for part in (pipeline.val, pipeline.scoring.images)
    )
    everything = {image.numpy().tobytes() for image, _ in data.val}
    assert len(pipeline.scoring.images) == set_apart
    assert judging | scoring == everything
    assert judging & scoring == (everything if asked is None else set())
    assert len(pipeline.dense().outcomes.hits) == len(pipeline.val)


def test_batches_that_score_mix_the_classes_of_sorted_images():
    images = tiny_images(120)
    val = take(images, np.argsort(images.labels, kind="stable"))
    pipeline = Pipeline(tiny_model(), Splits(images, val, None, images.classes), replace(recipe(), score_batch=8))
    assert all(len(labels.unique()) > 1 for _, labels in pipeline.scoring.batches())


def test_a_single_validation_image_cannot_both_score_and_judge():
    images = tiny_images(40)
    data = Splits(images, take(images, [0]), None, images.classes)
    with pytest.raises(DataError, match="1 validation image; score_images needs another"):
        Pipeline(tiny_model(), data, replace(recipe(), score_images=10))


def test_several_iterations_remove_as_much_in_all():
    data = load_data(tiny_images(90), val_fraction=0.2, test_fraction=0.2)
    pipeline = Pipeline(tiny_model(), data, recipe())
    once = pipeline.run("basis+taylor", basis_ratio=0.5, filter_ratio=0.4)
    twice = pipeline.run("basis+taylor", basis_ratio=0.5, filter_ratio=0.4, iterations=2)
    assert len(twice.plans) == 4
    for kind in (BasisPlan, FilterPlan):
        (whole,) = [plan.removed for plan in once.plans if isinstance(plan, kind)]
        assert abs(sum(plan.removed for plan in twice.plans if isinstance(plan, kind)) - whole) <= 1


class Killed(BaseException):
    pass


class Killer(NullCallback):
    """Ends the run for good after so many batches of training."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def trained(self, step: TrainingStep) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


def test_a_killed_comparison_goes_on_and_ends_in_the_same_weights(tmp_path):
    data = load_data(tiny_images(90), val_fraction=0.2, test_fraction=0.2)
    longer = tiny_recipe(tiny_training(epochs=2))

    def final(folder: Path | None, callback: Callback) -> torch.nn.Module:
        return Pipeline(tiny_model(), data, longer, checkpoints=folder, callback=callback).run("basis+taylor").model

    expected = final(None, NullCallback())
    batches = 2 * -(-54 // 16)
    for least in (1, batches // 2 + 1, batches):  # in each of three trainings: at once, in the next epoch, in its last
        with pytest.raises(Killed):
            final(tmp_path, Killer(least))
    assert not differing(final(tmp_path, NullCallback()), expected)


def test_a_misspelt_framework_is_answered_with_the_nearest():
    pipeline = Pipeline(tiny_model(), load_data(tiny_images(90), val_fraction=0.2), recipe())
    with pytest.raises(ConfigError, match=r"Did you mean 'basis\+taylor'"):
        pipeline.run("basis+tailor")
    with pytest.raises(ConfigError, match="iterations: 0 given"):
        pipeline.run("basis", iterations=0)
