"""The goal of a run: a budget to search within, or fixed ratios."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from basisprune.errors import ConfigError

if TYPE_CHECKING:
    from basisprune.recipes import Axis

Optimize: TypeAlias = Literal["params", "macs", "latency"]
"""What a network is to have least of."""


@dataclass(frozen=True)
class Budget:
    """The limit for the pruned model: exactly one of these.

    `max_drop` is the largest loss of accuracy compared with the unpruned model, `min_accuracy` the minimum accuracy,
    both as fractions. `target_params` and `target_macs` are the maximum counts in deployed form, and
    `target_latency` the maximum milliseconds per image on this machine, on one thread.
    """

    max_drop: float | None = None
    min_accuracy: float | None = None
    target_params: int | None = None
    target_macs: int | None = None
    target_latency: float | None = None

    is_of_shares: ClassVar[bool] = True
    """Whether what is limited lies between 0 and 1, as accuracies do."""

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        faults = []
        if len(given) != 1:
            faults.append(f"{len(given)} of {', '.join(vars(self))} given; exactly one is needed")
        faults += [
            f"{name}: {given[name]} given; it is a fraction, 0 <= {name} < 1 ({example}; on the command line, {typed})"
            for name, example, typed in (
                ("max_drop", "1 % is 0.01", "--max-drop 1%"),
                ("min_accuracy", "95 % is 0.95", "--min-accuracy 95%"),
            )
            if self.is_of_shares and name in given and not 0 <= given[name] < 1
        ]
        if not self.is_of_shares and not (
            math.isfinite(given.get("max_drop", 0.0)) and given.get("max_drop", 0.0) >= 0
        ):
            faults.append(f"max_drop: {given['max_drop']} given; it is a loss in units of the metric, at least 0")
        if not math.isfinite(given.get("min_accuracy", 0.0)):
            faults.append(f"min_accuracy: {given['min_accuracy']} given; a finite number is needed")
        faults += [
            f"{name}: {given[name]} given; at least 1 is needed"
            for name in ("target_params", "target_macs")
            if name in given and not given[name] >= 1
        ]
        if not 0 < given.get("target_latency", 1) < float("inf"):
            faults.append(f"target_latency: {given['target_latency']} given; it is a time in milliseconds, above 0")
        if faults:
            raise ConfigError.of("Budget", faults)

    @property
    def kind(self) -> str:
        """The name of the limit."""
        return next(name for name, value in vars(self).items() if value is not None)

    @property
    def value(self) -> float:
        """The value of the limit."""
        return float(vars(self)[self.kind])

    @property
    def is_about_accuracy(self) -> bool:
        """Whether the limit is on accuracy, rather than size."""
        return self.max_drop is not None or self.min_accuracy is not None

    def least_accuracy(self, reference: float) -> float:
        """The accuracy that is just good enough if that of the unpruned model is `reference`."""
        return reference - self.max_drop if self.max_drop is not None else self.min_accuracy or 0.0

    def allows(self, parameters: int, macs: int, latency: float | None) -> bool:
        """Whether a network of this size and latency (in milliseconds) is small enough."""
        if self.target_latency is not None:
            return latency is not None and latency <= self.target_latency
        return parameters <= (self.target_params or parameters) and macs <= (self.target_macs or macs)


@dataclass(frozen=True)
class MetricBudget(Budget):
    """A budget for a task whose metric is no share: `max_drop` and `min_accuracy` are in units of the metric.

    >>> MetricBudget(max_drop=2.5).least_accuracy(-10.0)
    -12.5
    """

    is_of_shares: ClassVar[bool] = False


@dataclass(frozen=True)
class Ratios:
    """The fractions of all basis vectors and of all filters to remove, without a search."""

    basis: float = 0.0
    filters: float = 0.0

    def __post_init__(self) -> None:
        given = {"basis_ratio": self.basis, "filter_ratio": self.filters}
        faults = [
            f"{name}: {ratio} given; it is the fraction to remove, 0 <= {name} < 1"
            for name, ratio in given.items()
            if not 0 <= ratio < 1
        ]
        if faults:
            raise ConfigError.of("ratios", faults)

    def of(self, axis: Axis) -> float:
        """The fraction to remove on that axis."""
        return self.basis if axis == "basis" else self.filters


Goal: TypeAlias = Budget | Ratios


def step_ratio(ratio: float, step: int, steps: int) -> float:
    """The fraction of what remains to remove in this step, so that all steps together remove `ratio`.

    >>> [round(step_ratio(0.5, step, 2), 4) for step in range(2)]
    [0.25, 0.3333]
    """
    return (ratio / steps) / (1 - ratio * step / steps)
