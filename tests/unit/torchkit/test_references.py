"""Objects by name: what is installed, and what lies in the current folder."""

from __future__ import annotations

import sys

import pytest

from basisprune.errors import ConfigError
from basisprune.torchkit.references import named_object


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """A folder that is not on the path, as for the command of an installed package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])


def test_a_module_in_the_current_folder_is_found_with_what_it_imports(tmp_path):
    (tmp_path / "of_mine_beside.py").write_text("number = 3")
    (tmp_path / "of_mine.py").write_text("def thing():\n    import of_mine_beside\n    return of_mine_beside.number")
    assert named_object("of_mine:thing", "a thing", ConfigError)() == 3
    assert sys.path[-1] == str(tmp_path)


def test_what_is_installed_comes_first_and_a_name_that_is_nowhere_leaves_the_path(tmp_path):
    (tmp_path / "timm.py").write_text("hidden = True")
    before = list(sys.path)
    with pytest.raises(ConfigError, match="timm has no 'hidden'"):
        named_object("timm:hidden", "a thing", ConfigError)
    with pytest.raises(ConfigError, match=r"cannot import of_nobody: .*; is it in this folder, or installed"):
        named_object("of_nobody:thing", "a thing", ConfigError)
    assert sys.path == before


def test_a_module_that_misses_another_says_which(tmp_path):
    (tmp_path / "of_mine_too.py").write_text("import of_nobody")
    with pytest.raises(ConfigError, match="cannot import of_mine_too: No module named 'of_nobody'"):
        named_object("of_mine_too:thing", "a thing", ConfigError)
