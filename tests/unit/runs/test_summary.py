"""Laws of what is said of a search that has ended."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from basisprune.budget import Budget, Goal, Ratios
from basisprune.candidates import Candidate, Found, Size, Trial
from basisprune.frameworks import DECOMPOSED
from basisprune.pipeline import Stage, State
from basisprune.runs.options import RunConfig
from basisprune.runs.summary import headline, kept_to_budget, picture_of, rounds, verdict

DROP, PARAMS, FIXED = Budget(max_drop=0.01), Budget(target_params=300), Ratios(0.5)


def trial(right: int, parameters: int, goal: Goal, images: int, unpruned: int) -> Trial:
    def state(count: int) -> State:
        return State((DECOMPOSED,), nn.Identity(), (Stage("s", 0, 1, 1, 1),), hits=np.arange(images) < count)

    candidate = Candidate.of(state(right), state(unpruned), Size(parameters, 2 * parameters))
    if isinstance(goal, Budget):
        candidate = candidate.judged(goal, state(unpruned))
    return Trial(candidate, state(right), nn.Identity())


def case(goal: Goal, *rights: int, chosen: int, interrupted: bool = False, images: int = 100_000):
    """A job of that goal, and what it found: networks with so many images right, each half as large as the last."""
    trials = tuple(trial(right, 1000 // 2**index, goal, images, rights[0]) for index, right in enumerate(rights))
    job = SimpleNamespace(config=RunConfig(goal), splits=SimpleNamespace(num_classes=2))
    return job, Found(trials, chosen, interrupted)


KEEPS = "The model is already within the budget. It is unpruned."
NONE = "No candidate is smaller and within the budget. The model is unpruned."
EARLY = "Stopped early; this is the best result so far. "
HALF = "50% of the parameters and 50% of the multiply-adds removed; accuracy on the validation images went from "
LARGE = " This is the smallest candidate, and it is still larger than requested."


@pytest.mark.parametrize(
    ("found", "kept", "said"),
    [
        (case(DROP, 90_000, 90_000, chosen=1), True, HALF + "90.0% to 90.0%."),
        (case(DROP, 90_000, 80_000, chosen=0), False, NONE),
        (case(DROP, 90_000, chosen=0, interrupted=True), False, EARLY + "The model is unpruned."),
        (case(DROP, 90_000, 90_000, chosen=1, interrupted=True), True, EARLY + HALF + "90.0% to 90.0%."),
        (case(PARAMS, 90_000, 70_000, 60_000, chosen=2), True, None),
        (case(PARAMS, 90_000, 70_000, chosen=1), False, HALF + "90.0% to 70.0%." + LARGE),
        (case(Budget(target_params=2000), 90_000, chosen=0), True, KEEPS),
        (case(FIXED, 90_000, 60_000, chosen=1), True, HALF + "90.0% to 60.0%."),
        (case(FIXED, 90_000, chosen=0, interrupted=True), False, EARLY + "The model is unpruned."),
    ],
)
def test_the_verdict_says_what_came_out_and_whether_that_was_asked_for(found, kept, said):
    assert kept_to_budget(*found) == kept
    assert said is None or verdict(*found) == said


def test_doubts_are_said():
    few = verdict(*case(DROP, 90, 89, chosen=1, images=100))
    assert "There are too few images to be sure of the budget: the drop is between -" in few
    guessing = verdict(*case(DROP, 50_000, 50_000, chosen=1))
    assert guessing.endswith("hardly better than guessing, so this means little; train it longer.")
    assert "guessing" not in verdict(*case(DROP, 51_000, 51_000, chosen=1))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            case(DROP, 90_000, 90_000, chosen=1),
            "50% of the multiply-adds removed with no loss",
        ),
        (case(DROP, 90_000, 89_500, chosen=1), "removed for 0.5 points of accuracy"),
        (case(DROP, 90_000, 80_000, chosen=0), NONE),
        (case(PARAMS, 90_000, 70_000, chosen=1), "and still larger than requested"),
        (case(DROP, 90_000, 90_000, chosen=1, interrupted=True), "Stopped early: 50%"),
    ],
)
def test_the_headline_is_the_verdict_in_short(found, said):
    assert said in headline(*found)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB")])
def test_a_picture_has_the_pixels_of_its_image(channels, mode):
    pixels = torch.randint(0, 256, (channels, 4, 6), dtype=torch.uint8)
    picture = picture_of(pixels)
    assert (picture.mode, picture.size) == (mode, (6, 4))
    assert picture.tobytes() == pixels.permute(1, 2, 0).numpy().tobytes()
    assert picture_of(pixels / 255).size == (6, 4)


def test_there_are_enough_rounds_and_not_too_many():
    models = {"a": nn.Conv2d(3, 4, 3), "b": nn.Conv2d(3, 4, 3)}
    assert rounds(models, (3, 8, 8), seconds=1e-9) == 3
    assert rounds(models, (3, 8, 8), seconds=1e9) == 20
