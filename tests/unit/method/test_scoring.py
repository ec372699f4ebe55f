"""Laws of scoring: which images score, and in which basis."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import tiny_images, tiny_model, tiny_recipe, tiny_training

from basisprune import PlanConfig, PreparedBatches, decompose
from basisprune.basis.decompose import merge_pair
from basisprune.basis.layers import BasisPair, basis_pairs
from basisprune.coupling import trace_coupling
from basisprune.data import ArrayImages
from basisprune.errors import DataError, TooMuchError
from basisprune.importance.loss import filter_loss, loss_scores
from basisprune.method.scoring import (
    Outlook,
    Scoring,
    expected_of_basis,
    expected_of_filters,
    judging_and_scoring,
    precision,
)
from basisprune.planning import plan_basis, plan_filters
from basisprune.recipes import Recipe
from basisprune.torchkit.surgery import find_layers, replace_module
from basisprune.types import LayerScores, Scores

TRAIN, VAL = tiny_images(60), tiny_images(30, seed=1)
QUICK, PAPER = (tiny_recipe(tiny_training(), name) for name in ("quick", "paper"))


def scoring(recipe: Recipe) -> tuple[Scoring, list[str]]:
    """Scoring on the images that the recipe names, and what it says."""
    said: list[str] = []
    _, images = judging_and_scoring(VAL, TRAIN, recipe)
    return Scoring(recipe, tiny_model().input_spec, TRAIN, images, said.append), said


def all_weights(recipe: Recipe) -> Recipe:
    return replace(recipe, finetune=replace(recipe.finetune, train="all"))


def contents(images: ArrayImages) -> set[bytes]:
    return {image.numpy().tobytes() for image, _ in images}


def test_a_recipe_that_ranks_by_the_loss_looks_at_training_images_only():
    judging, scored = judging_and_scoring(VAL, TRAIN, QUICK)
    assert judging is VAL
    assert contents(scored) <= contents(TRAIN)


def test_the_paper_scores_on_the_images_that_judge_unless_some_are_set_aside():
    assert judging_and_scoring(VAL, TRAIN, PAPER) == (VAL, VAL)
    judging, scored = judging_and_scoring(VAL, TRAIN, replace(PAPER, score_images=10))
    assert (len(judging), len(scored)) == (20, 10)
    assert not contents(judging) & contents(scored)


def test_one_image_cannot_be_set_aside_and_judge():
    with pytest.raises(DataError, match="1 validation image; score_images needs another one"):
        judging_and_scoring(tiny_images(1), TRAIN, replace(PAPER, score_images=1))


@pytest.mark.parametrize("recipe", [QUICK, PAPER])
def test_scores_are_those_of_the_pairs_of_the_model_that_comes_back(recipe):
    given, _ = scoring(recipe)
    model, scores, statistics = given.basis(tiny_model())
    ranks = {name: pair.rank for name, pair in find_layers(model, BasisPair)}
    assert {name: len(layer.values) for name, layer in scores.layers.items()} == ranks
    assert (statistics is not None) == (recipe.compensate == "refit")


def test_a_split_by_the_loss_and_its_scores_take_one_pass_over_the_images():
    seen, model = [], tiny_model()
    model.register_forward_pre_hook(lambda _model, args: seen.append(len(args[0]) * args[0].requires_grad))
    given, _ = scoring(QUICK)
    given.basis(model)
    assert sum(seen) == len(TRAIN)


def test_a_split_model_is_split_no_further():
    given, said = scoring(replace(QUICK, rebase=False))
    model = given.in_basis(tiny_model())
    assert given.in_basis(model) is model
    assert said == ["decomposing every conv"]


@pytest.mark.parametrize("recipe", [QUICK, PAPER])
def test_layers_that_were_tuned_as_one_are_split_again(recipe):
    given, _ = scoring(all_weights(recipe))
    model = given.in_basis(tiny_model())
    first = next(iter(basis_pairs(model)))
    mixed = replace_module(copy.deepcopy(model), first, merge_pair(basis_pairs(model)[first]))
    again = given.in_basis(mixed)
    assert set(basis_pairs(again)) == set(basis_pairs(model))
    images = torch.randn(2, *given.spec.shape)
    torch.testing.assert_close(again.eval()(images), mixed.eval()(images), rtol=1e-4, atol=1e-4)


def test_idle_convs_stay_as_they_are_when_layers_are_split_again():
    given, said = scoring(all_weights(QUICK))
    model = tiny_model()
    model.idle = torch.nn.Conv2d(4, 4, 1)
    model = given.in_basis(given.in_basis(model))
    assert "idle" not in basis_pairs(model)
    assert said.count("decomposing every conv") == 1


@pytest.mark.parametrize("recipe", [QUICK, PAPER])
def test_a_model_without_convs_to_split_is_refused(recipe):
    given, _ = scoring(recipe)
    depthwise = torch.nn.Conv2d(3, 3, 1, groups=3)
    model = torch.nn.Sequential(depthwise, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 10))
    for split in (given.in_basis, given.basis):
        with pytest.raises(TooMuchError, match="no conv is left that is large enough"):
            split(model)


def test_filters_come_with_statistics_only_if_the_recipe_compensates():
    for recipe in (QUICK, PAPER):
        coupling, scores, statistics = scoring(recipe)[0].filters(tiny_model(), "loss")
        assert set(scores.layers) <= set(coupling.layers)
        assert (statistics is not None) == (recipe.filter_compensate != "none")


def test_only_scores_in_units_of_the_loss_are_taken_as_they_are():
    given, _ = scoring(QUICK)
    assert given.filter_plan("loss").normalise == "none"
    assert given.filter_plan("taylor") == QUICK.filter_plan


def test_passes_outside_of_training_have_its_precision():
    layer, half = torch.nn.Linear(2, 2), replace(QUICK, train=tiny_training(mixed_precision="bf16"))
    with precision(layer, half):
        assert layer(torch.ones(1, 2)).dtype == torch.bfloat16
    with precision(layer, QUICK):
        assert layer(torch.ones(1, 2)).dtype == torch.float32


scores = st.lists(st.floats(0, 10), min_size=2, max_size=20)


@given(scores, scores, st.floats(0, 0.5))
def test_what_a_plan_is_expected_to_cost_is_half_of_all_that_goes(one, other, ratio):
    known = Scores("loss", {"a": LayerScores(tuple(one)), "b": LayerScores(tuple(other))})
    plan = plan_basis(known, ratio, PlanConfig(min_share=0.0, min_keep=1))
    gone = [
        value
        for name, layer in known.layers.items()
        for place, value in enumerate(layer.values)
        if place not in plan.layers[name].keep
    ]
    assert expected_of_basis(plan, known) == pytest.approx(sum(gone) / 2, abs=1e-9)


@given(st.floats(0.01, 1), st.floats(1, 8))
def test_share_and_loss_are_inverse_and_fall_together(scale, power):
    outlook = Outlook.of(lambda share: scale * (share**-power - 1), 0.02)
    assert np.all(np.diff(outlook.shares) < 0)
    assert np.all(np.diff(outlook.losses) >= 0)
    for share in (1.0, 0.7, 0.33, 0.02):
        assert outlook.share(outlook.loss(share)) == pytest.approx(share, rel=1e-6)


def test_it_ends_where_nothing_more_can_be_removed():
    def rise(share: float) -> float:
        if share < 0.5:
            raise TooMuchError("no more")
        return 1 - share

    outlook = Outlook.of(rise, 0.02)
    assert 0.5 <= outlook.shares[-1] < 0.56
    assert outlook.share(10.0) == outlook.shares[-1]


def test_removing_nothing_costs_nothing_and_more_costs_more():
    model = tiny_model().eval()
    batches = PreparedBatches(tiny_images(24), model.input_spec, batch_size=8)
    split = decompose(model, scale_init=1.0, basis="loss", batches=batches)
    basis = loss_scores(split, batches)
    coupling = trace_coupling(model, torch.zeros(2, *model.input_spec.shape))
    filters, config = filter_loss(model, coupling, batches).scores, PlanConfig()
    rises = [
        (
            expected_of_basis(plan_basis(basis, ratio), basis),
            expected_of_filters(model, plan_filters(model, filters, ratio, coupling=coupling), filters, config),
        )
        for ratio in (0.0, 0.2, 0.4)
    ]
    assert rises[0] == (0, 0)
    assert np.all(np.diff(np.array(rises), axis=0) >= 0)
    assert rises[-1][1] > 0
