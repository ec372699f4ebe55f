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

from basisprune.data import LabelledImages, PreparedBatches, Splits, is_prepared, make_loader, own_part, prepare
from basisprune.errors import DataError
from basisprune.tasks import CLASSIFICATION, Outcomes, Predictions, Task, find_task
from basisprune.torchkit.running import ReadBatch, mode, placed, plain_tensors
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
    accelerator: Accelerator | None = None,
    task: str | Task = CLASSIFICATION,
    workers: int = 0,
) -> Evaluation:
    """Measure the loss and accuracy of a model, or the loss and metric of another task, in eval mode.

    Args:
        model: The network; it is moved to the accelerator's device, and otherwise not changed.
        data: Labelled images, or any iterable of batches that the task reads.
        batch_size: Images per batch, of images that are prepared here.
        accelerator: Device and precision; by default those that Accelerate finds.
        task: A `Task`, or a name that `compress` takes.
        workers: Processes that read images.

    Returns:
        The mean loss, the metric, and the number of examples.

    Raises:
        DataError: The data is empty, or not what the task reads.

    >>> batches = [(torch.eye(2), torch.tensor([0, 0]))]
    >>> evaluate(nn.Linear(2, 2), batches).count
    2
    """
    accelerator, task = accelerator or Accelerator(), find_task(task)
    is_shared = own_part(data, task, batch_size) is None and task.model_loss is None
    model.to(accelerator.device)
    batches: Iterable[ReadBatch]
    if is_shared:  # by the processes of a distributed run
        batches = _accelerated(model, data, batch_size, accelerator, workers)
    else:
        batches = task_batches(data, model, task, batch_size=batch_size)
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


def _accelerated(
    model: nn.Module, data: Data, batch_size: int, accelerator: Accelerator, workers: int
) -> Iterator[ReadBatch]:
    spec, prepared = spec_of(model), is_prepared(data)
    loader = make_loader(cast("Dataset[object]", data), batch_size, size=spec.image_size, workers=workers)
    for images, labels in map(plain_tensors, accelerator.prepare_data_loader(loader)):
        yield ReadBatch(prepare(images, spec, prepared=prepared), labels)


@torch.no_grad()  # and not inference_mode: a network may keep a tensor of this run, and be trained with it
def judge(model: nn.Module, data: object, task: Task, *, batch_size: int = 128, shared: bool = True) -> Outcomes:
    """Return the outcomes of the model on all examples of the data, in order, in eval mode; the model is not changed.

    If `shared`, the processes of a distributed run share images that are prepared here; each gets the outcomes of all.
    """
    device = next(model.parameters()).device
    batches = task_batches(data, model, task, batch_size=batch_size, shared=shared)
    with mode(model, training=False):
        rows = [
            task.rows(output, moved(batch.targets, device), len(batch.inputs))
            for output, batch in answers(model, batches, task)
        ]
    if isinstance(batches, PreparedBatches) and rows:
        rows = [batches.gathered([torch.from_numpy(part) for part in rows]).numpy()]
    return task.outcomes(rows, data)


def predict(model: nn.Module, data: Data, *, batch_size: int = 128) -> Predictions:
    """Predict the classes of all images of the data, in order, in eval mode.

    The processes of a distributed run share the images, and each gets all predictions.

    Args:
        model: The network; it is not changed.
        data: Labelled images, or any iterable of batches (inputs, labels).
        batch_size: Images per batch, of images that are prepared here.

    Returns:
        For each image the class that the model names, its probability, and the true class.

    Raises:
        DataError: The data is empty.

    >>> predict(nn.Linear(2, 2), [(torch.eye(2), torch.tensor([0, 0]))]).labels
    array([0, 0])
    """
    return cast(Predictions, judge(model, data, CLASSIFICATION, batch_size=batch_size))


def task_batches(
    data: object, model: nn.Module, task: Task, *, batch_size: int = 128, shared: bool = False
) -> Iterable[ReadBatch]:
    """Return batches of inputs and targets: those of a loader that was given, or of images that are prepared here.

    With `shared`, these images are divided among the processes of a distributed run.
    """
    own = own_part(data, task, batch_size)
    if own is not None:
        return own
    images = cast("Dataset[object]", data)  # which is looked at there
    prepared = PreparedBatches(images, spec_of(model), batch_size=batch_size, shared=shared)
    return cast("Iterable[ReadBatch]", prepared)


def answers(model: nn.Module, batches: Iterable[ReadBatch], task: Task) -> Iterator[tuple[object, ReadBatch]]:
    """Yield what the task reads from the network's output for each batch, with the batch."""
    for batch in batches:
        yield floats(task.output(model(placed(batch.inputs, model)))), batch


def single_at_least(values: Tensor) -> Tensor:
    """Return the values in float32, or in float64 if they are: a loss needs the digits."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def floats(output: object) -> object:
    """Return the output with its tensors of half precision in float32."""

    def widened(leaf: object) -> object:
        return single_at_least(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return tree_map(widened, output)


def moved(targets: object, device: torch.device) -> object:
    """Return the targets on that device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, targets)


def validation_images(model: nn.Module, splits: Splits, task: Task = CLASSIFICATION) -> LabelledImages:
    """Return the validation images; raise DataError without any, or if a classifier's classes differ from theirs."""
    wanted = task.head_size(splits.num_classes)
    if wanted is not None and (classes := classes_of(model)) != wanted:
        raise DataError(
            f"the data has {splits.num_classes} classes ({', '.join(splits.classes[:5])}, ...), but the model "
            f"has {classes}; build it with transfer_model(..., num_classes={splits.num_classes})"
        )
    if splits.val is None:
        raise DataError("the data has no validation images, which the scores need; pass val_fraction > 0")
    return splits.val
