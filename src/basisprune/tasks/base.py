"""A task: how a batch is read, its loss, and the outcome of each example."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from basisprune.errors import BasisPruneError, ConfigError, DataError, TrainingError, nearest
from basisprune.tasks.outcomes import Outcomes, Rows, Units, units_in
from basisprune.torchkit.running import ReadBatch, images_of, plain_tensors

_ROUNDING = 1e-5  # in relation to the length of the range


def check_limits(limits: object) -> list[str]:
    """List the faults of the limits of numbers."""
    match limits:
        case None:
            return []
        case (int() | float() as low, int() | float() as high) if -math.inf < low < high < math.inf:
            return []
    return [f"limits: {limits!r} given; two finite numbers are needed, the smaller one first"]


def check_metric_name(metric: object, known: Collection[str]) -> list[str]:
    """List the faults of the name of a metric.

    >>> check_metric_name("dise", ["iou", "dice"])
    ["metric: 'dise' given; allowed are iou, dice. Did you mean 'dice'?"]
    """
    hint = nearest(str(metric), known)
    return [] if metric in known else [f"metric: {metric!r} given; allowed are {', '.join(known)}.{hint}"]


def shape_of(value: object) -> str:
    """Describe a value in a message: the shape of a tensor, the type of others."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def read_pair(batch: object) -> tuple[Tensor, object]:
    """Return the inputs and targets of a batch that is a tuple or list of both."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise DataError(f"a {type(batch).__name__} given as batch, (inputs, targets) is needed; pass Task(read=...)")
    return batch[0], batch[1]


def _as_it_is(output: object) -> object:
    return output


@dataclass(frozen=True)
class Task:
    """The purpose of a network: its loss, and how good it is on each example.

    Args:
        name: The name in messages and reports.
        loss: `loss(output, targets)`, the mean loss of a batch, a scalar.
        outcome: `outcome(output, targets)`, a tensor (N, k) with a row of numbers for each example of the batch.
        metric: `metric(rows)`, one number (higher is better) from the rows (n, k) of all examples, a NumPy array. It
            must depend on the rows alone, in any order, because certification compares those of the same examples
            before and after pruning. By default the mean of the rows, which then have one number each.
        metric_name: The name of the metric in messages and reports.
        is_share: Whether the metric lies between 0 and 1 and is shown as a percentage.
        read: `read(batch)`, the inputs, a float tensor (N, ...) or a tuple or dict of several tensors, and the targets;
            by default the parts of a pair.
        output: `output(raw)`, the part of the network's output that counts, such as `raw["out"]`.
        model_loss: `model_loss(model, inputs, targets)`, in place of `loss`, for networks that compute it themselves.
        distance: `distance(output, taught)`, how far an output is from a teacher's, for training with `distill`.
        errors: `errors(rows)`, the error of each example, for the report.
        mask: `mask(output)`, the class of each pixel, for the report.
        limits: The minimum and maximum of an example's number, or with `metric` of that; 0 and 1 for a share. Without
            limits nothing is certified, because a rare example could lose anything.
        influence: `influence(rows)`, the most that a metric without limits can lose by one example, times their number.

    Raises:
        ConfigError: A field has the wrong type, or not exactly one of `loss` and `model_loss` is given.

    >>> task = Task("counting", loss=torch.nn.functional.mse_loss, outcome=lambda said, true: -(said - true).abs())
    >>> task.value(np.array([[-1.0], [-3.0]]))
    -2.0
    """

    name: str
    loss: Callable[[Any, Any], Tensor] | None
    outcome: Callable[[Any, Any], Tensor]
    metric: Callable[[Rows], float] | None = None
    metric_name: str = "score"
    is_share: bool = False
    read: Callable[[Any], tuple[Tensor, Any]] = read_pair
    output: Callable[[Any], Any] = _as_it_is
    model_loss: Callable[[nn.Module, Tensor, Any], Tensor] | None = None
    distance: Callable[[Any, Any], Tensor] | None = None
    errors: Callable[[Rows], Rows] | None = None
    mask: Callable[[Any], Tensor] | None = None
    limits: tuple[float, float] | None = None
    influence: Callable[[Rows], float] | None = None

    has_classes: ClassVar[bool] = False
    """Whether a target is the number of one class."""
    augments: ClassVar[bool] = False
    """Whether targets can be smoothed and blended, and outlast mirroring and cropping."""
    examples: ClassVar[str] = "examples"
    """What examples are called in texts."""
    precision: ClassVar[torch.dtype] = torch.float64
    """In which the loss and the metric of an evaluation are averaged."""

    def __post_init__(self) -> None:
        optional = ("metric", "model_loss", "distance", "errors", "mask", "loss", "influence")
        faults = [
            f"{name}: {getattr(self, name)!r} given; a text is needed"
            for name in ("name", "metric_name")
            if not isinstance(getattr(self, name), str) or not getattr(self, name)
        ]
        for name in ("outcome", "read", "output", *optional):
            value = getattr(self, name)
            if not callable(value) and (value is not None or name not in optional):
                faults.append(f"{name}: {value!r} given; a function is needed")
        if (self.loss is None) == (self.model_loss is None):
            faults.append("loss, model_loss: exactly one of them is needed")
        faults += check_limits(self.limits)
        if faults:
            raise ConfigError.of("Task", faults)

    @property
    def budget_metric(self) -> Literal["accuracy"] | Task:
        """The metric of a budget for which no other is given: that of the task."""
        return self

    @property
    def range(self) -> tuple[float, float] | None:
        """The minimum and maximum of an example's number or the metric, if known."""
        return (0.0, 1.0) if self.limits is None and self.is_share else self.limits

    @property
    def is_bounded(self) -> bool:
        """Whether an example's largest loss is known, without which nothing is certified."""
        return self.range is not None or self.influence is not None

    @property
    def test_name(self) -> str:
        """The test that certifies a budget in this metric."""
        return "Gaffke's test of the examples" + ("" if self.metric is None else "' jackknife values")

    def to_dict(self) -> dict[str, str]:
        """Return the names of the task and its metric, for files that record them."""
        return {"task": self.name, "metric": self.metric_name}

    def in_training(self, *, label_smoothing: float, temperature: float) -> Task:  # noqa: ARG002
        """Return the task with the settings of a training; other tasks than classification have none."""
        return self

    def head_size(self, classes: int) -> int | None:  # noqa: ARG002
        """Return how many outputs a network needs for data of this many classes; None where that is unknown."""
        return None

    def class_numbers(self, targets: object, count: int, where: str) -> npt.NDArray[np.int64] | None:  # noqa: ARG002
        """Return the class of each of `count` targets, or None; raise DataError for targets that should be classes."""
        return None

    def hits(self, rows: Rows) -> npt.NDArray[np.bool_] | None:  # noqa: ARG002
        """Return which examples are classified correctly; None where there are no classes."""
        return None

    def chance(self, labels: npt.NDArray[np.int64]) -> float | None:  # noqa: ARG002
        """Return the metric of always giving the most frequent answer; None where that is unknown."""
        return None

    def inputs_and_targets(self, batch: object) -> ReadBatch:
        """Read a batch; raise DataError unless it has float inputs (N, ...)."""
        if isinstance(batch, ReadBatch):
            return batch
        try:
            found = self.read(batch)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            self._refuse(
                f"read cannot take a batch that is a {type(batch).__name__} ({type(error).__name__}: {error}); it must "
                "return (inputs, targets)",
                DataError,
            )
        if not isinstance(found, tuple | list) or len(found) != 2:
            self._refuse(f"read returned {_kind(found)}; (inputs, targets) is needed", DataError)
        try:
            return ReadBatch(images_of(found), plain_tensors(found[1]))
        except DataError:
            self._refuse(f"{_kind(found[0])} read as inputs; a float tensor (N, ...) is needed", DataError)

    def mean_loss(self, model: nn.Module, inputs: Tensor, targets: object) -> Tensor:
        """Return the mean loss of the model; raise ConfigError unless it is one number with a gradient."""
        if self.model_loss is not None:
            with _unchanged(model):
                return self.checked_loss(self.model_loss(model, inputs, targets))
        return self.output_loss(self.output(model(inputs)), targets)

    def output_loss(self, output: object, targets: object) -> Tensor:
        """Return the mean loss of an output, checked likewise."""
        if self.loss is None:
            self._refuse("has model_loss, and no loss of an output")
        return self.checked_loss(self.loss(output, targets))

    def checked_loss(self, value: object) -> Tensor:
        """Return the loss; raise ConfigError unless it is one number, with a gradient if gradients are on."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            self._refuse(f"the loss is {_kind(value)}; one number is needed, such as the mean over the batch")
        if torch.is_grad_enabled() and not value.requires_grad:
            self._refuse(
                "the loss has no gradient; compute it from the output with torch, without .item(), .detach(), argmax "
                "or NumPy"
            )
        return value.reshape(())

    def rows(self, output: object, targets: object, count: int) -> Rows:
        """Return the outcomes of `count` examples; raise ConfigError for rows of another shape."""
        found = self.outcome(output, targets)
        if isinstance(found, Tensor) and found.shape == (count,):
            found = found[:, None]
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != count or found.shape[1] == 0:
            self._refuse(
                f"outcome returned {_kind(found)} for {count} examples; a tensor ({count}, k) is needed, one row for "
                "each"
            )
        if self.metric is None and found.shape[1] != 1:
            self._refuse(
                f"outcome returned {found.shape[1]} numbers for each example; without a metric, the mean is taken, and "
                "one is needed"
            )
        rows: Rows = found.detach().cpu().double().numpy()
        if not np.isfinite(rows).all():
            self._refuse("outcome returned numbers that are not finite; check the network", TrainingError)
        if self.metric is None and self.range is not None:
            low, high = self.range
            slack = _ROUNDING * (high - low)
            beyond = rows[(rows < low - slack) | (rows > high + slack)]
            if len(beyond):
                self._refuse(
                    f"outcome returned {beyond[0]:g}; limits={self.range} are given or those of a share, on which the "
                    "certificate rests: pass wider limits, or an outcome that keeps to them"
                )
        return rows

    def value(self, rows: Rows) -> float:
        """Return the metric of the rows; raise ConfigError unless it is a finite number."""
        value = float(rows.mean()) if self.metric is None else self.metric(rows)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            self._refuse(
                f"the metric {self.metric_name} returned {value!r} for {len(rows)} examples; it must return a finite "
                "number (higher is better)"
            )
        return number

    def as_outcomes(self, rows: Rows, units: Units | None = None) -> Outcomes:
        """Wrap the rows of all examples."""
        return Outcomes(self, rows, units)

    def outcomes(self, batches: Sequence[Rows], data: object = None) -> Outcomes:
        """Join the rows of all batches; the data knows which examples belong together.

        Raises DataError if there are none, or if rows differ in length.
        """
        if not batches:
            self._refuse(f"the data contains no {self.examples}", DataError)
        widths = sorted({each.shape[1] for each in batches})
        if len(widths) > 1:
            lengths = " and of ".join(map(str, widths))
            self._refuse(f"outcome returned rows of {lengths} numbers; all must have the same length", DataError)
        rows = np.concatenate(batches)
        return self.as_outcomes(rows, units_in(data, len(rows)))

    def format(self, value: float) -> str:
        """Format a value of the metric."""
        return f"{value:.1%}" if self.is_share else f"{value:.4g}"

    def shown(self, value: float) -> str:
        """Call `format`, which has this name now."""
        warnings.warn("Task.shown goes: use Task.format", DeprecationWarning, stacklevel=2)
        return self.format(value)

    def _refuse(self, fault: str, kind: type[BasisPruneError] = ConfigError) -> NoReturn:
        raise kind(f"task {self.name}: {fault}")


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restore the mode of all modules and, unless they are being trained, the statistics of their norms.

    Detectors of torchvision compute their losses in training mode only.
    """
    modes = [(module, module.training) for module in model.modules()]
    norms = [module for module, _ in modes if isinstance(module, nn.modules.batchnorm._NormBase)]
    kept = [] if model.training else [(norm._buffers, dict(norm._buffers)) for norm in norms]
    for buffers, statistics in kept:  # others in their place, because a backward pass may need those that were used
        buffers.update({name: None if each is None else each.clone() for name, each in statistics.items()})
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training
        for buffers, statistics in kept:
            buffers.update(statistics)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
