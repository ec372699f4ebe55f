"""Objects by name: what is installed, and what lies in the current folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from threading import Event
from types import ModuleType

import pytest

import basisprune
from basisprune.errors import ConfigError, DataError, ModelError
from basisprune.torchkit.imports import GUARDED, call_of, called, in_folder_of_python, named_object, only_code


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """A folder that is not on the path, as for the command of an installed package."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])


def test_a_module_in_the_current_folder_is_found_with_what_it_imports(tmp_path):
    (tmp_path / "of_mine_beside.py").write_text("number = 3")
    (tmp_path / "of_mine.py").write_text("def thing():\n    import of_mine_beside\n    return of_mine_beside.number")
    assert named_object("of_mine:thing", "task", ConfigError)() == 3
    assert sys.path[-1] == str(tmp_path)


def test_what_is_installed_comes_first_and_a_name_that_is_nowhere_leaves_the_path(tmp_path):
    (tmp_path / "timm.py").write_text("hidden = True")
    before = list(sys.path)
    with pytest.raises(ConfigError, match="timm has no 'hidden'"):
        named_object("timm:hidden", "task", ConfigError)
    with pytest.raises(ConfigError, match=r"cannot import of_nobody: .*; is it in this folder, or installed"):
        named_object("of_nobody:thing", "task", ConfigError)
    assert sys.path == before


def test_a_module_that_misses_another_says_which(tmp_path):
    (tmp_path / "of_mine_too.py").write_text("import of_nobody")
    with pytest.raises(ConfigError, match="cannot import of_mine_too: No module named 'of_nobody'"):
        named_object("of_mine_too:thing", "task", ConfigError)


MORE = [("task", "of_a_stranger:thing"), ("task", "math:pi")]


def test_what_was_typed_for_one_role_allows_no_other(tmp_path):
    (tmp_path / "hf.py").write_text("from pathlib import Path\nPath('ran').touch()\nbeans = 3\n")
    with (
        only_code([("loaders", "hf:beans"), ("factory", "hf:beans")]),
        pytest.raises(ConfigError, match="--trust-code"),
    ):
        named_object("hf:beans", "task", ConfigError)
    assert not (tmp_path / "ran").exists()


def test_only_what_was_typed_is_imported_and_nothing_within_widens_it(tmp_path):
    (tmp_path / "of_a_stranger.py").write_text("from pathlib import Path\nPath('ran').touch()\nthing = 3\n")
    with only_code([("task", "math:pi")]), only_code(None), only_code(MORE):
        assert named_object("math:pi", "task", ConfigError) > 3
        with pytest.raises(ConfigError, match=r"'of_a_stranger:thing' was read from a file.*--trust-code"):
            named_object("of_a_stranger:thing", "task", ConfigError)
        with ThreadPoolExecutor() as threads, pytest.raises(ConfigError, match="was read from a file"):
            threads.submit(named_object, "of_a_stranger:thing", "task", ConfigError).result()
    assert not (tmp_path / "ran").exists()
    assert named_object("of_a_stranger:thing", "task", ConfigError) == 3


def is_constant(argument: ast.expr) -> bool:
    return isinstance(argument, ast.Constant)


def test_a_text_decides_on_what_is_imported_in_one_place_only():
    """`importlib.import_module` gets names that the source code has, but for one call, and parts of YOLO."""
    calls = [
        (path.name, call)
        for path in Path(basisprune.__file__).parent.rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
    ]
    importers = ("import_module", "importlib.import_module", "__import__", "exec", "eval", "runpy.run_path")
    others = [name for name, call in calls if ast.unparse(call.func) in importers and not is_constant(call.args[0])]
    assert set(others) == {"imports.py", "ultralytics.py"}


WATCHED = """
import os, sys
before = os.getcwd()
seen = []
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C":  # which loads the libraries
            seen.append(os.getcwd())
sys.meta_path.insert(0, Watch())
import basisprune
from basisprune.torchkit.imports import import_others_elsewhere
import_others_elsewhere()  # once more does no harm
print("torch" in sys.modules)
import torch
print(os.getcwd() == before, before in seen, len(seen) == 1, torch.ones(1).item() == 1.0)
"""


