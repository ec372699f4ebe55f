"""The page docs/api.md, from the public names: `python tools/api_page.py` writes it anew.

Every public name is on it once, under the room of the package that it lives in; a test compares the two.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
STUB, PAGE = ROOT / "src" / "basisprune" / "__init__.pyi", ROOT / "docs" / "api.md"
TITLES = {
    "runs": "One call",
    "sweeps": "Many trainings",
    "budget": "Budgets",
    "data": "Images",
    "tasks": "Tasks",
    "transfer": "Models for your classes",
    "basis": "Decomposing",
    "stages": "Scores, plans, pruning",
    "planning": "Scores, plans, pruning",
    "training": "Training",
    "method": "Whole frameworks",
    "recipes": "Settings",
    "search": "Settings",
    "costs": "Costs",
    "deploy": "Deploying",
    "report": "Reports",
    "types": "Values",
    "errors": "Errors",
}
"""The heading for each room, in the order of the page."""

INTRODUCTION = """# Reference

Everything here is imported as `import basisprune as bp` and then `bp.compress` and so on. The page is made by
`python tools/api_page.py` from the docstrings."""


def public_names(stub: Path = STUB) -> dict[str, str]:
    """Each public name with the module it lives in, as the stub of the package says."""
    return {
        alias.name: f"basisprune.{node.module}"
        for node in ast.parse(stub.read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def page(names: dict[str, str]) -> str:
    """The text of the page; raises KeyError with the room that has no title yet."""
    by_title: dict[str, list[str]] = {title: [] for title in TITLES.values()}
    for name, module in sorted(names.items()):
        by_title[TITLES[module.split(".")[1]]].append(f"::: {module}.{name}")
    sections = ["\n\n".join([f"## {title}", *entries]) for title, entries in by_title.items() if entries]
    return "\n\n".join([INTRODUCTION, *sections]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(public_names()))
