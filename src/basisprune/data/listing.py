"""A folder -> the image files in it, the same ones whoever asks."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from basisprune.data.decode import EXTENSIONS
from basisprune.errors import DataError, pass_on

Place = tuple[int, int]
"""A folder on its device, however it is called."""


def image_files(folder: Path, seen: set[Place] | None = None) -> list[Path]:
    """The images in the folder, however deep, sorted; hidden files and files of other kinds are passed over.

    Links are followed, but not to a folder that is read already, as links in a circle lead to; `seen` are such
    folders, which the call adds to. Raises DataError that names such a link, a link that leads nowhere, and what
    has the name of an image and is not a file.
    """
    return [path for path in all_files(folder, seen) if path.suffix.lower() in EXTENSIONS]


def all_files(folder: Path, seen: set[Place] | None = None) -> list[Path]:
    """The files of every kind, as `image_files` finds them."""
    return sorted(_walk(folder, set() if seen is None else seen))


def subfolders(folder: Path) -> list[Path]:
    """The folders right in the folder, sorted, without hidden ones."""
    return [path for path, mode in _entries(folder) if stat.S_ISDIR(mode)]


def _walk(folder: Path, seen: set[Place]) -> Iterator[Path]:
    pending = [folder]
    while pending:
        here = pending.pop()
        known = os.stat(here)
        if (known.st_dev, known.st_ino) in seen:
            raise DataError(f"{here}: leads to {here.resolve()}, which is read already; remove the link")
        seen.add((known.st_dev, known.st_ino))
        for path, mode in _entries(here):
            if stat.S_ISDIR(mode):
                pending.append(path)
            elif stat.S_ISREG(mode):
                yield path
            elif path.suffix.lower() in EXTENSIONS:
                raise DataError(f"{path}: is a link to nothing, a pipe or a device, and no image; remove it")


def _entries(folder: Path) -> list[tuple[Path, int]]:
    """What lies right in the folder, and whether it is a folder or a file, links followed."""
    try:
        with os.scandir(folder) as found:
            return sorted((Path(entry.path), _mode(entry)) for entry in found if not entry.name.startswith("."))
    except OSError as error:
        pass_on(error, folder)
        raise DataError(f"{folder}: cannot be read ({error.strerror or error})") from error


def _mode(entry: os.DirEntry[str]) -> int:
    try:
        return stat.S_IFDIR if entry.is_dir() else stat.S_IFREG if entry.is_file() else 0
    except OSError as error:  # a link to nothing, or in a circle
        pass_on(error, entry.path)
        return 0
