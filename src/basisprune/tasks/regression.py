"""Numbers for each example: squared errors, R2 or the mean absolute error."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from basisprune.errors import ConfigError, DataError
from basisprune.tasks.base import Task, check_limits, check_metric_name, read_pair, shape_of
from basisprune.tasks.outcomes import Rows
from basisprune.torchkit.running import logits_of

RegressionMetric: TypeAlias = Literal["r2", "mae", "mse"]
Limits: TypeAlias = tuple[float, float] | None
_POWERS = {"mae": 1, "mse": 2}
_NAMES = {"r2": "R2", "mae": "negative mean absolute error", "mse": "negative mean squared error"}


def regression(
    metric: RegressionMetric = "r2",
    *,
    limits: tuple[float, float] | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    read: Callable[[Any], tuple[Tensor, Any]] | None = None,
) -> Task:
    """The task of one number, or several, for each example.

    The network outputs (N, numbers) or (N,), the targets have the same shape; the loss is the mean squared error,
    unless another one is given. "r2" is the share of the targets' variance that is explained, averaged over the
    numbers; "mae" and "mse" are the mean absolute and squared error, negated, because more has to be better.

    `limits` are the least and the largest number that a target can be, without which nothing is certified. A prediction
    beyond them counts as if it were the limit.

    >>> regression("mae").metric_name
    'negative mean absolute error'
    """
    faults = check_metric_name(metric, _NAMES) + check_limits(limits)
    if faults:
        raise ConfigError.of("regression", faults)
    errors = {"r2": _errors, "mae": lambda rows: -rows[:, 0], "mse": lambda rows: np.sqrt(-rows[:, 0])}
    return Task(
        "regression",
        loss or (lambda said, are: F.mse_loss(*_fitting(said, are))),
        partial(_outcome, metric=metric, limits=limits),
        r2 if metric == "r2" else None,
        metric_name=_NAMES[metric],
        is_share=False,
        output=logits_of,
        distance=lambda said, taught: F.mse_loss(_flat(said), _flat(taught)),
        errors=errors[metric],
        limits=None if limits is None or metric == "r2" else (-((limits[1] - limits[0]) ** _POWERS[metric]), 0.0),
        influence=None if limits is None or metric != "r2" else partial(_most_lost, limits=limits),
        read=read or read_pair,
    )


def r2(rows: Rows) -> float:
    """The coefficient of determination from predictions and targets side by side (n, 2 * numbers), averaged.

    Targets that do not vary are explained if they are met exactly.

    >>> r2(np.array([[1.0, 1.0], [2.0, 2.0], [4.0, 3.0]]))
    0.5
    """
    said, are = np.split(rows, 2, axis=1)
    left, spread = np.square(said - are).sum(0), np.square(are - are.mean(0)).sum(0)
    explained = np.where(spread > 0, 1 - left / np.where(spread > 0, spread, 1.0), np.where(left > 0, 0.0, 1.0))
    return float(explained.mean())


def _flat(values: Tensor) -> Tensor:
    return values.reshape(len(values), -1)


def _fitting(said: object, are: object) -> tuple[Tensor, Tensor]:
    """Both as (N, numbers)."""
    if isinstance(said, Tensor) and isinstance(are, Tensor) and len(said) == len(are):
        said, are = _flat(said), _flat(are).to(said.dtype)
        if said.shape == are.shape:
            return said, are
    raise DataError(
        f"task regression: the network outputs {shape_of(said)}, the targets are {shape_of(are)}; they must agree"
    )


def _within(said: Tensor, are: Tensor, limits: Limits) -> tuple[Tensor, Tensor]:
    """Both as (N, numbers), predictions within the limits; raises DataError for targets that are not."""
    said, are = _fitting(said, are)
    if limits is None:
        return said, are
    wrong = are[(are < limits[0]) | (are > limits[1])]
    if len(wrong):
        raise DataError(f"task regression: the target {float(wrong[0]):g} given, but limits={limits}; pass wider ones")
    return said.clamp(*limits), are


def _outcome(said: Tensor, are: Tensor, *, metric: RegressionMetric, limits: Limits) -> Tensor:
    """Return both side by side for R2, or else the negated error of each example."""
    one, other = _within(said, are, limits)
    if metric == "r2":
        return torch.cat([one, other], dim=1)
    error = (one - other).abs() if metric == "mae" else (one - other).square()
    return -error.mean(1, keepdim=True)


def _most_lost(rows: Rows, *, limits: tuple[float, float]) -> float:
    """What R2 loses by an example that is as wrong as it can be, times the number of examples."""
    _, are = np.split(rows, 2, axis=1)
    spread = are.var(0)
    return float(np.mean((limits[1] - limits[0]) ** 2 / spread)) if spread.all() else math.inf


def _errors(rows: Rows) -> Rows:
    said, are = np.split(rows, 2, axis=1)
    errors: Rows = np.abs(said - are).mean(1)
    return errors
