"""Each command that README and docs show can be typed, and each Python example calls what there is.

What runs in seconds runs as written in test_readme.py, test_deploy.py and test_tasks.py; here the rest is checked.
"""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer

import basisprune as bp
from basisprune.cli import app
from basisprune.runs.settings import OPTIONS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def blocks(kind):
    """All blocks of a kind, with their pages."""
    for page in PAGES:
        for found in re.finditer(rf"^```(?:{kind})\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            yield page, found[1]


def commands():
    """Each command of the shell blocks, as words."""
    for page, block in blocks("bash|sh"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield pytest.param(words, id=f"{page.stem}: {' '.join(words)[:60]}")


@pytest.mark.parametrize("words", list(commands()))
def test_commands_can_be_typed(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.yaml").write_text("max_drop: 1%\n")
    if "-m" in words and "basisprune" in words:  # below a launcher
        words = words[words.index("basisprune") :]
    if words[0] == "basisprune":
        command = typer.main.get_command(app).commands[words[1]]
        if "..." not in words:
            command.make_context(words[1], words[2:])
    elif words[:2] == ["pip", "install"]:
        asked = re.findall(r"\[([\w,]+)\]", " ".join(words))
        assert {extra for each in asked for extra in each.split(",")} <= set(EXTRAS)
    elif words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        assert words[0] == "python", words
        known = [path.name for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
        assert Path(words[1]).name in [*known, "profile_device.py", "app.py"]  # these two are written by basisprune


@pytest.mark.parametrize(("page", "block"), [(page.name, block) for page, block in blocks("python")])
def test_python_examples_call_what_there_is(page, block):
    for node in ast.walk(ast.parse(block)):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in ("bp", "basisprune")
        ):
            assert hasattr(bp, node.attr), f"{page}: {node.attr}"
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
        ):
            called = getattr(bp, node.func.attr, None) if node.func.value.id in ("bp", "basisprune") else None
            if called is not None:
                known = inspect.signature(called).parameters
                takes_options = any(each.kind is each.VAR_KEYWORD for each in known.values())
                given = {each.arg for each in node.keywords if each.arg}
                assert given <= {*known, *(OPTIONS if takes_options else ())}, f"{page}: {node.func.attr}"
