"""How good a network is on a part of the data: its loss and metric, and what it says of each example."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias, cast

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset

from basisprune.data import LabelledImages, PreparedBatches, Splits, make_loader, own_part, prepare
from basisprune.errors import DataError
from basisprune.tasks import CLASSIFICATION, Outcomes, Predictions, Task, find_task
from basisprune.torchkit.running import ReadBatch, mode, placed
from basisprune.training.precision import single_at_least
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
    is_shared = own_part(data, task, batch_size) is None and task.model_loss is None
    model.to(accelerator.device)
    batches: Iterable[ReadBatch] = (
        _shared(model, data, batch_size, prepared, accelerator, workers)
        if is_shared
        else task_batches(data, model, task, batch_size=batch_size, prepared=prepared)
    )
    rows, total, count = [], torch.zeros((), dtype=task.precision), 0
    with torch.no_grad(), mode(model, training=False), accelerator.autocast():
        for output, batch in answers(model, batches, task):
            targets, size = moved(batch.targets, accelerator.device), len(batch.inputs)
            if is_shared:
                output, targets = accelerator.gather_for_metrics((output, targets))
                size = len(cast(Tensor, targets))
            if task.model_loss is not None:
                loss = task.mean_loss(model, placed(batch.inputs, model), targets)
            else:
                loss = task.output_loss(output, targets)
            rows.append(task.rows(output, targets, size))
            total, count = total + size * loss.cpu().to(task.precision), count + size
    value = torch.tensor(task.outcomes(rows).value, dtype=task.precision)
    return Evaluation((total / count).item(), value.item(), count, task.metric_name)


def _shared(
    model: nn.Module, data: Data, batch_size: int, prepared: bool, accelerator: Accelerator, workers: int
) -> Iterator[ReadBatch]:
    """Batches of images that are prepared here, on the device; processes of a distributed run share each."""
    spec = spec_of(model)
    loader = make_loader(cast("Dataset[object]", data), batch_size, size=spec.image_size, workers=workers)
    for images, labels in accelerator.prepare_data_loader(loader):
        yield ReadBatch(prepare(images, spec, prepared=prepared), labels)


@torch.inference_mode()
def judge(model: nn.Module, data: object, task: Task, *, batch_size: int = 128, prepared: bool = False) -> Outcomes:
    """The outcomes of the model on all examples of the data, in order, in eval mode; the model is not changed.

    The processes of a distributed run share images that are prepared here, and each gets the outcomes of all.
    """
    device = next(model.parameters()).device
    batches = task_batches(data, model, task, batch_size=batch_size, prepared=prepared, shared=True)
    with mode(model, training=False):
        rows = [
            task.rows(output, moved(batch.targets, device), len(batch.inputs))
            for output, batch in answers(model, batches, task)
        ]
    if isinstance(batches, PreparedBatches) and rows:
        rows = [batches.gathered([torch.from_numpy(part) for part in rows]).numpy()]
    return task.outcomes(rows, data)


def predict(model: nn.Module, data: Data, *, batch_size: int = 128, prepared: bool = False) -> Predictions:
    """The model's predictions for all images of the data, in order, in eval mode; the model is not changed.

    The processes of a distributed run share the images, and each gets all predictions.
    """
    return cast(Predictions, judge(model, data, CLASSIFICATION, batch_size=batch_size, prepared=prepared))


def task_batches(
    data: object,
    model: nn.Module,
    task: Task,
    *,
    batch_size: int = 128,
    prepared: bool = False,
    shared: bool = False,
) -> Iterable[ReadBatch]:
    """The data as batches of what the network reads and the targets: somebody's own, or images prepared here.

    Images that are `shared` are divided among the processes of a distributed run.
    """
    own = own_part(data, task, batch_size)
    if own is not None:
        return own
    images = cast("Dataset[object]", data)  # which is looked at there
    return cast(
        "Iterable[ReadBatch]",
        PreparedBatches(images, spec_of(model), batch_size=batch_size, prepared=prepared, shared=shared),
    )


def answers(model: nn.Module, batches: Iterable[ReadBatch], task: Task) -> Iterator[tuple[object, ReadBatch]]:
    """What counts of the network's output for each batch, with the batch; in the mode that the network is in."""
    for batch in batches:
        yield floats(task.output(model(placed(batch.inputs, model)))), batch


def floats(output: object) -> object:
    """The output with its tensors of half precision in float32."""
    return tree_map(
        lambda leaf: single_at_least(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, output
    )


def moved(targets: object, device: torch.device) -> object:
    """The targets on that device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, targets)


def validation_images(model: nn.Module, splits: Splits, task: Task = CLASSIFICATION) -> LabelledImages:
    """The validation images; raises DataError if there are none, or if a classifier's classes differ from theirs."""
    classes = classes_of(model) if task.has_classes else splits.num_classes
    if classes != splits.num_classes:
        raise DataError(
            f"the data has {splits.num_classes} classes ({', '.join(splits.classes[:5])}, ...), but the model "
            f"has {classes}; build it with transfer_model(..., num_classes={splits.num_classes})"
        )
    if splits.val is None:
        raise DataError("the data has no validation images, which the scores need; pass val_fraction > 0")
    return splits.val
