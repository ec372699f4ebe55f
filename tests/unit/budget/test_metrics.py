"""Laws of the metrics that budgets are counted in."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score, recall_score

from basisprune.budget.metrics import check_metric, gradient_of, in_words, metric_name, of_counts, value_of
from basisprune.errors import ConfigError
from basisprune.tasks import Predictions

ANSWERS = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=60)


def predictions(labels, answers) -> Predictions:
    return Predictions(np.array(answers, dtype=np.int64), np.ones(len(answers)), np.array(labels, dtype=np.int64))


@pytest.mark.filterwarnings("ignore")
@settings(deadline=None, max_examples=50)
@given(ANSWERS)
def test_metrics_are_scikit_learns(pairs):
    labels, answers = zip(*pairs, strict=True)
    said, there = predictions(labels, answers), sorted(set(labels))
    expected = {
        "accuracy": accuracy_score(labels, answers),
        "balanced": balanced_accuracy_score(labels, answers),
        "macro-f1": f1_score(labels, answers, labels=there, average="macro", zero_division=0),
        "worst-class": min(recall_score(labels, answers, labels=there, average=None)),
    }
    assert {name: value_of(name, said) for name in expected} == pytest.approx(expected)


def test_a_function_is_called_with_labels_and_answers():
    def told(labels, answers) -> float:
        return float(labels[0] * 10 + answers[0])

    assert value_of(told, predictions([1], [2])) == 12.0
    assert metric_name(told) == "told"


@pytest.mark.parametrize("value", [float("nan"), None, "much"])
def test_a_function_that_returns_no_number_is_named(value):
    def strange(labels, answers):
        return value

    with pytest.raises(ConfigError, match="strange returned"):
        value_of(strange, predictions([1], [2]))


def test_what_is_allowed_is_said():
    assert check_metric("balanced") == [] == check_metric(max)
    assert "macro-f1" in check_metric("f1")[0]
    assert in_words("accuracy") == "accuracy"


@pytest.mark.parametrize("metric", ["accuracy", "balanced", "macro-f1"])
def test_the_gradient_tells_which_answers_of_a_class_are_worth_more(metric):
    """Within a class, an image moved from one answer to another changes the metric by the difference."""
    labels, answers = np.array([0, 0, 1, 1, 2, 2]), np.array([0, 1, 1, 2, 2, 0])
    counts = np.array([50.0, 10.0, 30.0, 5.0, 8.0, 4.0])
    slope, step = gradient_of(metric, labels, answers, counts), 1e-6
    for one, other in ((0, 1), (2, 3), (4, 5)):
        moved = np.zeros(6)
        moved[[one, other]] = step, -step
        up, down = of_counts(metric, labels, answers, np.stack([counts + moved, counts - moved]))
        assert slope[one] - slope[other] == pytest.approx((up - down) / (2 * step), rel=1e-4)


def test_the_gradient_of_a_function_is_what_one_image_changes():
    labels, answers = np.array([0, 0, 1, 1]), np.array([0, 1, 1, 0])
    counts = np.array([300.0, 50.0, 200.0, 40.0])
    called = gradient_of(accuracy_score, labels, answers, counts)
    named = gradient_of("accuracy", labels, answers, counts)
    assert called[0] - called[1] == pytest.approx(named[0] - named[1], rel=0.01)
