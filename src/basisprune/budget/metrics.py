"""The metrics of budgets: accuracy, others of predicted classes, a function of the user's own, or that of a task."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import numpy as np
from scipy import sparse

from basisprune.errors import ConfigError
from basisprune.tasks import Outcomes, Predictions, Task
from basisprune.tasks.classification import Classes
from basisprune.tasks.outcomes import Rows, draws_of, weights_of

MetricName: TypeAlias = Literal["accuracy", "balanced", "macro-f1", "worst-class"]
ClassMetric: TypeAlias = MetricName | Callable[[Classes, Classes], float]
"""A name, or f(labels, predictions) -> float (higher is better)."""
Metric: TypeAlias = ClassMetric | Task
"""A metric of classes, or any other task, which has a metric of its own."""

_WORDS = {"balanced": "balanced accuracy", "macro-f1": "macro F1", "worst-class": "accuracy of the worst class"}


def metric_name(metric: Metric | str) -> str:
    """Return the name of a metric.

    >>> metric_name("macro-f1"), metric_name(max)
    ('macro-f1', 'max')
    """
    if isinstance(metric, Task):
        return metric.metric_name
    return metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)


def in_words(metric: Metric | str) -> str:
    """Return the name of a metric in a sentence.

    >>> in_words("balanced"), in_words("accuracy")
    ('balanced accuracy', 'accuracy')
    """
    name = metric_name(metric)
    return _WORDS.get(name, name)


def format_value(metric: Metric | str, value: float) -> str:
    """Format a value of the metric.

    >>> format_value("accuracy", 0.934)
    '93.4%'
    """
    return metric.format(value) if isinstance(metric, Task) else f"{value:.1%}"


def format_loss(metric: Metric | str, loss: float) -> str:
    """Format a loss of the metric, in points if it is a share.

    >>> format_loss("accuracy", 0.021)
    '2.1 points'
    """
    if isinstance(metric, Task) and not metric.is_share:
        return metric.format(loss)
    return f"{100 * loss:.1f} points"


def in_points(loss: float) -> str:
    """Format an allowed loss, with its digits.

    >>> in_points(0.01), in_points(0.0025)
    ('1 point', '0.25 points')
    """
    return f"{100 * loss:.3g} point{'' if loss == 0.01 else 's'}"


def value_of(metric: Metric, outcomes: Outcomes) -> float:
    """Return the metric of these outcomes, that of a task or of predicted classes; classes without images do not count.

    "balanced" is the mean of the accuracies of all classes, "macro-f1" that of their F1 scores, and "worst-class" the
    accuracy of the class that is worst off. Images of one unit count as one, a function averaged over draws of one
    of each. Raises ConfigError if a function returns anything but a finite number.
    """
    if isinstance(metric, Task) or not isinstance(outcomes, Predictions):
        return outcomes.value
    units, labels, classes = outcomes.units, outcomes.labels, outcomes.classes
    if metric == "accuracy" and units is None:
        return outcomes.value
    if not isinstance(metric, str):
        draws = [slice(None)] if units is None else draws_of(units)
        return float(np.mean([_called(metric, labels[draw], classes[draw]) for draw in draws]))
    weights = np.ones(len(labels)) if units is None else weights_of(units)
    return float(of_counts(metric, labels, classes, weights[None])[0])


def of_counts(metric: MetricName, labels: Classes, answers: Classes, counts: Rows) -> Rows:
    """Return the metric for each row of `counts`, which tells how often each pair of a label and an answer occurs."""
    right, per_class, said = _tallied(labels, answers, counts)
    there = per_class > 0
    if metric == "accuracy":
        result: Rows = right.sum(1) / per_class.sum(1)
    elif metric == "macro-f1":
        scores = 2 * right / np.where(there, per_class + said, 1.0)
        result = (scores * there).sum(1) / there.sum(1)
    else:
        recalls = right / np.where(there, per_class, 1.0)
        mean = metric == "balanced"
        result = recalls.sum(1) / there.sum(1) if mean else np.where(there, recalls, np.inf).min(1)
    return result


def gradient_of(metric: ClassMetric, labels: Classes, answers: Classes, counts: Rows) -> Rows:
    """Return how much the metric grows with an image of each pair of a label and an answer, which occur `counts` times.

    What is the same for all answers of a class may be left out. Of a function, it is what one image more changes.
    """
    if not isinstance(metric, str):
        whole = np.rint(counts).astype(np.int64)
        pair = np.repeat(labels, whole), np.repeat(answers, whole)
        pairs, places = np.unique(np.stack([labels, answers], axis=1), axis=0, return_inverse=True)
        values = [_called(metric, *map(np.append, pair, one_more)) for one_more in pairs]
        return (np.array(values) - _called(metric, *pair))[places.ravel()]
    right, per_class, said = (tally[0] for tally in _tallied(labels, answers, counts[None]))
    there, is_right = per_class > 0, labels == answers
    if metric == "accuracy":
        found: Rows = is_right / per_class.sum()
    elif metric == "macro-f1":
        total = np.where(there, per_class + said, 1.0)
        taken = there[answers] * right[answers] / total[answers] ** 2
        found = 2 * (is_right / total[labels] - taken) / there.sum()
    elif metric == "balanced":
        found = is_right / per_class[labels] / there.sum()
    else:
        recalls = np.where(there, right / np.where(there, per_class, 1.0), np.inf)
        found = (labels == recalls.argmin()) * is_right / per_class[labels]
    return found


def _tallied(labels: Classes, answers: Classes, counts: Rows) -> tuple[Rows, Rows, Rows]:
    """Count for each row and each class: images of it that are right, all of it, and all that are said to be it."""
    size, cells = int(max(labels.max(), answers.max())) + 1, np.arange(len(labels))

    def tally(places: Classes, weights: Rows) -> Rows:
        sums: Rows = (sparse.csr_array((weights, (places, cells)), (size, len(cells))) @ counts.T).T
        return sums

    every = np.ones(len(labels))
    return tally(labels, (labels == answers) * every), tally(labels, every), tally(answers, every)


def check_metric(metric: object) -> list[str]:
    """List the faults of a metric.

    >>> check_metric("f2")
    ["metric: 'f2' given; allowed are accuracy, balanced, macro-f1, worst-class, or a function(labels, predictions)"]
    """
    if isinstance(metric, Task) or callable(metric) or metric in get_args(MetricName):
        return []
    allowed = ", ".join(get_args(MetricName))
    return [f"metric: {metric!r} given; allowed are {allowed}, or a function(labels, predictions)"]


def _called(metric: Callable[[Classes, Classes], float], labels: Classes, classes: Classes) -> float:
    value = metric(labels, classes)
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not np.isfinite(number):
        raise ConfigError(
            f"metric: {metric_name(metric)} returned {value!r} for {len(labels)} images; it must return a finite "
            "number (higher is better)"
        )
    return number
