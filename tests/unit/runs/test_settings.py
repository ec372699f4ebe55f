"""Laws of the declared options: each is written once, and numbers may have units."""

from __future__ import annotations

import re
from typing import get_args, get_type_hints

import pytest
from commands import invoke

from basisprune.errors import ConfigError
from basisprune.recipes import Recipe
from basisprune.runs.settings import (
    AMOUNT,
    BUDGETS,
    FRACTION,
    LEVEL,
    OPTIONS,
    RATIOS,
    TIME,
    TRAIN_OPTIONS,
    GivenOptions,
    Options,
    Panel,
    names_in,
)
from basisprune.search import SearchConfig
from basisprune.tasks import Task

HEAVY = {"Recipe": Recipe, "SearchConfig": SearchConfig, "Task": Task}


def test_type_checkers_see_the_declared_names_and_types():
    assert get_type_hints(Options, localns=HEAVY) == get_type_hints(GivenOptions, localns=HEAVY)
    assert OPTIONS.keys() == get_type_hints(Options, localns=HEAVY).keys()


@pytest.mark.parametrize(("command", "names"), [("compress", OPTIONS), ("train", TRAIN_OPTIONS)])
def test_every_option_is_one_of_the_command_line_in_its_group(command, names):
    shown = invoke(command, "--help").output
    groups = {part.split(":")[0]: part for part in shown.split("\n\n")}
    for name in names:
        each = OPTIONS[name].option
        assert each.hidden or f"--{name.replace('_', '-')}" in groups[each.panel]
        assert each.hidden or re.sub(r"\s+", "", each.help) in re.sub(r"\s+", "", shown)


def test_the_options_are_in_the_order_of_their_groups():
    assert tuple(OPTIONS) == names_in(*get_args(Panel))


def test_the_budget_and_the_ratios_are_options_of_a_number_with_a_unit():
    assert all(OPTIONS[name].option.unit is not None for name in (*BUDGETS, *RATIOS))


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
    assert OPTIONS["min_accuracy"].option.unit is LEVEL
    with pytest.raises(ConfigError, match="expected a percentage such as 90%"):
        LEVEL.parse("--3")
