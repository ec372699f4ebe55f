"""The results of the field: one file, a JSON line for each cell, appended to by any number of processes."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

Record = dict[str, Any]
KEY = ("model", "dataset", "method", "size", "seed")
"""What tells cells apart."""
PROTOCOL = "protocol"
"""What must be the same for all cells of a file, within the settings."""


def key_of(record: Record) -> tuple[Any, ...]:
    """What tells the record from those of other cells."""
    return tuple(tuple(value) if isinstance(value, list) else value for value in map(record.__getitem__, KEY))


def read_results(path: Path) -> list[Record]:
    """Return all cells with their settings, in the order in which they were run first; none without a file.

    The settings that cells share are in lines of their own, which cells name by their number. Of several lines of a
    cell, the last one counts; a line that was cut off when a process was killed is ignored.
    """
    shared: dict[int, Record] = {}
    cells: dict[tuple[Any, ...], Record] = {}
    for line in _lines(path):
        if "method" not in line:
            shared[line["settings"]] = line
        else:
            cells[key_of(line)] = line | {"settings": shared[line["settings"]]}
    return list(cells.values())


def add_result(path: Path, record: Record, settings: Record) -> None:
    """Append a cell, and its settings if they are new; exit if the file's cells were made by another protocol."""
    settings = json.loads(json.dumps(settings))  # as it is read back
    with _locked(path) as file:
        known = {line.pop("settings"): line for line in _lines(path) if "method" not in line}
        if any(line[PROTOCOL] != settings[PROTOCOL] for line in known.values()):
            raise SystemExit(f"{path}: has cells of another protocol; pass --results with the path of a new file")
        same = [number for number, line in known.items() if line == settings]
        new = [] if same else [{"settings": len(known), **settings}]
        lines = (*new, {**record, "settings": same[0] if same else len(known)})
        begin = b"" if path.read_bytes()[-1:] in (b"", b"\n") else b"\n"
        file.write(begin + "".join(json.dumps(line) + "\n" for line in lines).encode())
        file.flush()
        os.fsync(file.fileno())


def _lines(path: Path) -> Iterator[Record]:
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            continue


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """Open the file to append to it, as soon as no other process does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
