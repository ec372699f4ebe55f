"""What the report shows of a task that has no classes: masks of some images, or errors, before and after."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from basisprune.data import LabelledImages
from basisprune.results import Errors, ShownMask
from basisprune.tasks import Outcomes, Task
from basisprune.torchkit.running import mode, placed
from basisprune.training.evaluation import floats, task_batches

_MASKS, _ERRORS, _SIDE = 8, 400, 128
_COLOURS = (  # of classes, the first is the background
    *((245, 243, 238), (13, 122, 112), (196, 69, 60), (47, 109, 179), (214, 160, 40), (128, 84, 160), (90, 150, 60)),
    *((200, 110, 160), (110, 110, 110), (60, 170, 200), (160, 100, 50), (30, 70, 110)),
)


def shown_masks(task: Task, networks: Sequence[nn.Module], images: LabelledImages) -> tuple[ShownMask, ...]:
    """Some images with their true mask and those of both networks; none for tasks and images without masks."""
    if task.mask is None:
        return ()
    batch = next(iter(task_batches(images, networks[0], task, batch_size=_MASKS)))
    inputs, truth = batch.inputs[:_MASKS], batch.targets
    if not isinstance(truth, Tensor) or inputs.ndim != 4 or truth.numel() != len(truth) * math.prod(truth.shape[-2:]):
        return ()
    before, after = (_mask(task, network, inputs) for network in networks)
    truth = truth.reshape(len(truth), *truth.shape[-2:])[: len(inputs)].cpu()
    return tuple(
        ShownMask(picture_url(as_picture(image)), *(picture_url(_coloured(mask)) for mask in masks))
        for image, *masks in zip(inputs, truth, before, after, strict=True)
    )


def _mask(task: Task, network: nn.Module, inputs: Tensor) -> Tensor:
    assert task.mask is not None
    with torch.no_grad(), mode(network, training=False):
        mask = task.mask(floats(task.output(network(placed(inputs, network))))).cpu()
    return F.interpolate(mask[:, None].double(), inputs.shape[2:])[:, 0].to(mask.dtype)


def shown_errors(part: str, before: Outcomes, after: Outcomes) -> Errors | None:
    """The errors of examples before and after; of many, some spread over all."""
    errors = before.task.errors
    if errors is None:
        return None
    places = np.unique(np.linspace(0, len(before) - 1, min(len(before), _ERRORS)).round().astype(int))
    pair = (tuple(np.asarray(errors(each.rows))[places].tolist()) for each in (before, after))
    return Errors(part, *pair)


def as_picture(image: Tensor) -> Image.Image:
    """A prepared input (C, H, W) as a picture: three channels, or the first, stretched from black to white."""
    channels = image[:3] if image.shape[0] >= 3 else image[:1]
    low, high = channels.amin().item(), channels.amax().item()
    pixels = ((channels.float() - low) / max(high - low, 1e-12) * 255).round().to(torch.uint8)
    array = pixels.permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def _coloured(mask: Tensor) -> Image.Image:
    classes: npt.NDArray[np.int64] = mask.long().numpy()
    colours = np.array(_COLOURS, dtype=np.uint8)
    counts = (classes >= 0) & (classes < 255)
    places = np.where(classes > 0, 1 + (np.maximum(classes, 1) - 1) % (len(colours) - 1), 0)
    return Image.fromarray(np.where(counts[..., None], colours[places], np.uint8(0)).astype(np.uint8))


def picture_url(picture: Image.Image, side: int = _SIDE, resample: Image.Resampling = Image.Resampling.NEAREST) -> str:
    """A picture of at most that size as a data URL."""
    picture.thumbnail((side, side), resample)
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def picture_of(image: Tensor) -> Image.Image:
    """An image (C, H, W) of a dataset as a PIL image."""
    pixels = image if image.dtype == torch.uint8 else (image.clamp(0, 1) * 255).to(torch.uint8)
    array = pixels.permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
