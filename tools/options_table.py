"""The tables of options in docs/command-line.md: `python tools/options_table.py` writes them anew.

They are made from the declarations in runs/settings.py, one table for each group of the help; a test compares the two.
"""

from __future__ import annotations

import re
from pathlib import Path

from basisprune.budget.goal import FRACTION
from basisprune.runs.settings import OPTIONS, Option

PAGE = Path(__file__).parents[1] / "docs" / "command-line.md"
_PLACE = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end of options -->\n)", re.DOTALL)


def with_tables(text: str) -> str:
    """Return the text with the table of a group between each pair of marks."""
    return _PLACE.sub(lambda found: f"{found[1]}{table(found[2])}{found[3]}", text)


def table(panel: str) -> str:
    """Return the options of a group as a table; raise KeyError if there is no such group."""
    rows = [row(each) for each in OPTIONS.values() if each.panel == panel and not each.hidden]
    if not rows:
        raise KeyError(panel)
    return "\n".join(["| option | meaning |", "| --- | --- |", *rows]) + "\n"


def row(declared: Option) -> str:
    """Return the line of an option."""
    default, name = declared.default, declared.name.replace("_", "-")
    is_flag = isinstance(default, bool) or declared.type == bool | None
    value = declared.metavar if declared.unit is None else declared.unit.metavar
    word = f"--no-{name}`, `--{name}" if default is True else f"--{name}" if is_flag else f"--{name} {value or 'VALUE'}"
    usual = f"{100 * default:g}%" if declared.unit is FRACTION and isinstance(default, float) else default
    said = "" if default is None or is_flag else f" Default: {usual}."
    return f"| `{word}` | {declared.help}{said} |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
