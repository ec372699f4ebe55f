"""How good a network is: its loss and accuracy on labelled images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from basisprune.data import LabelledImages, Splits, make_loader, own_part, prepare
from basisprune.errors import DataError
from basisprune.tasks import CLASSIFICATION, Task, find_task
from basisprune.torchkit.running import mode, placed
from basisprune.training.outcomes import answers, joined, moved, task_batches
from basisprune.training.trainable import classes_of
from basisprune.transfer.model import spec_of

Data: TypeAlias = Dataset[object] | DataLoader[object] | Iterable[object]
"""Labelled images: a dataset of pairs, or a loader of batches, or any iterable of batches."""


@dataclass(frozen=True)
class Evaluation:
    """The mean loss, and the fraction of `count` images that are classified correctly.

    For other tasks than classification, `accuracy` is the metric of the name `metric`.
    """

    loss: float
    accuracy: float
    count: int
    metric: str = "accuracy"


def evaluate(
    model: nn.Module,
    data: Data,
    *,
    batch_size: int = 128,
    prepared: bool = False,
    accelerator: Accelerator | None = None,
    task: str | Task = CLASSIFICATION,
    workers: int = 0,
) -> Evaluation:
    """The loss and accuracy of the model on the data, in eval mode; with another `task`, the loss and metric of that.

    That is a Task, or a name that `compress` takes. Its data is any iterable of batches that the task reads. The model
    is moved to the accelerator's device, and otherwise not changed. `workers` processes read images.
    """
    accelerator, task = accelerator or Accelerator(), find_task(task)
    if not task.is_classification or own_part(data, task, batch_size) is not None:
        with accelerator.autocast():
            return _evaluated(model.to(accelerator.device), data, task, batch_size, prepared)
    spec = spec_of(model)
    images_of_data = cast("Dataset[object]", data)
    loader = accelerator.prepare_data_loader(
        make_loader(images_of_data, batch_size, size=spec.image_size, workers=workers)
    )
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


def _evaluated(model: nn.Module, data: object, task: Task, batch_size: int, prepared: bool) -> Evaluation:
    """The loss and metric of any task; every process goes through all of the data."""
    device, rows, losses, count = next(model.parameters()).device, [], 0.0, 0
    batches = task_batches(data, model, task, batch_size=batch_size, prepared=prepared)
    with torch.no_grad(), mode(model, training=False):
        for output, batch in answers(model, batches, task):
            targets, size = moved(batch.targets, device), len(batch.inputs)
            if task.model_loss is None:
                loss = task.output_loss(output, targets)
            else:
                loss = task.mean_loss(model, placed(batch.inputs, model), targets)
            rows.append(task.rows(output, targets, size))
            losses, count = losses + size * loss.item(), count + size
    found = joined(task, rows)
    return Evaluation(losses / count, found.value, count, task.metric_name)


def validation_images(model: nn.Module, splits: Splits, task: Task = CLASSIFICATION) -> LabelledImages:
    """The validation images; raises DataError if there are none, or if a classifier's classes differ from theirs."""
    classes = classes_of(model) if task.is_classification else splits.num_classes
    if classes != splits.num_classes:
        raise DataError(
            f"the data has {splits.num_classes} classes ({', '.join(splits.classes[:5])}, ...), but the model "
            f"has {classes}; build it with transfer_model(..., num_classes={splits.num_classes})"
        )
    if splits.val is None:
        raise DataError("the data has no validation images, which the scores need; pass val_fraction > 0")
    return splits.val
