"""Laws of the script that counts: what it finds, and when it fails."""

from __future__ import annotations

from pathlib import Path

import count
import pytest

NINE = "a, b, c, d, e, f, g, h, i"


@pytest.fixture
def package(tmp_path) -> Path:
    """A package within every limit."""
    (tmp_path / "cli").mkdir()
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "plan.py").write_text(
        "from typing import Any\n\n\nclass A:\n    def f(self, a, b, c, d, *, e, f, g, h): ...\n"
    )
    (tmp_path / "cli" / "compress.py").write_text(f"def compress({NINE}): ...\n")
    return tmp_path


def broken(package: Path) -> list[count.Count]:
    return [each for each in count.counts(count.read(package)) if each.is_broken]


def test_a_package_within_every_limit_passes(package, capsys):
    assert broken(package) == []
    assert count.main([str(package)]) == 0
    assert "1 of at most 118  lines that mention Any" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "what", "place"),
    [
        ("x: Any\n" * 120, "lines that mention Any", "new.py: 120"),
        (f"def wide({NINE}): ...\n", "functions with more than 8", "new.py:1: wide has 9"),
        ("def wide(a, b, c, d, /, e, *f, g, h, **i): ...\n", "functions with more than 8", "new.py:1: wide has 9"),
        ('if plan.framework.startswith("b"): ...\n', "name of a framework", "new.py:1: if plan.framework.startswith"),
        ('method = name.removeprefix("basis+")\n', "name of a framework", "new.py:1: method"),
        ("\n" * 451, "longest file", "new.py: 451"),
        ("def long():\n" + "    x = 1\n" * 80, "longest function", "new.py:1: long: 81"),
    ],
)
def test_what_is_too_much_is_named_with_its_place(text, what, place, package, capsys):
    (package / "new.py").write_text(text)
    (found,) = broken(package)
    assert what in found.what
    assert found.places[0].startswith(place)
    assert count.main([str(package)]) == 1
    assert f"TOO MUCH{found.found:5} of at most" in capsys.readouterr().out


def test_a_flat_package_is_too_much(package):
    for number in range(20):
        (package / f"file{number}.py").write_text("")
    (found,) = broken(package)
    assert found.found == 21
    assert "plan.py" in found.places


def test_a_signature_of_the_command_line_is_not_part_of_its_function(package):
    options = "".join(f"    option{number}: int = 0,\n" for number in range(90))
    (package / "cli" / "train.py").write_text(f"def train(\n{options}) -> None:\n    print(1)\n")
    assert broken(package) == []


def test_what_a_file_imports_is_counted_through_all_files(package):
    (package / "a.py").write_text("from basisprune.b import x\nimport os\n")
    (package / "b.py").write_text("from basisprune import c\n")
    (package / "c.py").write_text("from basisprune.a import y\n")
    assert count.reached(count.read(package), "a.py") == {"a.py", "b.py", "c.py", "__init__.py"}
    assert count.reached(count.read(package), "plan.py") == {"plan.py"}


def test_a_longer_word_is_not_any(package):
    (package / "new.py").write_text("AnyOf = Company = 1\n" * 200)
    assert broken(package) == []
