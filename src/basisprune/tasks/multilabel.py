"""Several labels for each example, or none: binary cross entropy, mean average precision or F1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from basisprune.errors import ConfigError, DataError
from basisprune.tasks.base import Task, check_metric_name, read_pair, shape_of
from basisprune.tasks.outcomes import Rows
from basisprune.torchkit.running import logits_of

MultilabelMetric: TypeAlias = Literal["ap", "f1"]
_NAMES = {"ap": "mean AP", "f1": "mean F1"}


def multilabel(
    metric: MultilabelMetric = "ap",
    *,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    read: Callable[[Any], tuple[Tensor, Any]] | None = None,
) -> Task:
    """The task of any number of labels for each example.

    The network outputs logits (N, labels), the targets (N, labels) are 0 or 1. The loss is the binary cross entropy,
    unless another one is given. "ap" is the mean over the labels of the average precision, "f1" that of the F1 score at
    a probability of one half; labels that no example has do not count.

    >>> multilabel().metric_name
    'mean AP'
    """
    if faults := check_metric_name(metric, _NAMES):
        raise ConfigError.of("multilabel", faults)
    return Task(
        "multilabel",
        loss or _cross_entropy,
        _outcome,
        mean_average_precision if metric == "ap" else mean_f1,
        metric_name=_NAMES[metric],
        is_share=True,
        output=logits_of,
        distance=lambda logits, taught: F.binary_cross_entropy_with_logits(logits, taught.sigmoid()),
        read=read or read_pair,
    )


def mean_average_precision(rows: Rows) -> float:
    """The mean over labels of the average precision, from logits and labels side by side: (n, 2 * labels).

    The average precision is the mean over an example's true labels of the precision at its rank; of equal scores, all
    are ranked last.

    >>> mean_average_precision(np.array([[0.9, 1.0], [0.8, 0.0], [0.7, 1.0]])) == (1 + 2 / 3) / 2
    True
    """
    scores, labels = np.split(rows, 2, axis=1)
    found = [_average_precision(scores[:, each], labels[:, each]) for each in np.flatnonzero(labels.any(0))]
    return float(np.mean(found)) if found else 0.0


def _average_precision(scores: Rows, labels: Rows) -> float:
    order = np.argsort(-scores, kind="stable")
    ranked, right = scores[order], np.cumsum(labels[order])
    last = np.append(ranked[1:] != ranked[:-1], True)  # of each run of equal scores
    precision, recall = right[last] / (np.flatnonzero(last) + 1), right[last] / right[-1]
    return float(np.sum(np.diff(recall, prepend=0.0) * precision))


def mean_f1(rows: Rows) -> float:
    """The mean over labels of the F1 score, from the same numbers."""
    scores, labels = np.split(rows, 2, axis=1)
    said = scores > 0
    right, total = (said * labels).sum(0), said.sum(0) + labels.sum(0)
    there = labels.any(0)
    return float(np.mean(2 * right[there] / total[there])) if there.any() else 0.0


def _fitting(logits: Tensor, labels: object) -> Tensor:
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor) or logits.shape != labels.shape:
        raise DataError(
            f"task multilabel: logits {shape_of(logits)} and labels {shape_of(labels)} given; both must be (N, labels)"
        )
    return labels.to(logits.dtype)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, _fitting(logits, labels))


def _outcome(logits: Tensor, labels: Tensor) -> Tensor:
    return torch.cat([logits, _fitting(logits, labels)], dim=1)
