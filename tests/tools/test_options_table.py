"""The tables of options in the docs are those that are declared."""

from __future__ import annotations

import re

import options_table
import pytest

from basisprune.runs.settings import OPTIONS

TEXT = options_table.PAGE.read_text()


def test_the_tables_are_what_the_tool_makes_of_the_declarations():
    assert options_table.with_tables(TEXT) == TEXT


def test_every_option_that_is_shown_is_in_a_table_once():
    rows = re.findall(r"^\| `--(?:no-)?([a-z0-9-]+)", TEXT, re.MULTILINE)
    shown = [name.replace("_", "-") for name, each in OPTIONS.items() if not each.hidden]
    assert sorted(rows) == sorted(shown)


def test_a_table_of_no_group_is_refused():
    with pytest.raises(KeyError, match="Cellar"):
        options_table.with_tables("<!-- options: Cellar -->\n<!-- end of options -->\n")
