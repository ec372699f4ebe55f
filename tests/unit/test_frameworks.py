"""Laws of the frameworks and of the steps that a network has behind it."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.errors import ConfigError
from basisprune.importance.filters import FILTER_SCORES
from basisprune.recipes import (
    BASIS,
    DECOMPOSED,
    DENSE,
    FRAMEWORKS,
    POLISHED,
    FrameworkName,
    Move,
    Step,
    find_framework,
    named,
)

steps = st.lists(st.builds(Step, st.sampled_from(["basis", "l1", "dense"]), st.none() | st.floats(0, 1))).map(tuple)


def test_a_framework_is_its_start_and_its_moves():
    assert tuple(FRAMEWORKS) == get_args(FrameworkName)
    assert (FRAMEWORKS["baseline"].start, FRAMEWORKS["baseline"].moves) == ("dense", ())
    for scores in ("l1", "taylor", "hrank", "loss"):
        filters = Move("filters", scores)
        assert (FRAMEWORKS[scores].start, FRAMEWORKS[scores].moves) == ("dense", (filters,))
        both = FRAMEWORKS[f"basis+{scores}"]
        assert (both.start, both.moves) == ("decomposed", (BASIS, filters))
    assert (FRAMEWORKS["basis"].start, FRAMEWORKS["basis"].moves) == ("decomposed", (BASIS,))


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_can_be_carried_out(name):
    framework = find_framework(name)
    assert framework.name == name
    assert framework.start in (DENSE.name, DECOMPOSED.name)
    for move in framework.moves:
        assert move == BASIS or move.scores in FILTER_SCORES
        assert move.axis != "basis" or framework.start == DECOMPOSED.name
        assert move.axis != "both" or framework.start == DENSE.name


@pytest.mark.parametrize(("given", "hint"), [("basis+tailor", "basis+taylor"), ("BASIS", "basis"), ("hrnk", "hrank")])
def test_an_unknown_framework_is_answered_with_what_is_allowed_and_the_nearest(given, hint):
    with pytest.raises(ConfigError, match=r"allowed are baseline, l1, .*loss\+basis\.") as error:
        find_framework(given)
    assert str(error.value).endswith(f"Did you mean {hint!r}?")


@given(steps, steps)
def test_steps_that_differ_have_names_that_differ(one, other):
    assert (named(one) == named(other)) == (one == other)


def test_steps_read_from_the_start_on():
    assert named((DECOMPOSED, Step("basis", 0.5), Step("l1", 0.25), POLISHED)) == (
        "decomposed, basis 0.5, l1 0.25, polished"
    )
