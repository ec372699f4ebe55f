"""What a network is for: how a batch is read, what the loss is, and how good the network is, example by example."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from basisprune.errors import ConfigError, DataError, TrainingError, nearest
from basisprune.tasks.outcomes import Outcomes, Rows, Units, units_in
from basisprune.torchkit.running import ReadBatch, images_of

_ROUNDING = 1e-5  # in relation to the length of the range


def check_limits(limits: object) -> list[str]:
    """What is wrong with the limits of numbers, for a list of faults.

    >>> check_limits((1, 0))
    ['limits: (1, 0) given; two finite numbers are needed, the smaller one first']
    """
    if limits is None:
        return []
    match limits:
        case (int() | float() as low, int() | float() as high) if -math.inf < low < high < math.inf:
            return []
    return [f"limits: {limits!r} given; two finite numbers are needed, the smaller one first"]


def check_metric_name(metric: object, known: Collection[str]) -> list[str]:
    """What is wrong with the name of a metric, for a list of faults.

    >>> check_metric_name("dise", ["iou", "dice"])
    ["metric: 'dise' given; allowed are iou, dice. Did you mean 'dice'?"]
    """
    return (
        []
        if metric in known
        else [f"metric: {metric!r} given; allowed are {', '.join(known)}.{nearest(str(metric), known)}"]
    )


def read_pair(batch: object) -> tuple[Tensor, object]:
    """The inputs and targets of a batch that is a tuple or list of both."""
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise DataError(f"a {type(batch).__name__} given as batch, (inputs, targets) is needed; pass Task(read=...)")
    return batch[0], batch[1]


def as_it_is(output: Any) -> Any:
    """The network's output, unchanged."""
    return output


