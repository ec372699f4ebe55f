"""The goal of a run: a budget to search within, or fixed ratios; and the units of such numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

from basisprune.errors import ConfigError

if TYPE_CHECKING:
    from basisprune.recipes import Axis

Optimize: TypeAlias = Literal["params", "macs", "latency"]
"""Cost to minimise."""


_Allowed: TypeAlias = tuple[Callable[[float], bool], str]
_IS_SHARE = "it is a fraction, 0 <= value < 1"
_DROP: _Allowed = lambda value: 0 <= value < 1, f"{_IS_SHARE} (1% is 0.01; or --max-drop 1%)"
_LEVEL: _Allowed = lambda value: 0 <= value < 1, f"{_IS_SHARE} (95% is 0.95; or --min-accuracy 95%)"
_COUNT: _Allowed = lambda value: value >= 1, "at least 1 is needed"
_TIME: _Allowed = lambda value: 0 < value < math.inf, "it is a time in milliseconds, above 0"
_ALLOWED = {"max_drop": _DROP, "min_accuracy": _LEVEL, "target_params": _COUNT, "target_macs": _COUNT}
_ALLOWED |= {"target_latency": _TIME}


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

    allowed: ClassVar[Mapping[str, _Allowed]] = _ALLOWED

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        faults = []
        if len(given) != 1:
            faults.append(f"{len(given)} of {', '.join(vars(self))} given; exactly one is needed")
        for name, value in given.items():
            is_allowed, wanted = self.allowed[name]
            if not is_allowed(value):
                faults.append(f"{name}: {value} given; {wanted}")
        if faults:
            raise ConfigError.of("Budget", faults)

    @property
    def kind(self) -> str:
        return next(name for name, value in vars(self).items() if value is not None)

    @property
    def value(self) -> float:
        return float(vars(self)[self.kind])

    @property
    def is_about_accuracy(self) -> bool:
        """Whether the limit is on accuracy, rather than size."""
        return self.max_drop is not None or self.min_accuracy is not None

    def least_accuracy(self, reference: float) -> float:
        """Return the accuracy that is just good enough if that of the unpruned model is `reference`."""
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

    allowed: ClassVar[Mapping[str, _Allowed]] = _ALLOWED | {
        "max_drop": (lambda value: 0 <= value < math.inf, "it is a loss in units of the metric, at least 0"),
        "min_accuracy": (math.isfinite, "a finite number is needed"),
    }


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
        return self.basis if axis == "basis" else self.filters


Goal: TypeAlias = Budget | Ratios


def step_ratio(ratio: float, step: int, steps: int) -> float:
    """Return the fraction of what remains to remove in this step, so that all steps together remove `ratio`.

    >>> [round(step_ratio(0.5, step, 2), 4) for step in range(2)]
    [0.25, 0.3333]
    """
    return (ratio / steps) / (1 - ratio * step / steps)


@dataclass(frozen=True)
class Unit:
    """The units of a kind of number, with what each stands for, and what such a number looks like."""

    units: Mapping[str, float]
    wanted: str
    metavar: str
    whole: bool = False
    signed: bool = False

    def parse(self, text: object) -> float:
        """Return the number; raise ConfigError if the text is not one.

        >>> FRACTION.parse("1%"), LEVEL.parse("-3.2"), AMOUNT.parse("1.5M"), TIME.parse("0.2s")
        (0.01, -3.2, 1500000, 200.0)
        >>> AMOUNT.parse("many")
        Traceback (most recent call last):
        basisprune.errors.ConfigError: 'many' given; expected a number such as 250000, 300k or 1.5M
        """
        sign = "-?" if self.signed else ""
        match = re.fullmatch(rf"\s*({sign}[0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zA-Z%]*)\s*", str(text))
        try:
            value = float(match[1]) * self.units[match[2]]  # type: ignore[index]
            if not math.isfinite(value):
                raise ValueError(text)
        except (TypeError, ValueError, KeyError):
            raise ConfigError(f"{text!r} given; expected {self.wanted}") from None
        return round(value) if self.whole else round(value, 12)


FRACTION = Unit({"": 1, "%": 0.01}, "a percentage such as 1% or a fraction such as 0.01", "PERCENT")
LEVEL = Unit({"": 1, "%": 0.01}, "a percentage such as 90% or a number such as 0.9 or -3.2", "PERCENT", signed=True)
AMOUNT = Unit({"": 1, "k": 1e3, "M": 1e6, "G": 1e9}, "a number such as 250000, 300k or 1.5M", "NUMBER", whole=True)
TIME = Unit({"": 1, "ms": 1, "s": 1000}, "a time such as 5ms or 0.1s", "TIME")
