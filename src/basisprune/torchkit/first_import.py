"""Where torch is imported from, before any other module does it."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def import_torch() -> None:
    """Import torch while Python's own folder is the current one.

    Some of its libraries look for others in the current folder, where a stranger's files may lie: the run path of
    NVIDIA's cuSPARSELt has an empty entry.
    """
    here = None
    with suppress(OSError):  # the folder may be gone
        here = os.getcwd()
    os.chdir(os.path.dirname(os.path.abspath(sys.executable)))
    try:
        import torch  # noqa: F401
    finally:
        if here is not None:
            with suppress(OSError):
                os.chdir(here)
