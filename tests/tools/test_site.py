"""The gate of the docs site, as `make docs` runs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def build(folder, **pages):
    """Build a site with the settings of ours from a home page and others; give the process."""
    (folder / "docs").mkdir()
    shutil.copytree(ROOT / "tools", folder / "tools")
    lines = (ROOT / "mkdocs.yml").read_text().splitlines(keepends=True)
    start = lines.index("nav:\n")
    end = next(place for place in range(start + 1, len(lines)) if not lines[place].startswith(" "))
    (folder / "mkdocs.yml").write_text("".join([*lines[:start], "nav: [index.md]\n", *lines[end:]]))
    for name, text in {"index": "# Home", **pages}.items():
        (folder / "docs" / f"{name}.md").write_text(text)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "text", "complaint"),
    [
        ("index", "# All is well", ""),
        ("stray", "# In no navigation", "stray.md"),
        ("index", "[a page](nowhere.md)", "nowhere.md"),
        ("index", "[a heading](#nowhere)", "nowhere"),
    ],
)
def test_the_site_refuses_stray_pages_and_broken_links(tmp_path, page, text, complaint):
    found = build(tmp_path, **{page: text})
    assert (found.returncode == 0) == (not complaint), found.stderr
    assert complaint in found.stderr


@pytest.mark.slow
def test_equations_are_typeset_without_scripts(tmp_path):
    text = "# Home\n\nA share $x < 1$, and\n\n$$\\sum_i \\lambda_i$$\n\nfor `$HOME`."
    assert build(tmp_path, index=text).returncode == 0
    page = (tmp_path / "build" / "site" / "index.html").read_text()
    assert page.count("<math") == 2
    assert "arithmatex" not in page
    assert "<code>$HOME</code>" in page


def test_make_docs_builds_strictly():
    assert "mkdocs build --strict" in (ROOT / "Makefile").read_text()
