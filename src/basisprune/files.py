"""The one way a file is written: a reader sees the old file or the new one, never a part."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def write_text(path: Path, text: str) -> None:
    """Writes the text to `path`, all of it or nothing."""
    with atomic(path) as file:
        file.write(text.encode())


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write the whole of; it appears at `path` when the block ends well, and not at all otherwise."""
    with replacing(path) as partial, open(partial, "wb") as file:
        yield file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a whole file to; that takes the place of `path` when the block ends well, and goes otherwise.

    It lies beside `path`, hidden and with the same suffix, for what writes by name and looks at the suffix. The folder
    of `path` is made if it is missing. What took its place is on the disk, even if the machine stops a moment later.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{uuid.uuid4().hex[:8]}-{path.name}")
    try:
        yield partial
        sync(partial)
        os.replace(partial, path)
        sync(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Has the system bring a file, or the names in a folder, to the disk; where folders cannot be opened, nothing."""
    if os.name != "posix" and path.is_dir():
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
