"""Laws of the loss of the worst class."""

from __future__ import annotations

import numpy as np
import pytest

from basisprune.tasks import Predictions
from basisprune.training.intervals import Paired, lower_accuracy
from basisprune.training.metrics import value_of
from basisprune.training.worst_class import WorstHits, WorstLoss


def answers(right: dict[int, int], sizes: tuple[int, ...]) -> Predictions:
    """A network that gets the first so many images of each class right."""
    labels = np.repeat(np.arange(len(sizes)), sizes)
    place = np.concatenate([np.arange(size) for size in sizes])
    hits = place < np.array([right.get(label, size) for label, size in enumerate(sizes)])[labels]
    return Predictions(np.where(hits, labels, (labels + 1) % len(sizes)), np.ones(len(labels)), labels)


def test_the_loss_is_that_of_the_metric_whichever_class_is_the_worst():
    before, after = answers({0: 60}, (100, 100)), answers({0: 60, 1: 50}, (100, 100))
    assert WorstLoss.of(before, after).drop == pytest.approx(0.1)
    assert WorstHits.of(after).drop == pytest.approx(-0.5)
    assert WorstLoss.of(before, after).drop == pytest.approx(value_of("worst-class", before) - 0.5)


def test_of_one_class_it_is_its_own_loss():
    before, after = answers({0: 95}, (100,)), answers({0: 92}, (100,))
    own = Paired.of(before.hits, after.hits)
    assert WorstLoss.of(before, after).p_value(0.1) == pytest.approx(own.p_value(0.1) / 0.9)


def test_a_class_that_is_clearly_better_than_the_worst_was_may_lose_more():
    sizes = (300, 300)
    before = answers({0: 150}, sizes)
    assert WorstLoss.of(before, answers({0: 150, 1: 240}, sizes)).p_value(0.05) < 0.05
    assert WorstLoss.of(before, answers({0: 150, 1: 150}, sizes)).p_value(0.05) > 0.05
    assert WorstLoss.of(before, answers({0: 120}, sizes)).p_value(0.05) > 0.9


def test_a_class_of_few_images_is_no_proof():
    before = answers({}, (500, 12))
    found = WorstLoss.of(before, before)
    assert found.p_value(0.05) > 0.05
    low, high = found.interval()
    assert low < 0 < high
    assert found.upper(0.95) > 0.1


def test_more_images_are_expected_to_show_more():
    before, after = answers({0: 80}, (100, 100)), answers({0: 79}, (100, 100))
    found = WorstLoss.of(before, after)
    assert found.expected_score(0.05, 4.0) < found.expected_score(0.05, 1.0) < 0
    least = WorstHits.of(after)
    assert least.expected_score(-0.7, 4.0) < least.expected_score(-0.7, 1.0) < 0


def test_a_least_accuracy_is_that_of_every_class():
    found = WorstHits.of(answers({0: 95, 1: 19}, (100, 20)))
    assert found.upper(0.95) == pytest.approx(-lower_accuracy(19, 20))
    assert found.p_value(found.upper(0.95)) == pytest.approx(0.05)
    low, high = found.interval()
    assert low < found.drop < high


@pytest.mark.parametrize(
    ("sizes", "lost"), [((100, 100, 100, 100), (0.1, 0, 0, 0)), ((100, 100, 25), (0, 0, 0.2)), ((60, 60), (0.1, 0.1))]
)
def test_a_network_at_the_limit_passes_in_at_most_one_of_twenty_cases(sizes, lost):
    """All classes are equally good before, so that the worst of the images is an unlucky one."""
    random, passed = np.random.default_rng(0), []
    labels = np.repeat(np.arange(len(sizes)), sizes)
    for _ in range(600):
        kinds = random.random(len(labels))
        one, two = kinds < 0.9, (kinds < 0.9) & (kinds >= np.array(lost)[labels])
        before, after = (
            Predictions(np.where(hits, labels, (labels + 1) % len(sizes)), np.ones(len(labels)), labels)
            for hits in (one, two)
        )
        passed.append(WorstLoss.of(before, after).p_value(max(lost)) <= 0.05)
    assert np.mean(passed) <= 0.075  # 30 of 600 are expected at most; 46 or more would come once in 300
