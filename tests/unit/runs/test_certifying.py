"""Laws of certification in a run: what is expected of it, and what is delivered in each case."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tiny import tiny_images
from torch import nn

from basisprune.budget import Budget
from basisprune.budget.certify import Promise
from basisprune.candidates import Candidate, Found, Size, Trial
from basisprune.data import ArrayImages, Splits
from basisprune.frameworks import DENSE, Step
from basisprune.listener import Silence
from basisprune.runs import certifying
from basisprune.runs.certifying import Certifier, certifiable_here
from basisprune.runs.exporting import Exporter
from basisprune.states import Stage, State
from basisprune.training.predict import Predictions

PROMISE = Promise(Budget(max_drop=0.01))


def splits(confirming: int | None) -> Splits:
    confirm = None
    if confirming is not None:
        confirm = ArrayImages(np.zeros((confirming, 1, 1), np.uint8), np.arange(confirming) % 2)
    return Splits(tiny_images(), tiny_images(), None, ("a", "b"), confirm)


@pytest.mark.parametrize(
    ("promise", "confirming", "said"),
    [
        (PROMISE, None, ["no images are set aside", "an estimate"]),
        (
            PROMISE,
            400,
            ["400 confirming images and 5% differing answers, a loss of 1.9 points", "point needs about 3,199"],
        ),
        (PROMISE, 400, ["--val-fraction", "a looser budget, --confidence 80%"]),
        (PROMISE, 4000, ["a loss of 0.6 points can be certified with 95 % confidence."]),
        (Promise(Budget(max_drop=0.0)), 400, ["0 points cannot be certified with any number"]),
        (Promise(Budget(max_drop=0.01), 0.8), 100, ["with 80 % confidence", "a looser budget."]),
        (Promise(Budget(min_accuracy=0.9)), 400, ["tested with 95 % confidence on 400 images"]),
        (Promise(Budget(min_accuracy=0.9)), 20, ["20 confirming images are too few"]),
        (Promise(Budget(max_drop=0.01), metric="worst-class"), 100, ["100 confirming images are too few"]),
    ],
)
def test_the_outlook_says_what_can_be_certified_and_what_to_do(promise, confirming, said):
    told = certifiable_here(promise, splits(confirming))
    for words in said:
        assert words in told


def found(*sizes: int, to_test: tuple[int, ...], chosen: int) -> Found:
    """A search that tried networks of these sizes, the first being unpruned."""
    trials = []
    for index, size in enumerate(sizes):
        state = State((DENSE, Step(str(index))), nn.Identity(), (Stage("s", 1, 1, 1, 1),), hits=np.ones(10, dtype=bool))
        network = nn.Identity()
        network.index = index
        trials.append(
            Trial(replace(Candidate.of(state, state, Size(size, size)), passed=index == chosen), state, network)
        )
    return Found(tuple(trials), chosen, to_test=to_test)


def certified(monkeypatch, search: Found, lost: dict[int, int], confirming: int | None = 1000, **options) -> Found:
    """What is delivered if the networks lose so many of the confirming images."""

    def predict(network, images, **_settings) -> Predictions:
        answers = images.labels.copy()
        answers[: lost.get(network.index, 0)] += 1
        return Predictions(answers, np.ones(len(answers)), images.labels)

    monkeypatch.setattr(certifying, "predict", predict)
    data = splits(confirming)
    return Certifier(PROMISE, data, Exporter(data, prepared=False), Silence(), **options).run(search).found


def test_the_last_that_passed_is_delivered_and_counts_as_passed(monkeypatch):
    search = found(1000, 500, 250, 125, to_test=(1, 2, 3), chosen=2)
    result = certified(monkeypatch, search, {1: 0, 2: 1, 3: 2})
    assert (result.chosen, result.certificate.status) == (3, "certified")
    assert [candidate.passed for candidate in result.candidates[1:]] == [True, True, True]
    result = certified(monkeypatch, search, {2: 30})
    assert (result.chosen, result.certificate.certified) == (1, True)
    assert [candidate.passed for candidate in result.candidates[1:]] == [True, False, False]


@pytest.mark.parametrize(("lost", "chosen"), [(8, 1), (30, 0)])
def test_where_the_first_test_fails_the_confirming_images_decide_by_the_estimate(monkeypatch, lost, chosen):
    search = found(1000, 500, 250, to_test=(1, 2), chosen=2)
    result = certified(monkeypatch, search, {1: lost})
    assert (result.chosen, result.certificate.status) == (chosen, "estimated")
    assert f"loses {lost / 10:.1f} points" in result.certificate.reason
    assert result.candidates[result.chosen].passed == (chosen > 0)


@pytest.mark.parametrize(
    ("confirming", "reason"),
    [
        (None, "no images were set aside to confirm it"),
        (100, "100 confirming images are too few for this budget"),
        (1000, "no candidate is likely to pass the test on 1,000 confirming images"),
    ],
)
def test_without_a_test_the_choice_of_the_search_is_an_estimate(monkeypatch, confirming, reason):
    result = certified(monkeypatch, found(1000, 500, to_test=(), chosen=1), {}, confirming)
    assert (result.chosen, result.certificate.status, result.certificate.reason) == (1, "estimated", reason)


def test_an_int8_file_takes_its_turn_after_the_network_that_it_is_made_of(monkeypatch):
    search = found(1000, 500, 250, 125, to_test=(1, 2, 3), chosen=2)
    result = certified(monkeypatch, search, {}, int8=True)
    assert [test.index for test in result.certificate.tests] == [1, 2]
    assert result.chosen == 2
