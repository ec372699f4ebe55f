"""One class for each image: the task that everything else of this package grew from."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from basisprune.tasks.base import Rows, Task


@dataclass(frozen=True)
class Classification(Task):
    """The built-in task of one class for each image; its budgets have metrics of their own (see `compress`)."""

    @property
    def is_classification(self) -> bool:
        """It is."""
        return True


def _outcome(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([labels, logits.argmax(1)], dim=1)


def _accuracy(rows: Rows) -> float:
    return float((rows[:, 0] == rows[:, 1]).mean())


CLASSIFICATION = Classification(
    "classification",
    F.cross_entropy,
    _outcome,
    _accuracy,
    metric_name="accuracy",
    is_share=True,
)


def classification() -> Task:
    """The task of one class for each example: cross entropy of logits (N, classes) with labels (N,), and accuracy.

    This is what `compress`, `fit` and `evaluate` assume if no other task is given.

    >>> classification().metric_name
    'accuracy'
    """
    return CLASSIFICATION
