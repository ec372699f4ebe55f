"""Laws of which test suits which metric."""

from __future__ import annotations

import numpy as np
import pytest

from basisprune.budget.certify import evidence_of, interval_of, loss_of
from basisprune.budget.means import BoundedMean, WorstMean
from basisprune.budget.metrics import value_of
from basisprune.budget.proportions import Hits, Paired, WorstLoss
from basisprune.budget.resampling import Resampled, Reweighted
from basisprune.tasks import Predictions

UNITS = np.repeat(np.arange(20), 3)


def pair(units=None) -> tuple[Predictions, Predictions]:
    labels = np.arange(60) % 3
    before, after = (np.where(np.arange(60) < wrong, (labels + 1) % 3, labels) for wrong in (6, 12))
    return Predictions(before, np.ones(60), labels, units), Predictions(after, np.ones(60), labels, units)


@pytest.mark.parametrize(
    ("metric", "lost", "alone", "in_units"),
    [
        ("accuracy", Paired, Hits, BoundedMean),
        ("worst-class", WorstLoss, Hits, WorstMean),
        ("balanced", Resampled, Resampled, Reweighted),
        ("macro-f1", Resampled, Resampled, Reweighted),
    ],
)
def test_each_metric_has_its_test_whose_drop_is_that_of_the_metric(metric, lost, alone, in_units):
    for units, kinds in ((None, (lost, alone)), (UNITS, (in_units, in_units))):
        before, after = pair(units)
        found = evidence_of(metric, before, after), evidence_of(metric, None, after)
        assert tuple(map(type, found)) == kinds
        drops = value_of(metric, before) - value_of(metric, after), -value_of(metric, after)
        assert tuple(each.drop for each in found) == pytest.approx(drops)


def test_of_an_accuracy_each_image_counts_as_one():
    for units in (None, UNITS):
        before, after = pair(units)
        assert loss_of(before, after) == Paired(6, 0, 60)
        assert interval_of(after)[0] < 0.8 < interval_of(after)[1]
