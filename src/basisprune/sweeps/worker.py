"""The process of one cell: `python -m basisprune.sweeps.worker FILE THREADS`, started by `Processes`."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

from basisprune.errors import printable
from basisprune.files import write_checked
from basisprune.listener import Silence, Tried
from basisprune.sweeps.cells import Cell, Failure, read_cell


class Log(Silence):
    """Writes what a cell says, with the time, to a file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def say(self, line: str) -> None:
        """Writes the line."""
        self._file.write(f"{time.strftime('%H:%M:%S')} {printable(line)}\n")
        self._file.flush()

    def judged(self, candidate: Tried) -> None:
        """Writes the outcome."""
        self.say(candidate.summary)


def perform_logged(cell: Cell, threads: int) -> None:
    """Does the cell with so many threads; what it says goes to its log."""
    import torch

    from basisprune.sweeps.work import perform
    from basisprune.torchkit.references import only_code

    torch.set_num_threads(threads)
    cell.log.parent.mkdir(parents=True, exist_ok=True)
    with open(cell.log, "a", encoding="utf-8") as file:
        log = Log(file)
        log.say(f"process {os.getpid()} on {platform.node()}, {threads} threads")
        with only_code(None if cell.options.get("trust_code") else cell.code):
            perform(cell, log)


def _end_with_parent() -> None:
    """Ends this process when the one that started it does, which closes the pipe."""
    sys.stdin.buffer.read()
    os._exit(1)


def main(arguments: list[str]) -> int:
    """The exit code: 0 if the cell is done, 1 if it failed, with the reason in a file."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job, threads = Path(arguments[0]), int(arguments[1])
    try:
        perform_logged(read_cell(job), threads)
    except Exception as error:
        import traceback

        traceback.print_exc()  # into the log
        write_checked(job.with_suffix(".failed"), Failure.of(error).to_json().encode())
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # the thread that reads the pipe would be waited for
