"""Objects that a text names: 'package.module:name'."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

from basisprune.errors import BasisPruneError


def named_object(reference: str, what: str, error: type[BasisPruneError]) -> object:
    """What 'package.module:name' refers to; importing the module runs its code, so only for what a user typed.

    A module that is not installed is looked for in the current folder. Raises the error, which says `what` is wanted,
    if there is nothing of that name or the module cannot be imported.
    """
    module_name, _, attribute = reference.partition(":")
    if not (attribute.isidentifier() and all(name.isidentifier() for name in module_name.split("."))):
        raise error(f"{reference!r} is not {what}; write 'package.module:name'")
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
