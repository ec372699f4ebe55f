"""Laws of what a run is told about its images."""

from __future__ import annotations

import pytest
from tiny import Notes

from basisprune.data.reading import Reading
from basisprune.errors import DataError

FOUND = [f"{number}.png" for number in range(12)]


def test_a_listener_hears_the_first_ten_and_how_many_more():
    notes = Notes()
    Reading(listener=notes).report("photos: 12 damaged", FOUND)
    assert notes.lines == ["\n  - ".join(["photos: 12 damaged", *FOUND[:10], "and 2 more"])]
    assert Reading(listener=notes).hearer is notes


def test_without_a_listener_it_is_a_warning_and_strict_it_is_an_error():
    with pytest.warns(UserWarning, match=r"photos: 1 damaged\n  - 0\.png$"):
        Reading().report("photos: 1 damaged", FOUND[:1])
    with pytest.raises(DataError) as error:
        Reading(strict=True, listener=Notes()).report("photos: 12 damaged", FOUND)
    assert (error.value.where, list(error.value.faults)) == ("photos: 12 damaged", FOUND)
