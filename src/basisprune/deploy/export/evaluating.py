"""How accurate an ONNX file is, and what it says of each example."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.data import Dataset

from basisprune.data import is_prepared, own_part, prepare
from basisprune.data.loaders import make_loader
from basisprune.deploy.export.common import PixelLayout
from basisprune.deploy.export.facts import GraphInput, read_facts
from basisprune.deploy.export.guard import guarded
from basisprune.deploy.export.onnx import ONNX_RUNTIME
from basisprune.deploy.export.runtime import notes_in, open_session, require_onnx, run_all
from basisprune.errors import DataError, ModelError
from basisprune.tasks import CLASSIFICATION, Outcomes, Task
from basisprune.torchkit.running import mode, placed
from basisprune.training.evaluation import Data, Evaluation
from basisprune.types import InputSpec


def evaluate_onnx(path: str | Path, data: Data, *, batch_size: int = 128) -> Evaluation:
    """Measure the loss and accuracy of an ONNX file of `export_onnx`, in onnxruntime on the CPU.

    The file runs in a process of its own, with bounded memory and time.

    Args:
        path: The file.
        data: Labelled images, which are prepared as the file's metadata says.
        batch_size: Images per batch.

    Returns:
        The mean loss, the accuracy, and the number of images.

    Raises:
        ModelError: The file cannot be read, or does not say how its images are prepared.
        DataError: There are no images, or prepared ones for a file that prepares them itself.
    """
    require_onnx()
    path, threads = Path(path), torch.get_num_threads()
    runtime = guarded(ONNX_RUNTIME, threads)
    wanted = runtime.facts(path).input
    run = runtime.open(path, threads)
    losses, rows = 0.0, []
    for images, labels in make_loader(cast("Dataset[object]", data), batch_size, size=wanted.spec.image_size):
        scores = runtime.scores(run, _inputs(images, wanted, prepared=is_prepared(data)))
        losses += F.cross_entropy(scores, labels, reduction="sum").item()
        rows.append(CLASSIFICATION.rows(scores, labels, len(images)))
    found = CLASSIFICATION.outcomes(rows)
    return Evaluation(losses / len(found), found.value, len(found))


@torch.inference_mode()
def judge_onnx(path: str | Path, like: nn.Module, data: Data, task: Task, *, batch_size: int = 64) -> Outcomes:
    """Return the outcomes on the data of an ONNX file that this program wrote, in order, in onnxruntime on the CPU.

    The file outputs the tensors of the network in a flat list; `like` is the network itself, whose output tells how
    they are nested.
    """
    require_onnx()
    session = open_session(Path(path), torch.get_num_threads())
    own, structure, rows, prepared = own_part(data, task, batch_size), None, [], is_prepared(data)
    wanted = None if own is not None else read_facts(Path(path), notes_in(session)).input
    batches = own if wanted is None else make_loader(data, batch_size, size=wanted.spec.image_size)
    for images, targets in batches:  # type: ignore[union-attr]
        inputs = images.float().contiguous() if wanted is None else _inputs(images, wanted, prepared=prepared)
        if structure is None:
            structure = _structure(like, images if wanted is None else prepare(images, wanted.spec, prepared=prepared))
        output = tree_unflatten(run_all(session, inputs), structure)
        rows.append(task.rows(task.output(output), targets, len(images)))
    return task.outcomes(rows, data)


def _structure(model: nn.Module, inputs: Tensor) -> TreeSpec:
    """Return how the tensors that the model outputs are nested."""
    with mode(model, training=False):
        leaves, structure = tree_flatten(model(placed(inputs[:1], model)))
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise ModelError(f"{type(model).__name__} outputs other things than tensors, which no ONNX file has")
    return structure


def _inputs(images: Tensor, wanted: GraphInput, *, prepared: bool) -> Tensor:
    if not wanted.prepares:
        return prepare(images, wanted.spec, prepared=prepared).contiguous()
    if prepared:
        raise DataError("evaluate_onnx: the file prepares its images itself; pass pixels, not prepared images")
    return as_pixels(images, wanted.spec, wanted.layout)


def as_pixels(images: Tensor, spec: InputSpec, layout: PixelLayout = "NHWC") -> Tensor:
    """A batch of images of any size as the pixels that an exported graph with `preprocess` takes: uint8, resized."""
    raw = replace(spec, mean=(0.0,) * spec.channels, std=(1.0,) * spec.channels)
    pixels = (prepare(images, raw) * 255).round().to(torch.uint8)
    return (pixels.permute(0, 2, 3, 1) if layout == "NHWC" else pixels).contiguous()
