"""The page of the public names has all of them."""

from __future__ import annotations

import api_page
import pytest

import basisprune


def test_the_page_is_what_the_tool_makes_of_the_public_names():
    assert api_page.PAGE.read_text() == api_page.page(api_page.public_names())


def test_every_public_name_is_on_the_page_once():
    entries = [line for line in api_page.PAGE.read_text().splitlines() if line.startswith(":::")]
    assert sorted(entry.rpartition(".")[2] for entry in entries) == sorted(basisprune.__all__)


def test_a_room_without_a_title_is_named():
    with pytest.raises(KeyError, match="cellar"):
        api_page.page({"store": "basisprune.cellar.wine"})