@dataclass(frozen=True)
class Task:
    """What a network is for, so that it can be trained, scored, judged and certified.

    `loss(output, targets)` is the mean loss of a batch, a scalar. `outcome(output, targets)` is a tensor (N, k): for
    each example of the batch a row of numbers that says how good the network is on it. `metric(rows)` makes one number
    of the rows (n, k) of all examples, a NumPy array; the more the better. Without a metric it is the mean of the rows,
    which then have one number each. Certification draws conclusions from the rows of the same examples before and
    after pruning, so the metric should be a function of them alone, in any order.

    `read(batch)` gives the inputs, a float tensor (N, ...), and the targets, by default the two parts of a pair.
    `output(raw)` gives what counts of the network's output, such as `raw["out"]`. A network that computes its loss
    itself has `model_loss(model, inputs, targets)` in place of `loss`. `distance(output, taught)` is how far an output
    is from that of a teacher, for training with `distill`.

    `metric_name` is what the metric is called in texts, and `is_share` says that it lies between 0 and 1 and is shown
    in percent. `limits` are the least and the most that an example's number, or with `metric` that metric, can be; of a
    share they are 0 and 1. Without limits nothing is certified: rare examples that lose anything may not be among those
    that were seen. `influence(rows)` is the most that a metric without limits can lose by an example, times the number
    of examples. `errors(rows)` gives each example's error and `mask(output)` each pixel's class, for the report.

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
    output: Callable[[Any], Any] = as_it_is
    model_loss: Callable[[nn.Module, Tensor, Any], Tensor] | None = None
    distance: Callable[[Any, Any], Tensor] | None = None
    errors: Callable[[Rows], Rows] | None = None
    mask: Callable[[Any], Tensor] | None = None
    limits: tuple[float, float] | None = None
    influence: Callable[[Rows], float] | None = None

    has_classes: ClassVar[bool] = False
    """Whether a target is the number of one class, so that examples can be counted by class, smoothed and blended."""
    examples: ClassVar[str] = "examples"
    """What examples are called in texts."""
    precision: ClassVar[torch.dtype] = torch.float64
    """In which the loss and the metric of an evaluation are averaged."""

    def __post_init__(self) -> None:
        faults = [
            f"{name}: {getattr(self, name)!r} given; a text is needed"
            for name in ("name", "metric_name")
            if not isinstance(getattr(self, name), str) or not getattr(self, name)
        ]
        optional = ("metric", "model_loss", "distance", "errors", "mask", "loss", "influence")
        for name in ("outcome", "read", "output", *optional):
            given = getattr(self, name)
            if not callable(given) and not (given is None and name in optional):
                faults.append(f"{name}: {given!r} given; a function is needed")
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
        """The least and the most that an example's number or the metric can be, if that is known."""
        return (0.0, 1.0) if self.limits is None and self.is_share else self.limits

    @property
    def is_bounded(self) -> bool:
        """Whether it is known how much an example can lose, without which nothing is certified."""
        return self.range is not None or self.influence is not None

    @property
    def test_name(self) -> str:
        """Which test certifies a budget in this metric."""
        if self.metric is None:
            return "Gaffke's test of the examples"
        return "Gaffke's test of the examples' jackknife values"

    def to_dict(self) -> dict[str, str]:
        """The names of the task and its metric, for files that note them."""
        return {"task": self.name, "metric": self.metric_name}

    def in_training(self, *, label_smoothing: float, temperature: float) -> Task:  # noqa: ARG002
        """The task as a training learns it, whose labels may be smoothed and its teacher's outputs softened."""
        return self

    def inputs_and_targets(self, batch: object) -> ReadBatch:
        """The batch as it is read; raises DataError unless it has float inputs (N, ...)."""
        if isinstance(batch, ReadBatch):
            return batch
        try:
            found = self.read(batch)
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise DataError(
                f"task {self.name}: read cannot take a batch that is a {type(batch).__name__} "
                f"({type(error).__name__}: {error}); it must return (inputs, targets)"
            ) from error
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise DataError(f"task {self.name}: read returned {_kind(found)}; (inputs, targets) is needed")
        try:
            return ReadBatch(images_of(found[0]), found[1])
        except DataError as error:
            raise DataError(
                f"task {self.name}: {_kind(found[0])} read as inputs; a float tensor (N, ...) that the network can "
                "take is needed"
            ) from error

    def mean_loss(self, model: nn.Module, inputs: Tensor, targets: object) -> Tensor:
        """The mean loss of the model; raises ConfigError unless it is a number with a gradient, where one is formed."""
        if self.model_loss is not None:
            with _left_alone(model):
                return self.checked_loss(self.model_loss(model, inputs, targets))
        return self.output_loss(self.output(model(inputs)), targets)

    def output_loss(self, output: Any, targets: object) -> Tensor:
        """The mean loss of an output, checked likewise."""
        if self.loss is None:
            raise ConfigError(f"task {self.name}: has model_loss, and no loss of an output")
        return self.checked_loss(self.loss(output, targets))

    def checked_loss(self, value: object) -> Tensor:
        """The loss; raises ConfigError for what is none."""
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ConfigError(
                f"task {self.name}: the loss is {_kind(value)}; one number is needed, the mean over the batch: call "
                ".mean(), or add the losses up"
            )
        if torch.is_grad_enabled() and not value.requires_grad:
            raise ConfigError(
                f"task {self.name}: the loss has no gradient; compute it from the output with torch, without .item(), "
                ".detach(), argmax or NumPy"
            )
        return value.reshape(())

    def rows(self, output: Any, targets: object, count: int) -> Rows:
        """The outcomes of `count` examples from what counts of an output; raises ConfigError for other rows."""
        found = self.outcome(output, targets)
        if isinstance(found, Tensor) and found.shape == (count,):
            found = found[:, None]
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != count or found.shape[1] == 0:
            raise ConfigError(
                f"task {self.name}: outcome returned {_kind(found)} for {count} examples; a tensor ({count}, k) is "
                "needed, one row for each"
            )
        if self.metric is None and found.shape[1] != 1:
            raise ConfigError(
                f"task {self.name}: outcome returned {found.shape[1]} numbers for each example; without a metric, the "
                "mean is taken, and one is needed"
            )
        rows: Rows = found.detach().cpu().double().numpy()
        if not np.isfinite(rows).all():
            raise TrainingError(f"task {self.name}: outcome returned numbers that are not finite; check the network")
        if self.metric is None and self.range is not None:
            self._refuse_beyond(rows, *self.range)
        return rows

    def _refuse_beyond(self, rows: Rows, low: float, high: float) -> None:
        """Raises ConfigError for outcomes beyond the limits, except that rounding may put them there."""
        beyond = rows[(rows < low - _ROUNDING * (high - low)) | (rows > high + _ROUNDING * (high - low))]
        if len(beyond):
            raise ConfigError(
                f"task {self.name}: outcome returned {beyond[0]:g}; limits={(low, high)} are given or those of a "
                "share, on which the certificate rests: pass wider limits, or an outcome that keeps to them"
            )

    def value(self, rows: Rows) -> float:
        """The metric of the rows; raises ConfigError unless it is a finite number."""
        value = float(rows.mean()) if self.metric is None else self.metric(rows)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError(
                f"task {self.name}: the metric {self.metric_name} returned {value!r} for {len(rows)} examples; it must "
                "return a finite number, the more the better"
            )
        return number

    def each(self, rows: Rows) -> Rows | None:
        """The number of each example whose mean is the metric; None for a metric that is no mean."""
        return rows[:, 0] if self.metric is None else None

    def chance(self, labels: npt.NDArray[np.int64]) -> float | None:  # noqa: ARG002
        """The metric of an answer that is always the same; None where that is not known."""
        return None

    def as_outcomes(self, rows: Rows, units: Units | None = None) -> Outcomes:
        """The outcomes of all examples."""
        return Outcomes(self, rows, units)

    def outcomes(self, batches: Sequence[Rows], data: object = None) -> Outcomes:
        """The outcomes of all batches, and which examples of the data belong together.

        Raises DataError if there are none, or if rows differ in length.
        """
        if not batches:
            raise DataError(f"task {self.name}: the data contains no {self.examples}")
        widths = sorted({each.shape[1] for each in batches})
        if len(widths) > 1:
            raise DataError(
                f"task {self.name}: outcome returned rows of {' and of '.join(map(str, widths))} numbers; all need as "
                "many"
            )
        rows = np.concatenate(batches)
        return self.as_outcomes(rows, units_in(data, len(rows)))

    def shown(self, value: float) -> str:
        """A value of the metric as text."""
        return f"{value:.1%}" if self.is_share else f"{value:.4g}"


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Gives the modules the mode back that they had and, unless they are being trained, the statistics of their norms.

    Detectors of torchvision give their losses in training mode only.
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
