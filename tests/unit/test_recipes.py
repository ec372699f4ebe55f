"""Laws of the settings and presets."""

from __future__ import annotations

import dataclasses
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.data import Augment
from basisprune.errors import ConfigError
from basisprune.importance.filters import FILTER_SCORES
from basisprune.recipes import (
    BASIS,
    DECOMPOSED,
    DENSE,
    FRAMEWORKS,
    PAPER_DATASETS,
    POLISHED,
    RECIPES,
    FrameworkName,
    Move,
    Step,
    find_framework,
    find_recipe,
    named,
)


def test_the_paper_preset_is_the_papers_recipe():
    recipe = RECIPES["paper"]
    assert (recipe.basis, recipe.scale_init, recipe.compensate) == ("weights", 0.5, "none")
    assert (recipe.plan.normalise, recipe.plan.min_share, recipe.plan.min_keep) == ("max", 0.0, 1)
    for config in (recipe.train, recipe.finetune):
        assert (config.epochs, config.batch_size, config.optimizer, config.momentum) == (100, 128, "sgd", 0.9)
        assert (config.lr, config.min_lr, config.warmup, config.weight_decay) == (0.1, 1e-4, 0.0, 0.0)
        assert config.norm_statistics == "batch"
        assert config.augmentation.shift == 0.15


def test_the_papers_datasets_are_enlarged_four_times_and_moved_as_it_says():
    assert {
        "cifar10": (4 * 32, Augment(shift=0.15, flip=True)),
        "mnist": (4 * 28, Augment(shift=0.15, rotation=15.0)),
        "fashion_mnist": (4 * 28, Augment(shift=0.15, flip=True)),
    } == PAPER_DATASETS


def test_a_compensation_that_is_not_known_is_refused():
    with pytest.raises(ConfigError, match=r"compensate: 'refitted' given, allowed are none, mean, refit$"):
        dataclasses.replace(RECIPES["quick"], compensate="refitted")


def test_all_faults_of_a_recipe_are_named_at_once():
    with pytest.raises(ConfigError, match=r"(?s)compensate: 'all'.*score_images: 0 given.*score_batch: -1 given"):
        dataclasses.replace(RECIPES["quick"], compensate="all", score_images=0, score_batch=-1)


def test_a_recipe_is_found_by_name_or_is_itself():
    assert find_recipe("quick") is RECIPES["quick"]
    own = dataclasses.replace(RECIPES["paper"], scale_init=0.9)
    assert find_recipe(own) is own
    with pytest.raises(
        ConfigError, match=r"'quik' given; allowed are paper, quick, best, paper:.*\. Did you mean 'quick'\?"
    ):
        find_recipe("quik")
    with pytest.raises(
        ConfigError, match=r"'xyz' given; allowed are .*, paper:cifar10, paper:mnist, paper:fashion_mnist\.$"
    ):
        find_recipe("xyz")


def test_a_basis_of_a_trained_network_starts_at_scales_that_keep_it():
    with pytest.raises(ConfigError, match=r"scale_init: 0\.5 given; the basis 'loss' is computed on a trained network"):
        dataclasses.replace(RECIPES["quick"], basis="loss", scale_init=0.5)
    assert dataclasses.replace(RECIPES["quick"], basis="loss", scale_init=1.0).basis == "loss"


def test_the_paper_has_none_of_what_is_not_in_the_paper():
    recipe = RECIPES["paper"]
    assert (recipe.scores, recipe.rebase, recipe.score_images) == ("taylor", False, None)
    assert recipe.framework == "basis+taylor"
    assert (recipe.filter_compensate, recipe.finetune.distill, recipe.finetune.train) == ("none", 0.0, "method")


steps = st.lists(st.builds(Step, st.sampled_from(["basis", "l1", "dense"]), st.none() | st.floats(0, 1))).map(tuple)


def test_a_framework_is_its_start_and_its_moves():
    assert tuple(FRAMEWORKS) == get_args(FrameworkName)
    assert (FRAMEWORKS["baseline"].start, FRAMEWORKS["baseline"].moves) == ("dense", ())
    for scores in ("l1", "taylor", "hrank", "loss"):
        filters = Move("filters", scores)
        assert (FRAMEWORKS[scores].start, FRAMEWORKS[scores].moves) == ("dense", (filters,))
        both = FRAMEWORKS[f"basis+{scores}"]
        assert (both.start, both.moves) == ("decomposed", (BASIS, filters))
    assert (FRAMEWORKS["basis"].start, FRAMEWORKS["basis"].moves) == ("decomposed", (BASIS,))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_can_be_carried_out(name):
    framework = find_framework(name)
    assert framework.name == name
    assert framework.start in (DENSE.name, DECOMPOSED.name)
    for move in framework.moves:
        assert move == BASIS or move.scores in FILTER_SCORES
        assert move.axis != "basis" or framework.start == DECOMPOSED.name
        assert move.axis != "both" or framework.start == DENSE.name


@pytest.mark.parametrize(("given", "hint"), [("basis+tailor", "basis+taylor"), ("BASIS", "basis"), ("hrnk", "hrank")])
def test_an_unknown_framework_is_answered_with_what_is_allowed_and_the_nearest(given, hint):
    with pytest.raises(ConfigError, match=r"allowed are baseline, l1, .*loss\+basis\.") as error:
        find_framework(given)
    assert str(error.value).endswith(f"Did you mean {hint!r}?")


@given(steps, steps)
def test_steps_that_differ_have_names_that_differ(one, other):
    assert (named(one) == named(other)) == (one == other)


def test_steps_read_from_the_start_on():
    assert named((DECOMPOSED, Step("basis", 0.5), Step("l1", 0.25), POLISHED)) == (
        "decomposed, basis 0.5, l1 0.25, polished"
    )
