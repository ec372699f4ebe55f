"""Laws of what a search is expected to take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import differing, tiny_images, tiny_model, tiny_recipe, tiny_training

from basisprune.budget import Budget
from basisprune.budget.certify import Guarantee
from basisprune.data import ArrayImages, Splits
from basisprune.runs.estimate import Estimate, estimate, expected_candidates, most_candidates, searches_twice
from basisprune.runs.load import prepare_job
from basisprune.runs.settings import RunConfig
from basisprune.search import SearchConfig


def test_more_is_expected_of_two_kinds_of_pruning_and_of_a_finer_search():
    one, two, finer = (
        expected_candidates(RunConfig(search=SearchConfig(**settings)))
        for settings in (
            {"framework": "basis"},
            {"framework": "basis+l1"},
            {"framework": "basis+l1", "tolerance": 0.01},
        )
    )
    assert one < two < finer
    assert one + 1 == expected_candidates(RunConfig(search=SearchConfig(framework="basis", polish=True)))
    assert expected_candidates(RunConfig(basis_ratio=0.5, filter_ratio=0.5)) == 1
    small = [RunConfig(target_params=9, search=SearchConfig(framework=name)) for name in ("l1", "basis+l1")]
    assert 2 * expected_candidates(small[0]) == expected_candidates(small[1])
    found = Estimate(reference=10, candidates=3, candidate=5, most=7)
    assert (found.total, found.longest) == (25, 45)


@pytest.mark.parametrize("framework", ["basis", "loss+basis", "basis+l1"])
def test_a_search_that_is_certified_may_go_twice(framework):
    config = RunConfig(search=SearchConfig(framework=framework))
    once = most_candidates(config, confirms=False)
    assert expected_candidates(config) <= once < most_candidates(config)
    for goal in ({"basis_ratio": 0.5}, {"target_params": 9}):
        fixed = replace(config, **goal)
        assert most_candidates(fixed) == expected_candidates(fixed)


@pytest.mark.parametrize(("confirming", "twice"), [(None, False), (100, False), (400, True), (4000, False)])
def test_a_search_goes_twice_where_no_candidate_is_likely_to_be_certified(confirming, twice):
    confirm = None
    if confirming is not None:
        confirm = ArrayImages(np.zeros((confirming, 1, 1), np.uint8), np.arange(confirming) % 2)
    data = Splits(tiny_images(), tiny_images(), None, ("a", "b"), confirm)
    assert searches_twice(Guarantee(Budget(max_drop=0.01)), data) == twice
    assert not searches_twice(Guarantee(Budget(min_accuracy=0.5)), data)
    assert not searches_twice(None, data)


@pytest.mark.parametrize("settings", [{}, {"basis": "loss", "scores": "loss"}, {"rebase": True, "score_images": 5}])
@pytest.mark.parametrize("framework", ["basis+taylor", "l1"])
def test_every_recipe_can_be_estimated_and_the_model_stays_as_it_is(framework, settings):
    model, recipe = tiny_model(), replace(tiny_recipe(tiny_training(epochs=2)), **settings)
    config = RunConfig(recipe=recipe, search=SearchConfig(framework=framework))
    found = estimate(prepare_job(model, tiny_images(60), config))
    assert (found.candidates, found.most) == (expected_candidates(config), most_candidates(config, confirms=False))
    assert min(found.reference, found.candidate) > 0
    assert not differing(model, tiny_model())
