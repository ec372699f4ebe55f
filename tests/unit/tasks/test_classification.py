"""Laws of the task of one class for each image."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from basisprune.errors import ConfigError
from basisprune.tasks import CLASSIFICATION, Predictions, regression

LOGITS, LABELS = torch.tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [1.0, 0.0, 0.0]]), torch.tensor([0, 1, 2])


def said() -> Predictions:
    return CLASSIFICATION.outcomes(
        [CLASSIFICATION.rows(LOGITS[:2], LABELS[:2], 2), CLASSIFICATION.rows(LOGITS[2:], LABELS[2:], 1)]
    )


def test_the_outcomes_are_predictions_in_order():
    found = said()
    assert isinstance(found, Predictions)
    assert (found.classes.tolist(), found.labels.tolist(), found.hits.tolist()) == (
        [0, 1, 0],
        [0, 1, 2],
        [True, True, False],
    )
    assert found.probabilities == pytest.approx(LOGITS.softmax(1).max(1).values.numpy())
    assert found.value == pytest.approx(2 / 3)
    again = Predictions(found.classes, found.probabilities, found.labels)
    assert np.array_equal(again.rows, found.rows)


def test_what_one_network_loses_the_other_wins():
    other = Predictions(LABELS.numpy(), np.ones(3), LABELS.numpy())
    assert (said().lost_and_won(other), other.lost_and_won(said())) == ((0, 1), (1, 0))


def test_a_training_smooths_labels_and_softens_what_a_teacher_says():
    task = CLASSIFICATION.in_training(label_smoothing=0.1, temperature=2.0)
    assert torch.equal(task.loss(LOGITS, LABELS), F.cross_entropy(LOGITS, LABELS, label_smoothing=0.1))
    assert task.distance(LOGITS, LOGITS) == pytest.approx(0, abs=1e-6)
    expected = 4 * F.kl_div(F.log_softmax(LOGITS / 2, -1), F.softmax(-LOGITS / 2, -1), reduction="batchmean")
    assert task.distance(LOGITS, -LOGITS) == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(ConfigError, match=r"teacher: outputs .* it must distinguish the same classes"):
        task.distance(LOGITS, LOGITS[:, :2])
    other = regression()
    assert other.in_training(label_smoothing=0.0, temperature=2.0) is other


def test_chance_is_the_share_of_the_largest_class():
    assert CLASSIFICATION.chance(np.array([0, 1, 1, 1])) == 0.75
    assert regression().chance(np.zeros(4, dtype=np.int64)) is None
