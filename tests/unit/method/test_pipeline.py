"""Laws of the pipeline's parts; what it does from end to end is in tests/pipeline."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_images, tiny_model, tiny_recipe, tiny_training
from torch import nn

from basisprune.basis.layers import basis_pairs
from basisprune.budget import Ratios
from basisprune.budget.goal import step_ratio
from basisprune.data import load_data
from basisprune.errors import TooMuchError
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import FULLY, NOT_AT_ALL, Stage, State, Tuning
from basisprune.planning import PlanConfig
from basisprune.recipes import DECOMPOSED, DENSE, FRAMEWORKS, Framework, Move, Recipe, Step
from basisprune.tasks import Predictions

accuracies = st.floats(0, 1)


def pipeline() -> Pipeline:
    return Pipeline(tiny_model(), load_data(tiny_images(60), val_fraction=0.2), tiny_recipe(tiny_training(epochs=1)))


def state(*steps: Step) -> State:
    return State(
        steps, nn.Identity(), (Stage("stage", 0.5, 1, 1, 1),), outcomes=Predictions.of_hits(np.ones(3, dtype=np.bool_))
    )


@given(st.integers(0, 9), accuracies)
def test_full_tuning_never_ends_early_and_none_ends_at_once(epochs, accuracy):
    assert not FULLY.may_end(epochs, accuracy)
    assert NOT_AT_ALL.may_end(epochs, accuracy)


@given(st.integers(0, 9), accuracies, accuracies, accuracies)
def test_tuning_ends_when_it_is_enough_or_after_an_epoch_hopeless(epochs, accuracy, enough, hopeless):
    ends = Tuning(enough, hopeless).may_end(epochs, accuracy)
    assert ends == (accuracy >= enough or (epochs > 0 and accuracy < hopeless))


@given(st.floats(0, 0.99), st.integers(1, 8))
def test_the_steps_of_a_pruning_remove_together_what_was_asked_in_equal_parts(ratio, steps):
    left = [1.0]
    for step in range(steps):
        left.append(left[-1] * (1 - step_ratio(ratio, step, steps)))
    assert left[-1] == pytest.approx(1 - ratio)
    assert np.diff(left) == pytest.approx([-ratio / steps] * steps, abs=1e-12)


def test_a_state_is_named_by_its_steps_and_not_changed_by_the_next_one():
    start = state(DECOMPOSED)
    assert start.after(Step("basis", 0.5)) == (DECOMPOSED, Step("basis", 0.5))
    assert start.steps == (DECOMPOSED,)
    assert state(DECOMPOSED, Step("basis", 0.5)).name == "decomposed, basis 0.5"


@pytest.mark.parametrize("framework", FRAMEWORKS.values(), ids=FRAMEWORKS)
def test_a_network_that_was_trained_elsewhere_is_where_its_frameworks_start(framework):
    given, dense, decomposed = pipeline(), state(DENSE), state(DECOMPOSED)
    for each in (dense, decomposed):
        given.adopt(each)
    assert given.start(framework) is (decomposed if framework.name.startswith("basis") else dense)


def test_a_move_prunes_what_it_counts_by_its_own_scores(monkeypatch):
    given, called = pipeline(), []
    monkeypatch.setattr(given, "prune_basis", lambda *arguments: called.append(("basis", *arguments[1:])))
    monkeypatch.setattr(given, "prune_filters", lambda *arguments: called.append(("filters", *arguments[1:])))
    given.prune(state(DENSE), Move("basis", "basis"), 0.5, NOT_AT_ALL)
    given.prune(state(DENSE), Move("filters", "hrank"), 0.25)
    assert called == [("basis", 0.5, NOT_AT_ALL), ("filters", "hrank", 0.25, FULLY)]
    called.clear()
    given.remove(state(DENSE), Move("both", "loss"), Ratios(0.5, 0.5))
    given.remove(state(DENSE), Move("both", "loss"), Ratios(0.0, 0.25))
    given.remove(state(DENSE), Move("both", "loss"), Ratios(0.75, 0.0))
    assert called == [
        ("filters", "loss", 0.5, NOT_AT_ALL),
        ("basis", 0.5, FULLY),
        ("filters", "loss", 0.25, FULLY),
        ("basis", 0.75, FULLY),
    ]


@pytest.mark.usefixtures("one_thread")
def test_a_framework_of_ones_own_is_run_like_those_of_the_paper():
    own = Framework("filters twice", "dense", (Move("filters", "l1"), Move("filters", "random")))
    result = pipeline().run(own, filter_ratio=0.2)
    assert result.framework == "filters twice"
    assert [stage.name for stage in result.stages][::2] == ["dense", "dense, l1 0.2", "dense, l1 0.2, random 0.2"]
    assert len(result.plans) == 2


@pytest.mark.usefixtures("one_thread")
def test_where_only_one_of_both_can_lose_so_much_the_other_loses_what_it_can():
    given = Pipeline(tiny_model(), load_data(tiny_images(60), val_fraction=0.2), demanding())
    pruned = given.prune(given.dense(), Move("both", "loss"), 0.6, NOT_AT_ALL)
    filters, basis = pruned.plans
    assert 0 < filters.fraction_removed < 0.55
    assert basis.fraction_removed == pytest.approx(0.6, abs=0.1)
    with pytest.raises(TooMuchError):
        given.remove(given.dense(), Move("both", "loss"), Ratios(0.6, 0.6), NOT_AT_ALL)


@pytest.mark.usefixtures("one_thread")
def test_no_network_is_cut_or_scored_twice(monkeypatch):
    recipe = replace(tiny_recipe(tiny_training(epochs=1)), basis="loss", scores="loss", scale_init=1.0)
    recipe = replace(recipe, plan=PlanConfig(min_share=0.5))  # the basis cannot lose as much as the filters
    given = Pipeline(tiny_model(), load_data(tiny_images(60), val_fraction=0.2), recipe)
    scored, cut = [], []
    basis, filters = given.scoring.__class__.basis, given.prune_filters
    monkeypatch.setattr(
        given.scoring.__class__, "basis", lambda self, model: scored.append(model) or basis(self, model)
    )
    monkeypatch.setattr(given, "prune_filters", lambda *asked: cut.append(asked[1:]) or filters(*asked))
    pruned = given.prune(given.dense(), Move("both", "loss"), 0.55, NOT_AT_ALL)
    assert pruned.plans[1].fraction_removed < 0.55
    assert len(scored) == len(cut) == 1


def demanding() -> Recipe:
    """A recipe that keeps half of all filters."""
    recipe = replace(tiny_recipe(tiny_training(epochs=1)), basis="loss", scores="loss", scale_init=1.0)
    return replace(recipe, filter_plan=PlanConfig(min_share=0.5))


@pytest.mark.parametrize(("recipe", "part"), [("quick", "train"), ("best", "train"), ("paper", "val")])
def test_quick_and_best_score_on_no_image_that_judges(recipe, part):
    splits = load_data(tiny_images(60), val_fraction=0.3)
    found = Pipeline(tiny_model(), splits, tiny_recipe(tiny_training(), recipe))
    scoring = {image.numpy().tobytes() for image, _ in found.scoring.images}
    assert scoring <= {image.numpy().tobytes() for image, _ in splits.parts[part]}
    assert len(found.val) == len(splits.val)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("train", ["all", "method"])
def test_only_where_all_weights_learn_a_pair_that_does_not_pay_is_tuned_as_one_layer(train):
    training = tiny_training(epochs=1)
    recipe = replace(tiny_recipe(training), finetune=replace(training, train=train))
    given = Pipeline(tiny_model(), load_data(tiny_images(60), val_fraction=0.2), recipe)
    start = given.decomposed()
    untuned, tuned = (given.prune_basis(start, 0.1, tuning).model for tuning in (NOT_AT_ALL, FULLY))
    assert set(basis_pairs(untuned)) == {"backbone.0", "backbone.3"}
    # 8 x 27 weights as one layer and more as two; rank 10 of 12 pays in the second.
    assert set(basis_pairs(tuned)) == ({"backbone.3"} if train == "all" else {"backbone.0", "backbone.3"})


@pytest.mark.usefixtures("one_thread")
def test_what_was_tuned_as_one_layer_is_pruned_again_from_where_it_was():
    training = tiny_training(epochs=1)
    recipe = replace(tiny_recipe(training, "quick"), finetune=replace(training, train="all"))
    given = Pipeline(tiny_model(), load_data(tiny_images(60), val_fraction=0.2), recipe)
    result = given.run("basis", basis_ratio=0.6, iterations=3)
    first, *others = result.plans
    assert [plan.total for plan in others] == [before.total - before.removed for before in result.plans[:-1]]
    last = result.plans[-1]
    assert last.total - last.removed == pytest.approx(0.4 * first.total, abs=1)


def test_a_network_that_was_good_enough_untuned_is_polished_in_the_form_that_is_deployed():
    training = tiny_training(epochs=1)
    recipe = replace(tiny_recipe(training, "quick"), finetune=replace(training, train="all"))
    given = Pipeline(tiny_model(), load_data(tiny_images(60), val_fraction=0.2), recipe)
    untuned = given.prune_basis(given.decomposed(), 0.1, NOT_AT_ALL)
    assert set(basis_pairs(given.polish(untuned).model)) < set(basis_pairs(untuned.model))


def test_a_network_of_which_nothing_goes_is_tuned_only_if_that_is_asked_for():
    recipe = replace(tiny_recipe(tiny_training(epochs=1), "quick"), plan=PlanConfig(round_to=8))
    given = Pipeline(tiny_model(), load_data(tiny_images(60), val_fraction=0.2), recipe)
    start = given.decomposed()
    until_hopeless = given.prune_basis(start, 0.01, Tuning(hopeless=0.0))
    assert until_hopeless.plans[-1].removed == 0
    assert until_hopeless.stages[-1].history == ()
    assert len(given.prune_basis(start, 0.01, FULLY).stages[-1].history) == 1


def test_a_network_that_lost_filters_alone_is_tuned():
    recipe = replace(tiny_recipe(tiny_training(epochs=1), "quick"), plan=PlanConfig(round_to=8))
    given = Pipeline(tiny_model(), load_data(tiny_images(60), val_fraction=0.2), recipe)
    thinned = given.prune_filters(given.dense(), "loss", 0.3, NOT_AT_ALL)
    assert thinned.plans[-1].removed
    assert given.prune_basis(thinned, 0.01, Tuning(hopeless=0.0)).stages[-1].history
