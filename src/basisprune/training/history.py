"""What the epochs of a training showed, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EpochRecord:
    """What one pass over the training images showed; the accuracies are fractions, or the metric of the task.

    Where images are blended, the training accuracy counts the class that has most of an image.
    """

    epoch: int
    learning_rate: float
    train_loss: float
    train_accuracy: float | None
    val_loss: float | None
    val_accuracy: float | None


def best_epoch(history: Sequence[EpochRecord]) -> int | None:
    """The place in the history of the highest validation accuracy, of equals the one with the smallest loss.

    None where nothing was validated.

    >>> records = [EpochRecord(0, 0.1, 1.0, 0.5, 0.9, 0.6), EpochRecord(1, 0.1, 0.8, 0.6, 0.8, 0.6)]
    >>> best_epoch(records)
    1
    """
    judged = [
        (record.val_accuracy, -(record.val_loss or 0.0), -place)
        for place, record in enumerate(history)
        if record.val_accuracy is not None
    ]
    return -max(judged)[2] if judged else None


def out_of_patience(history: Sequence[EpochRecord], patience: int | None) -> bool:
    """Whether the last `patience` epochs brought nothing better; never without patience.

    >>> records = [EpochRecord(0, 0.1, 1.0, 0.5, 0.9, 0.6), EpochRecord(1, 0.1, 0.8, 0.6, 1.0, 0.5)]
    >>> out_of_patience(records, 1), out_of_patience(records, 2)
    (True, False)
    """
    best = best_epoch(history)
    return patience is not None and best is not None and len(history) - 1 - best >= patience
