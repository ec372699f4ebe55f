"""Laws of what is said of a search that has ended."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import tiny_images
from torch import nn

from basisprune.budget import Budget, Goal, Ratios
from basisprune.budget.certify import AcceptanceRule, Certificate, Guarantee, Test
from basisprune.budget.planning import CostPlanner
from basisprune.data import ArrayImages, Splits
from basisprune.layer_times import TimeTable
from basisprune.method.states import Stage, State
from basisprune.recipes import DECOMPOSED
from basisprune.results import Side
from basisprune.runs import summary
from basisprune.runs.settings import RunConfig
from basisprune.runs.summary import (
    HeldOut,
    _changed,
    class_losses,
    headline,
    kept_to_budget,
    latency_by,
    picture_of,
    rounds,
    verdict,
    warnings,
)
from basisprune.search.candidates import Candidate, Evaluated, SearchResult, Size
from basisprune.tasks import Predictions

SIDE = Side(0.5, (0.4, 0.6), 10, 10)
DROP, PARAMS, FIXED = Budget(max_drop=0.01), Budget(target_params=300), Ratios(0.5)


def trial(right: int, parameters: int, goal: Goal, images: int, unpruned: int) -> Evaluated:
    def state(count: int) -> State:
        said = Predictions.of_hits(np.arange(images) < count)
        return State((DECOMPOSED,), nn.Identity(), (Stage("s", 0, 1, 1, 1),), outcomes=said)

    candidate = Candidate.of(state(right), state(unpruned), Size(parameters, 2 * parameters))
    if isinstance(goal, Budget):
        by = AcceptanceRule(Guarantee(goal)) if goal.is_about_accuracy else None
        candidate = candidate.judged(goal) if by is None else candidate.judged_by(by, state(right), state(unpruned))
    return Evaluated(candidate, state(right), nn.Identity())


def config_of(goal: Goal) -> RunConfig:
    if isinstance(goal, Budget):
        return RunConfig(**{goal.kind: vars(goal)[goal.kind]})
    return RunConfig(basis_ratio=goal.basis, filter_ratio=goal.filters)


def case(
    goal: Goal,
    *rights: int,
    chosen: int,
    interrupted: bool = False,
    images: int = 100_000,
    labels=None,
    certificate: Certificate | None = None,
):
    """A job of that goal, and what it found: networks with so many images right, each half as large as the last."""
    trials = tuple(trial(right, 1000 // 2**index, goal, images, rights[0]) for index, right in enumerate(rights))
    labels = np.arange(100) % 2 if labels is None else labels
    job = SimpleNamespace(
        config=config_of(goal), splits=SimpleNamespace(val=ArrayImages(np.zeros((len(labels), 1, 1), np.uint8), labels))
    )
    return job, SearchResult(trials, chosen, interrupted, certificate=certificate)


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


def test_whose_latency_it_is_is_noted():
    _, found = case(DROP, 90_000, 90_000, chosen=1)
    timed = replace(
        found, trials=tuple(replace(t, candidate=replace(t.candidate, latency_ms=2.0)) for t in found.trials)
    )
    table = TimeTable("onnxruntime", "a laptop", {}, 1, 1, 8, ())
    here, there = CostPlanner("latency", table), CostPlanner("latency", table, elsewhere=True)
    timed = replace(timed, timed_in="onnxruntime")
    assert [latency_by(timed, planner) for planner in (None, here, there)] == ["ONNX Runtime"] * 2 + ["a laptop"]
    assert latency_by(found, there) == "PyTorch"
    assert latency_by(replace(timed, timed_in="eager"), None) == "PyTorch"


def test_doubts_are_said():
    guess = "hardly better than always answering the largest class"
    guessing = verdict(*case(DROP, 50_000, 50_000, chosen=1))
    assert guessing.endswith(f"{guess} (50%), so this means little; train it longer.")
    assert "hardly" not in verdict(*case(DROP, 51_000, 51_000, chosen=1))
    rare = verdict(*case(Budget(max_drop=0.03), 98_000, 95_000, chosen=1, labels=(np.arange(100) < 5).astype(int)))
    assert rare.endswith(f"The pruned model is {guess} (95%).")


def certificate(*tests: Test, **parts) -> Certificate:
    return Certificate(
        "certified" if tests and tests[0].passed else "estimated", 0.95, "accuracy", 800, tests=tests, **parts
    )


def test_what_is_certified_is_said_with_the_numbers_of_the_confirming_images():
    test = Test(1, "half", 0.9, 0.897, 0.008, 0.01, 5, 3, passed=True)
    found = case(DROP, 90_000, 90_000, chosen=1, certificate=certificate(test))
    said = verdict(*found)
    assert "accuracy on the confirming images went from 90.0% to 89.7%" in said
    assert "Certified with 95% confidence, on 800 images that nothing had seen: a loss of at most 1 point" in said
    assert headline(*found).endswith("removed, certified: a loss of at most 1 point of accuracy")


def test_what_is_estimated_is_never_called_certified():
    found = case(DROP, 90_000, 90_000, chosen=1, certificate=certificate(reason="there are too few images"))
    assert verdict(*found).endswith("This is estimated, not certified: there are too few images.")
    assert "certified" not in headline(*found)


def answers(labels, hits) -> Predictions:
    return Predictions(np.where(hits, labels, labels + 1), np.ones(len(labels)), labels)


def test_a_class_that_loses_more_than_the_budget_is_warned_of_even_if_the_whole_does_not():
    labels = np.array([0] * 950 + [1] * 50)
    before, after = answers(labels, labels >= 0), answers(labels, labels == 0)
    losses = class_losses(HeldOut("test", tiny_images(), before, after), ("common", "rare"), Budget(max_drop=0.06))
    assert [(row.name, row.images, row.after, row.beyond) for row in losses.classes] == [
        ("common", 950, 1.0, False),
        ("rare", 50, 0.0, True),
    ]
    assert losses.rival == 0.95
    (said,) = warnings(losses)
    assert "'rare' from 100% to 0%" in said
    unchanged = class_losses(HeldOut("test", tiny_images(), before, before), ("common", "rare"), FIXED)
    assert warnings(unchanged) == []


def test_images_that_are_wrong_only_now_come_first():
    labels = np.zeros(6, dtype=np.int64)
    before, after = answers(labels, np.array([0, 0, 0, 1, 1, 1])), answers(labels, np.array([1, 1, 0, 0, 0, 1]))
    images = ArrayImages(np.zeros((6, 2, 2), np.uint8), labels, ("a", "b"))
    shown = _changed(before, after, images, ("a", "b"))
    assert [(image.before, image.after) for image in shown] == [("a", "b"), ("a", "b"), ("b", "a"), ("b", "a")]


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


@pytest.mark.parametrize(
    ("parts", "interrupted", "part"),
    [
        (("test", "confirm"), False, "test"),
        (("confirm",), False, "confirm"),
        ((), False, "val"),
        (("test", "confirm"), True, "val"),
    ],
)
def test_a_run_that_was_stopped_looks_only_at_images_that_search(parts, interrupted, part):
    images = {name: tiny_images(12, seed=seed) for seed, name in enumerate(("train", "val", *parts))}
    splits = Splits(images["train"], images["val"], images.get("test"), ("r", "g", "b", "none"), images.get("confirm"))
    looked = []

    def predict(network, data) -> Predictions:
        looked.append(data)
        return answers(data.labels, np.arange(12) >= (3 if len(looked) % 2 == 0 else 0))

    pipeline = SimpleNamespace(splits=splits, settings=RunConfig().recipe, outcomes=predict)
    job, found = case(DROP, 95, 94, chosen=1, interrupted=interrupted)
    seen = summary._shown(job, found, pipeline, (SIDE, SIDE))
    assert (seen.losses.part, [data is images[part] for data in looked]) == (part, [True, True])
    assert (seen.test is not None) == (seen.confusion is not None) == (part == "test")
    assert len(seen.changed) == 3  # those that were right are shown, whatever the images are


def test_what_a_class_may_lose_is_counted_in_the_metric():
    labels = np.array([0] * 900 + [1] * 100)
    before, after = answers(labels, np.arange(1000) < 950), answers(labels, np.arange(1000) < 930)
    seen, goal = HeldOut("test", tiny_images(), before, after), Budget(min_accuracy=0.48)
    by_worst, by_accuracy = (class_losses(seen, ("a", "b"), goal, metric) for metric in ("worst-class", "accuracy"))
    assert [row.beyond for row in by_worst.classes] == [False, True]  # from 50 to 30%, where 48% must stay
    assert [row.beyond for row in by_accuracy.classes] == [False, False]  # 95% may become 48%
