"""What images say of a loss: which test suits which metric, and which images.

proportions   accuracies, Tango's score test, worst class
means         bounded means, metrics of any task
resampling    other metrics of classes, and images that belong together
"""

from __future__ import annotations

from typing import Protocol

from basisprune.budget.means import mean_loss
from basisprune.budget.metrics import Metric
from basisprune.budget.proportions import Hits, Paired, WorstLoss, wilson_interval
from basisprune.budget.resampling import clustered, resample
from basisprune.tasks import Outcomes, Predictions, Task


class Evidence(Protocol):
    """What images say of a loss: of accuracy, of another metric, or below the least that is allowed."""

    @property
    def drop(self) -> float:
        """The loss on these images."""

    def p_value(self, margin: float) -> float:
        """The chance of a loss as small as this if the true one is `margin`."""

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the loss."""

    def expected_score(self, margin: float, times: float) -> float:
        """How many standard deviations the loss is expected to be above the margin on `times` as many images."""


def evidence_of(metric: Metric, before: Outcomes | None, after: Outcomes) -> Evidence:
    """Return what the outcomes of two networks on the same images say of the loss in the metric.

    Without `before`, the loss is the metric itself, negated.
    """
    if isinstance(metric, Task) or not isinstance(after, Predictions):
        return mean_loss(before, after)
    assert before is None or isinstance(before, Predictions)
    if after.units is not None:
        return clustered(metric, before, after)
    if before is None and metric in ("accuracy", "worst-class"):
        return Hits.of(after, by_class=metric == "worst-class")
    if before is not None and metric == "accuracy":
        return Paired.of(before.hits, after.hits)
    if before is not None and metric == "worst-class":
        return WorstLoss.of(before, after)
    return resample(metric, before, after)


def loss_of(before: Outcomes, after: Outcomes) -> Evidence:
    """Return what is lost in the metric of the task; of an accuracy, each image counts as one, whatever its unit."""
    if isinstance(before, Predictions) and isinstance(after, Predictions):
        return Paired.of(before.hits, after.hits)
    return mean_loss(before, after)


def interval_of(outcomes: Outcomes) -> tuple[float, float]:
    """Return the 95% interval of the task's metric; of an accuracy, each image counts as one, whatever its unit."""
    if isinstance(outcomes, Predictions):
        return wilson_interval(int(outcomes.hits.sum()), len(outcomes.hits))
    low, high = mean_loss(None, outcomes).interval()
    return -high, -low
