"""Laws of numbers with units."""

from __future__ import annotations

from typing import get_type_hints

import pytest

from basisprune.errors import ConfigError
from basisprune.runs.options import Options
from basisprune.runs.units import AMOUNT, FRACTION, LEVEL, OPTION_UNITS, TIME


def test_a_whole_number_stays_one():
    assert isinstance(AMOUNT.parse("1.5M"), int)
    assert AMOUNT.parse(250_000) == 250_000


@pytest.mark.parametrize("text", ["", "1x", "%", "-1%", "1e999", None, "1 2"])
def test_what_is_no_number_is_refused_with_examples(text):
    for unit in (FRACTION, AMOUNT, TIME):
        with pytest.raises(ConfigError, match="given; expected a"):
            unit.parse(text)


def test_a_least_value_may_be_negative_because_errors_are_negated():
    assert LEVEL.parse("-3.2") == -3.2
    assert OPTION_UNITS["min_accuracy"] is LEVEL
    with pytest.raises(ConfigError, match="expected a percentage such as 90%"):
        LEVEL.parse("--3")


def test_only_options_have_units():
    assert OPTION_UNITS.keys() <= get_type_hints(Options).keys()
