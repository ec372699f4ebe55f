"""What the epochs of a training showed, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class EpochRecord:
    """What one pass over the training images showed; the accuracies are fractions, or the metric of the task.

    Where images are blended, the training accuracy counts the class that has most of an image. `held_out_...` are of
    the training images that are held out to judge epochs, if any are.
    """

    epoch: int
    learning_rate: float
    train_loss: float
    train_accuracy: float | None
    val_loss: float | None
    val_accuracy: float | None
    held_out_loss: float | None = None
    held_out_accuracy: float | None = None

    @property
    def judged(self) -> tuple[float, float] | None:
        """The accuracy and the loss that the epoch is judged by, on images that were held out or else on validation."""
        if self.held_out_accuracy is not None:
            return self.held_out_accuracy, self.held_out_loss or 0.0
        return None if self.val_accuracy is None else (self.val_accuracy, self.val_loss or 0.0)


def best_epoch(history: Sequence[EpochRecord], noise: float = 0.0) -> int | None:
    """Return the place in the history of the best epoch; None where nothing was judged.

    That is the one with the highest accuracy, of equals the one with the smallest loss. With `noise`, it is the last
    one that is at most this much less accurate than all before it: the rate falls towards the end of a training, so
    that a small lead of an earlier epoch is more likely luck.

    >>> records = [EpochRecord(0, 0.1, 1.0, 0.5, 0.9, 0.6), EpochRecord(1, 0.1, 0.8, 0.6, 0.8, 0.6)]
    >>> best_epoch(records)
    1
    """
    judged = [(place, *record.judged) for place, record in enumerate(history) if record.judged is not None]
    if not judged:
        return None
    if noise:
        high = max(accuracy for _, accuracy, _ in judged)
        return [place for place, accuracy, _ in judged if accuracy >= high - noise][-1]
    return max(judged, key=lambda each: (each[1], -each[2], -each[0]))[0]


def out_of_patience(history: Sequence[EpochRecord], patience: int | None) -> bool:
    """Whether the last `patience` epochs brought nothing better; never without patience.

    >>> records = [EpochRecord(0, 0.1, 1.0, 0.5, 0.9, 0.6), EpochRecord(1, 0.1, 0.8, 0.6, 1.0, 0.5)]
    >>> out_of_patience(records, 1), out_of_patience(records, 2)
    (True, False)
    """
    best = best_epoch(history)
    return patience is not None and best is not None and len(history) - 1 - best >= patience
