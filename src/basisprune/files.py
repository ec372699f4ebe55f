"""The one way a file is written: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_text(path: Path, text: str) -> None:
    """Writes the text to `path`; a reader sees the old file or the new one, never a part."""
    with atomic(path) as file:
        file.write(text.encode())


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write the whole of; it appears at `path` when the block ends well, and not at all otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
