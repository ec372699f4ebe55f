"""How torch is imported: while no stranger's folder is the current one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


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
        """Return the spec of torch; None for all other modules."""
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
