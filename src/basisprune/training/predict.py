"""What a model says of images: one class for each, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from basisprune.data import PreparedBatches
from basisprune.errors import DataError
from basisprune.tasks import CLASSIFICATION
from basisprune.torchkit.running import mode, placed
from basisprune.training.evaluation import Data
from basisprune.training.outcomes import task_batches
from basisprune.training.units import Units, units_in


@dataclass(frozen=True)
class Predictions:
    """For each image the class that the model names, the probability it gives to it, and the true class.

    `units` are the images that belong together (see `training.units`); None where none do.
    """

    classes: npt.NDArray[np.int64]
    probabilities: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    units: Units | None = None

    @classmethod
    def of(
        cls,
        classes: npt.NDArray[np.int64],
        probabilities: npt.NDArray[np.float64],
        labels: npt.NDArray[np.int64],
        data: object,
    ) -> Predictions:
        """The predictions of all images of the data, and which of them belong together."""
        return cls(classes, probabilities, labels, units_in(data, len(labels)))

    def __len__(self) -> int:
        """The number of units."""
        return len(self.labels) if self.units is None else len(np.unique(self.units))

    @property
    def hits(self) -> npt.NDArray[np.bool_]:
        """Which images are classified correctly."""
        return np.equal(self.classes, self.labels)

    def confusion(self, num_classes: int) -> list[list[int]]:
        """How many images of each class (row) are taken for each class (column)."""
        table = np.zeros((num_classes, num_classes), dtype=np.int64)
        np.add.at(table, (self.labels, self.classes), 1)
        return table.tolist()


@torch.inference_mode()
def predict(model: nn.Module, data: Data, *, batch_size: int = 128, prepared: bool = False) -> Predictions:
    """The model's predictions for all images of the data, in order, in eval mode; the model is not changed.

    The processes of a distributed run share the images, and each gets all predictions.
    """
    classes, probabilities, labels = [], [], []
    batches = task_batches(data, model, CLASSIFICATION, batch_size=batch_size, prepared=prepared, shared=True)
    with mode(model, training=False):
        for images, given in batches:
            certainty, best = model(placed(images, model)).float().softmax(1).max(1)
            classes.append(best.cpu())
            probabilities.append(certainty.double().cpu())
            labels.append(cast(Tensor, given))
    if not labels:
        raise DataError("predict: the data contains no images")
    gathered = batches.gathered if isinstance(batches, PreparedBatches) else torch.cat
    named, sure, true = (gathered(each) for each in (classes, probabilities, labels))
    return Predictions.of(named.numpy(), sure.numpy(), true.to(torch.int64).numpy(), data)
