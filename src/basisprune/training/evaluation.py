"""How good a network is: its loss and accuracy on labelled images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from basisprune.data import LabelledImages, Splits, make_loader, prepare
from basisprune.errors import DataError
from basisprune.torchkit.running import mode, placed
from basisprune.training.trainable import classes_of
from basisprune.transfer.model import spec_of

Data: TypeAlias = Dataset[object] | DataLoader[object]
"""Labelled images: a dataset of pairs, or a loader of batches."""


@dataclass(frozen=True)
class Evaluation:
    """The mean loss and the fraction of `count` images that are classified correctly."""

    loss: float
    accuracy: float
    count: int


def evaluate(
    model: nn.Module,
    data: Data,
    *,
    batch_size: int = 128,
    prepared: bool = False,
    accelerator: Accelerator | None = None,
    workers: int = 0,
) -> Evaluation:
    """The loss and accuracy of the model on the data, in eval mode; `workers` processes read the images.

    The model is moved to the accelerator's device, and otherwise not changed.
    """
    accelerator = accelerator or Accelerator()
    spec = spec_of(model)
    loader = accelerator.prepare_data_loader(make_loader(data, batch_size, size=spec.size, workers=workers))
    device = accelerator.device
    accuracy = MulticlassAccuracy(classes_of(model), average="micro", sync_on_compute=False).to(device)
    loss = MeanMetric(sync_on_compute=False).to(device)
    count = 0
    model.to(device)
    with torch.inference_mode(), mode(model, training=False), accelerator.autocast():
        for images, labels in loader:
            logits = model(placed(prepare(images, spec, prepared=prepared), model)).float()
            logits, labels = accelerator.gather_for_metrics((logits, labels))
            accuracy.update(logits, labels)
            loss.update(F.cross_entropy(logits, labels), len(labels))
            count += len(labels)
    if count == 0:
        raise DataError("evaluate: the data contains no images")
    return Evaluation(loss.compute().item(), accuracy.compute().item(), count)


def validation_images(model: nn.Module, splits: Splits) -> LabelledImages:
    """The validation images; raises DataError if there are none, or if their classes differ from the model's."""
    classes = classes_of(model)
    if classes != splits.num_classes:
        raise DataError(
            f"the data has {splits.num_classes} classes ({', '.join(splits.classes[:5])}, ...), but the model "
            f"has {classes}; build it with transfer_model(..., num_classes={splits.num_classes})"
        )
    if splits.val is None:
        raise DataError("the data has no validation images, which the scores need; pass val_fraction > 0")
    return splits.val
