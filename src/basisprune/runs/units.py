"""Numbers as people write them in options and files: 1%, 300k, 1.5M, 5ms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from basisprune.errors import ConfigError


@dataclass(frozen=True)
class Unit:
    """The units of a kind of number, with what each stands for, and how such a number looks."""

    units: Mapping[str, float]
    wanted: str
    whole: bool = False
    signed: bool = False

    def parse(self, text: object) -> float:
        """The number; raises ConfigError for what is none.

        >>> FRACTION.parse("1%"), AMOUNT.parse("1.5M"), TIME.parse("0.2s")
        (0.01, 1500000, 200.0)
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


FRACTION = Unit({"": 1, "%": 0.01}, "a percentage such as 1% or a fraction such as 0.01")
LEVEL = Unit({"": 1, "%": 0.01}, "a percentage such as 90% or a number such as 0.9 or -3.2", signed=True)
AMOUNT = Unit({"": 1, "k": 1e3, "M": 1e6, "G": 1e9}, "a number such as 250000, 300k or 1.5M", whole=True)
TIME = Unit({"": 1, "ms": 1, "s": 1000}, "a time such as 5ms or 0.1s")
OPTION_UNITS = {
    **dict.fromkeys(
        (
            "max_drop",
            "basis_ratio",
            "filter_ratio",
            "val_fraction",
            "test_fraction",
            "confirm_fraction",
            "confidence",
        ),
        FRACTION,
    ),
    "min_accuracy": LEVEL,
    **dict.fromkeys(("target_params", "target_macs"), AMOUNT),
    "target_latency": TIME,
}
"""The options of a run that may be written with a unit."""
