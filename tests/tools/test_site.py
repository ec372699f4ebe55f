"""The gate of the docs site, as `make docs` runs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "text", "complaint"),
    [
        ("index.md", "# All is well", ""),
        ("stray.md", "# In no navigation", "stray.md"),
        ("index.md", "[a page](nowhere.md)", "nowhere.md"),
        ("index.md", "[a heading](#nowhere)", "nowhere"),
    ],
)
def test_the_site_refuses_stray_pages_and_broken_links(tmp_path, page, text, complaint):
    (tmp_path / "docs").mkdir()
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    lines = (ROOT / "mkdocs.yml").read_text().splitlines(keepends=True)
    start = lines.index("nav:\n")
    end = next(place for place in range(start + 1, len(lines)) if not lines[place].startswith(" "))
    (tmp_path / "mkdocs.yml").write_text("".join([*lines[:start], "nav: [index.md]\n", *lines[end:]]))
    (tmp_path / "docs" / "index.md").write_text("# Home")
    (tmp_path / "docs" / page).write_text(text)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (found.returncode == 0) == (not complaint), found.stderr
    assert complaint in found.stderr


def test_make_docs_builds_strictly():
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()