CONFIGURED = (
    WATCHED[: WATCHED.index("import basisprune")]
    + """
from basisprune.cli import app
try:
    app(["inspect", "no such model", "--config", "settings.yaml"])
except SystemExit:
    print("torch" in sys.modules, before in seen)
"""
)


def test_a_command_with_a_file_of_settings_imports_torch_from_elsewhere_too(tmp_path):
    (tmp_path / "settings.yaml").write_text("size: 32\n")
    run = subprocess.run([sys.executable, "-c", CONFIGURED], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "False"]


def test_torch_is_imported_from_elsewhere_and_the_folder_stays_current(tmp_path):
    run = subprocess.run([sys.executable, "-c", WATCHED], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "True", "False", "True", "True"]


def test_every_package_that_is_imported_here_is_from_elsewhere():
    trees = [ast.parse(path.read_text()) for path in Path(basisprune.__file__).parent.rglob("*.py")]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    first = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert first - GUARDED <= {"basisprune", "lazy_loader", "PIL"}  # the last is first needed where threads read images


LATE = """
import os, sys
before = os.getcwd()
import basisprune, torchmetrics
sys.path.insert(0, sys.argv[1])
import comet_ml
print(comet_ml.place != before == os.getcwd())
"""


def test_what_a_package_imports_later_is_from_elsewhere_too(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "comet_ml.py").write_text("import os; place = os.getcwd()")
    command = [sys.executable, "-c", LATE, str(tmp_path)]
    run = subprocess.run(command, cwd=tmp_path / "here", capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True"]


def test_parts_of_packages_are_imported_where_threads_may_be_reading(tmp_path):
    code = "import os, sys, basisprune, timm; timm.__path__.append(sys.argv[1]); import timm.late"
    (tmp_path / "late.py").write_text("import os; print(os.getcwd())")
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.check_output(command, cwd=tmp_path, text=True).strip() == str(tmp_path)


def test_the_folder_comes_back_when_the_last_thread_is_done(tmp_path):
    here, inside, done = Path.cwd(), Event(), Event()

    def wait() -> Path:
        with in_folder_of_python():
            inside.set()
            done.wait(10)
            return Path.cwd()

    with ThreadPoolExecutor() as threads:
        with in_folder_of_python():
            other = threads.submit(wait)
            inside.wait(10)
        assert Path.cwd() != here
        done.set()
        assert other.result() != here
    assert Path.cwd() == here


@pytest.mark.parametrize(
    "arguments", [{}, {"width": 8}, {"name": "it's (", "sizes": [1, (2, None)], "deep": {"a": 0.5}}]
)
def test_a_class_with_arguments_is_called_as_its_reference_says(arguments, monkeypatch):
    place = ModuleType("a_place")
    place.Kind = type(
        "Kind", (), {"__module__": "a_place.inner", "__init__": lambda self, **given: vars(self).update(given)}
    )
    for name in ("a_place", "a_place.inner"):
        monkeypatch.setitem(sys.modules, name, place)
    reference = call_of(place.Kind, arguments)
    assert reference.startswith("a_place:Kind(")  # the shorter of the two
    assert vars(called(reference, named_object(reference, "factory", ModelError), ModelError)) == arguments
    with pytest.raises(ModelError, match="pass --trust-code"), only_code([("factory", "a_place:Kind")]):
        named_object(reference, "factory", ModelError)
    with pytest.raises(DataError, match="is not loaders"):
        named_object(reference, "loaders", DataError)


def test_arguments_and_classes_that_no_text_names_are_none():
    assert call_of(Fraction, {"numerator": Fraction(1)}) is None
    assert call_of(Fraction, {"numerator": float("inf")}) is None
    assert call_of(type("Local", (), {}), {}) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [("(1)", "by name"), ("(**{})", "by name"), ("(x=print())", "malformed"), ("(x=1", "is not a factory"),
     ("(]", "is not"), ("(x=1)+f()", "by name"), ("(]])", "no list of arguments")],
)  # fmt: skip
def test_arguments_are_literals_with_names(arguments, message):
    with pytest.raises(ModelError, match=message):
        named_object(f"fractions:Fraction{arguments}", "factory", ModelError)
