"""One class for each image: the task that is assumed unless another is given."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import ClassVar, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from basisprune.errors import ConfigError, DataError
from basisprune.tasks.base import Task
from basisprune.tasks.outcomes import Outcomes, Rows, Units
from basisprune.torchkit.running import logits_of

Classes = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Classification(Task):
    """One class for each image. Budgets have metrics of their own for it (see `compress`)."""

    has_classes: ClassVar[bool] = True
    augments: ClassVar[bool] = True
    examples: ClassVar[str] = "images"
    precision: ClassVar[torch.dtype] = torch.float32

    @property
    def budget_metric(self) -> Literal["accuracy"]:
        return "accuracy"

    def to_dict(self) -> dict[str, str]:
        return {}  # files without a task are of this one

    def in_training(self, *, label_smoothing: float, temperature: float) -> Task:
        loss = partial(F.cross_entropy, label_smoothing=label_smoothing)
        return replace(self, loss=loss, distance=partial(_divergence, temperature=temperature))

    def head_size(self, classes: int) -> int:
        return classes

    def class_numbers(self, targets: object, count: int, where: str) -> Classes:
        if isinstance(targets, Tensor) and targets.shape == (count,) and not targets.is_floating_point():
            return cast("Classes", targets.cpu().numpy())
        kind = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        raise DataError(
            f"{where}: targets {kind} given for {count} examples; a classifier needs a class number for each. For "
            "other targets pass task=..."
        )

    def hits(self, rows: Rows) -> Bools:
        return np.equal(rows[:, 0], rows[:, 1])

    def chance(self, labels: Classes) -> float:
        return float(np.bincount(labels).max() / len(labels))

    def as_outcomes(self, rows: Rows, units: Units | None = None) -> Predictions:
        labels, classes, probabilities = rows.T
        return Predictions(classes.astype(np.int64), probabilities, labels.astype(np.int64), units)


class Predictions(Outcomes):
    """For each image the class that the model names, its probability, and the true class.

    Args:
        classes: The classes that the model names.
        probabilities: The probabilities that it gives to them.
        labels: The true classes.
        units: The number of each image's unit; images that belong together, such as copies, share one.

    >>> said = Predictions(np.array([0, 1]), np.array([0.9, 0.8]), np.array([0, 0]))
    >>> said.hits.tolist(), said.value, said.confusion(2)
    ([True, False], 0.5, [[1, 1], [0, 0]])
    """

    def __init__(
        self, classes: Classes, probabilities: npt.NDArray[np.float64], labels: Classes, units: Units | None = None
    ) -> None:
        columns = [np.asarray(column, dtype=np.float64) for column in (labels, classes, probabilities)]
        super().__init__(CLASSIFICATION, np.stack(columns, axis=1), units)

    @classmethod
    def of_hits(cls, hits: Bools) -> Predictions:
        """Make predictions of which only the hits are known: 1 for a hit, otherwise 0, where 1 is right."""
        ones = np.ones(len(hits), dtype=np.int64)
        return cls(hits.astype(np.int64), ones.astype(np.float64), ones)

    @cached_property
    def labels(self) -> Classes:
        return self.rows[:, 0].astype(np.int64)

    @cached_property
    def classes(self) -> Classes:
        return self.rows[:, 1].astype(np.int64)

    @property
    def probabilities(self) -> npt.NDArray[np.float64]:
        return self.rows[:, 2]

    @cached_property
    def hits(self) -> Bools:
        return CLASSIFICATION.hits(self.rows)

    @cached_property
    def value(self) -> float:
        """The accuracy, in which each image counts as one, whatever its unit."""
        return float(self.hits.mean())

    def lost_and_won(self, after: Outcomes) -> tuple[int, int]:
        """Count the images that only this network gets right, and only the other one."""
        mine, other = self.hits, cast(Predictions, after).hits
        return int((mine & ~other).sum()), int((~mine & other).sum())

    def confusion(self, num_classes: int) -> list[list[int]]:
        """Count the images of each class (row) that are taken for each class (column)."""
        table = np.zeros((num_classes, num_classes), dtype=np.int64)
        np.add.at(table, (self.labels, self.classes), 1)
        return table.tolist()


def _outcome(logits: Tensor, labels: Tensor) -> Tensor:
    """Return for each image its class, the class that is named, and its probability; 0 for NaN."""
    certainty, best = logits.float().softmax(1).max(1)
    return torch.stack([labels.to(certainty), best.to(certainty), certainty.nan_to_num(0.0)], dim=1)


def _accuracy(rows: Rows) -> float:
    return float((rows[:, 0] == rows[:, 1]).mean())


def _divergence(logits: Tensor, taught: Tensor, *, temperature: float) -> Tensor:
    """Return the divergence of the softened classes from those of a teacher (Hinton et al., 2015)."""
    if taught.shape != logits.shape:
        shapes = f"{tuple(taught.shape)} where the model outputs {tuple(logits.shape)}"
        raise ConfigError(f"teacher: outputs {shapes}; it must distinguish the same classes")
    student, goal = (F.log_softmax(values / temperature, dim=-1) for values in (logits, taught))
    # The square keeps the gradient as large as that of the labels, whatever the temperature.
    return temperature**2 * F.kl_div(student, goal, reduction="batchmean", log_target=True)


CLASSIFICATION = Classification(
    "classification",
    F.cross_entropy,
    _outcome,
    _accuracy,
    metric_name="accuracy",
    is_share=True,
    output=logits_of,
    distance=partial(_divergence, temperature=1.0),
)


def classification() -> Task:
    """The task of one class for each example: cross entropy of logits (N, classes) with labels (N,), and accuracy.

    This is what `compress`, `fit` and `evaluate` assume if no other task is given.

    >>> classification().metric_name
    'accuracy'
    """
    return CLASSIFICATION
