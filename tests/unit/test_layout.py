"""The law of the tests' own layout: a unit test lies where the file lies that it tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePath

UNIT = Path(__file__).parent
PACKAGE = UNIT.parents[1] / "src" / "basisprune"
EXCEPTIONS = {
    "test_layout.py": "it is about the tests themselves",
    "deploy/bundle/test_attacks.py": "it is about all files that read a bundle",
}


def source_of(test: PurePath) -> PurePath:
    """Where the file is that a test of this path is about, both from their roots."""
    name = test.name.removeprefix("test_")
    return test.with_name("__init__.py" if name == "init.py" else name)


def strays(tests: Iterable[PurePath]) -> list[str]:
    """The tests, named from tests/unit, that have no source file of their name."""
    return [str(test) for test in tests if str(test) not in EXCEPTIONS and not (PACKAGE / source_of(test)).is_file()]


def test_every_unit_test_has_a_source_file_of_its_name():
    found = sorted(path.relative_to(UNIT) for path in UNIT.rglob("test_*.py"))
    assert PurePath("test_planning.py") in found
    assert strays(found) == []


def test_a_stray_test_is_noticed():
    given = [
        "test_planning.py",
        "test_planning_filters.py",
        "coupling/test_planning.py",
        "cli/test_init.py",
        "cli/test_cli.py",
    ]
    assert strays(map(PurePath, given)) == ["test_planning_filters.py", "coupling/test_planning.py", "cli/test_cli.py"]


def test_nothing_but_tests_and_their_fixtures_lies_among_the_unit_tests():
    others = [path for path in UNIT.rglob("*.py") if not path.name.startswith("test_")]
    assert {path.name for path in others} <= {"conftest.py"}
