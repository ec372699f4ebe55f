"""Objects that a text names: 'package.module:name', and which of them may be imported.

Importing a module runs its code. A Python program may name any; a command, and the process of a cell, imports only what
somebody typed (`only_code`), wherever else the text may come from: a configuration, a bundle, a file of an earlier run.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from basisprune.errors import BasisPruneError, ConfigError

_NAME = r"[^\W\d]\w*"
_REFERENCE = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}")
_typed: frozenset[str] | None = None  # the references that may be imported; None where any may


def is_reference(text: object) -> bool:
    """Whether the text has the form of a reference; sources such as torchvision:NAME have it too."""
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


@contextmanager
def only_code(references: Iterable[str] | None) -> Iterator[None]:
    """Let nothing but these references be imported in the block; None allows what the block around it allows."""
    global _typed
    before, asked = _typed, None if references is None else frozenset(references)
    _typed = before if asked is None else asked if before is None else asked & before
    try:
        yield
    finally:
        _typed = before


def fault_of_code(reference: str) -> str:
    """Why the reference may not be imported; empty if it may."""
    if _typed is None or reference in _typed:
        return ""
    return (
        f"{reference!r} was read from a file, and would import and run code; if you trust whoever wrote the file, pass "
        "--trust-code, or give it on the command line"
    )


def refuse_code(references: Iterable[str]) -> None:
    """Raise ConfigError for references that may not be imported, before anything else is done."""
    faults = [fault for reference in references if (fault := fault_of_code(reference))]
    if faults:
        raise ConfigError.of("", faults)


def named_object(reference: str, what: str, error: type[BasisPruneError]) -> object:
    """What 'package.module:name' refers to; the only place where a text decides on what is imported.

    A module that is not installed is looked for in the current folder. Raises the error, which says `what` is wanted.
    """
    if not is_reference(reference):
        raise error(f"{reference!r} is not {what}; write 'package.module:name'")
    if refused := fault_of_code(reference):
        raise error(refused)
    module_name, _, attribute = reference.partition(":")
    try:
        found = getattr(_imported(module_name), attribute, None)
    except ImportError as fault:
        raise error(
            f"{reference!r}: cannot import {module_name}: {fault}; is it in this folder, or installed?"
        ) from fault
    except (Exception, SystemExit) as fault:
        raise error(f"{reference!r}: cannot import {module_name}: {said_by(fault)}") from fault
    if found is None:
        raise error(f"{reference!r}: {module_name} has no {attribute!r}; write 'package.module:name' of {what}")
    return found


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        first = name.partition(".")[0]
        here = Path.cwd()
        if error.name != first or not ((here / f"{first}.py").is_file() or (here / first).is_dir()):
            raise
        sys.path.append(str(here))  # last, so that it hides nothing that is installed
        importlib.invalidate_caches()
        return importlib.import_module(name)


def called(reference: str, function: object, error: type[BasisPruneError]) -> object:
    """What the function that a text names returns; whatever goes wrong in it is that error."""
    if not callable(function):
        return function
    try:
        return function()
    except (Exception, SystemExit) as fault:
        raise error(f"{reference!r}: calling it without arguments failed: {said_by(fault)}") from fault


def said_by(error: BaseException) -> str:
    """What somebody else's code said when it failed."""
    return "it ends the program" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"


def import_torch_elsewhere() -> None:
    """Have torch, once it is imported, be imported while Python's own folder is the current one.

    Some of its libraries look for others in the current folder, where a stranger's files may lie: the run path of
    NVIDIA's cuSPARSELt has an empty entry.
    """
    if "torch" not in sys.modules and not any(isinstance(finder, _Elsewhere) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Elsewhere())


class _Elsewhere:
    """Finds torch as others do, once, and has it run in another folder."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_elsewhere(module: ModuleType) -> None:
                with in_folder_of_python():
                    run(module)

            spec.loader.exec_module = run_elsewhere  # type: ignore[method-assign]
        return spec


@contextmanager
def in_folder_of_python() -> Iterator[None]:
    """Have Python's own folder be the current one while the block runs."""
    here = None
    with suppress(OSError):  # the folder may be gone
        here = os.getcwd()
    os.chdir(os.path.dirname(os.path.abspath(sys.executable)))
    try:
        yield
    finally:
        if here is not None:
            with suppress(OSError):
                os.chdir(here)
