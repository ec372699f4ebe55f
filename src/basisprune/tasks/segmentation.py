"""One class for each pixel: cross entropy, mean IoU or Dice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from basisprune.errors import ConfigError, DataError
from basisprune.tasks.base import Task, check_metric_name, read_pair, shape_of
from basisprune.tasks.outcomes import Rows
from basisprune.torchkit.running import logits_of

SegmentationMetric: TypeAlias = Literal["iou", "dice"]
_ENLARGING = ("linear", "bilinear", "trilinear")
_NAMES = {"iou": "mean IoU", "dice": "mean Dice"}


def segmentation(
    metric: SegmentationMetric = "iou",
    *,
    ignore_index: int = -100,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    read: Callable[[Any], tuple[Tensor, Any]] | None = None,
) -> Task:
    """The task of one class for each pixel, voxel or position.

    The network outputs scores (N, classes, ...), or a dict with them under "out", as torchvision's do; with a single
    channel, scores of the one class beside the background. Outputs with `logits`, as those of transformers, are
    enlarged to the size of the masks. In training, a network may output those of several heads (N, heads, classes,
    ...), as MONAI's with deep supervision: the first one counts, and each one has half the share of the loss of the one
    before, unless another loss is given, which gets them all. Targets are classes (N, ...); pixels of `ignore_index` do
    not count. The loss is the cross entropy, unless another one is given.

    "iou" is the mean over the classes of intersection over union, "dice" that of twice the intersection over the sum;
    both are counted over all examples, and classes that are neither there nor predicted do not count.

    >>> segmentation("dice").metric_name
    'mean Dice'
    """
    if faults := check_metric_name(metric, _NAMES):
        raise ConfigError.of("segmentation", faults)
    return Task(
        "segmentation",
        partial(_loss, loss=loss, ignore_index=ignore_index),
        partial(_counts, ignore_index=ignore_index),
        mean_iou if metric == "iou" else mean_dice,
        metric_name=_NAMES[metric],
        is_share=True,
        output=_scores,
        distance=_distance,
        mask=predicted_mask,
        read=read or read_pair,
    )


def mean_iou(rows: Rows) -> float:
    """The mean IoU from each example's intersections, predicted and true pixels: (n, 3 * classes).

    >>> mean_iou(np.array([[3.0, 1.0, 4.0, 2.0, 4.0, 2.0]])) == (3 / 5 + 1 / 3) / 2
    True
    """
    both, said, are = rows.sum(0).reshape(3, -1)
    union = said + are - both
    return _mean_over_classes(both, union)


def mean_dice(rows: Rows) -> float:
    """The mean Dice score from the same numbers."""
    both, said, are = rows.sum(0).reshape(3, -1)
    return _mean_over_classes(2 * both, said + are)


def predicted_mask(output: Tensor | _Small) -> Tensor:
    """Return the class (N, ...) of each pixel."""
    scores = _tensor(output)
    return (scores[:, 0] > 0).long() if scores.shape[1] == 1 else scores.argmax(1)


def _mean_over_classes(part: Rows, whole: Rows) -> float:
    there = whole > 0
    # Without any class there is nothing that could be wrong.
    return float(np.mean(part[there] / whole[there])) if there.any() else 1.0


class _Small(NamedTuple):
    """Scores of the positions of a smaller map, which its network leaves to others to enlarge."""

    logits: Tensor


def _scores(raw: Any) -> Tensor | _Small:
    found = logits_of(raw)
    scores = raw.get("out") if found is raw and isinstance(raw, dict) else found
    if not isinstance(scores, Tensor) or scores.ndim < 3:
        raise DataError(
            f"task segmentation: the network outputs {shape_of(scores)}; scores (N, classes, ...), a dict with 'out' "
            "or an output with .logits are needed. Other networks need a Task of their own, with output=..."
        )
    return scores if found is raw else _Small(scores)


def _tensor(output: Tensor | _Small) -> Tensor:
    return output.logits if isinstance(output, _Small) else output


def _enlarged(output: Tensor | _Small, masks: object) -> Tensor:
    """The scores of each pixel of the masks, as the post-processing of transformers makes them."""
    scores = _tensor(output)
    if scores is output or not isinstance(masks, Tensor) or masks.ndim < scores.ndim - 1:
        return scores
    size = masks.shape[2 - scores.ndim :]
    return F.interpolate(scores, size, mode=_ENLARGING[scores.ndim - 3], align_corners=False)


def _heads(scores: Tensor, masks: object) -> tuple[Tensor, ...]:
    """The scores of each of several heads."""
    shape = tuple(masks.shape) if isinstance(masks, Tensor) else ()
    spatial = scores.shape[3:]
    is_stacked = len(spatial) > 0 and shape in ((len(scores), *spatial), (len(scores), 1, *spatial))
    return scores.unbind(1) if is_stacked and shape[1:] != scores.shape[2:] else (scores,)


def _fitting(scores: Tensor, masks: object, ignore_index: int) -> Tensor:
    """Return the true classes; raise DataError where they do not fit the scores."""
    if isinstance(masks, Tensor) and masks.ndim == scores.ndim and masks.shape[1] == 1:
        masks = masks[:, 0]
    wanted = (len(scores), *scores.shape[2:])
    if not isinstance(masks, Tensor) or tuple(masks.shape) != wanted:
        raise DataError(
            f"task segmentation: masks {shape_of(masks)} given for scores {tuple(scores.shape)}; {wanted} is needed"
        )
    masks, classes = masks.long(), max(scores.shape[1], 2)
    wrong = (masks != ignore_index) & ((masks < 0) | (masks >= classes))
    if bool(wrong.any()):
        raise DataError(
            f"task segmentation: class {int(masks[wrong][0])} in a mask; 0..{classes - 1} is allowed for {classes} "
            "classes, and ignore_index for pixels that do not count: pass segmentation(ignore_index=...)"
        )
    return masks


def _loss(
    output: Tensor | _Small, masks: Any, *, loss: Callable[[Tensor, Tensor], Tensor] | None, ignore_index: int
) -> Tensor:
    scores = _enlarged(output, masks)
    if loss is not None:
        return loss(scores, masks)
    heads = _heads(scores, masks)
    shares = [0.5**place for place in range(len(heads))]
    each = [
        share * _cross_entropy(head, masks, ignore_index=ignore_index)
        for share, head in zip(shares, heads, strict=True)
    ]
    return torch.stack(each).sum() / sum(shares) if len(each) > 1 else each[0]


def _cross_entropy(scores: Tensor, masks: Tensor, *, ignore_index: int) -> Tensor:
    masks = _fitting(scores, masks, ignore_index)
    counts = (masks != ignore_index).sum().clamp(min=1)
    if scores.shape[1] > 1:
        return F.cross_entropy(scores, masks, ignore_index=ignore_index, reduction="sum") / counts
    wanted = (masks > 0).to(scores.dtype)
    each = F.binary_cross_entropy_with_logits(scores[:, 0], wanted, reduction="none")
    return (each * (masks != ignore_index)).sum() / counts


def _counts(output: Tensor | _Small, masks: Tensor, *, ignore_index: int) -> Tensor:
    """For each example and class: the pixels that are both, that are said to be it, and that are it."""
    scores = _heads(_enlarged(output, masks), masks)[0]
    masks = _fitting(scores, masks, ignore_index).flatten(1)
    said, valid, classes = predicted_mask(scores).flatten(1), masks != ignore_index, max(scores.shape[1], 2)
    ones = valid.double()

    def per_class(found: Tensor, weights: Tensor) -> Tensor:
        places = torch.where(valid, found, 0)
        return torch.zeros(len(found), classes, dtype=torch.float64, device=found.device).scatter_add_(
            1, places, weights
        )

    return torch.cat([per_class(masks, ones * (said == masks)), per_class(said, ones), per_class(masks, ones)], dim=1)


def _distance(output: Tensor | _Small, goal: Tensor | _Small) -> Tensor:
    """The mean over pixels of the divergence from what the teacher says."""
    scores, taught = _tensor(output), _tensor(goal)
    if scores.ndim == taught.ndim + 1:  # of several heads; the teacher, in eval mode, has one
        scores = scores[:, 0]
    if scores.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(scores, taught.sigmoid())
    student, teacher = (F.log_softmax(each, dim=1) for each in (scores, taught))
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(1).mean()
