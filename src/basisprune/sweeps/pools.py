"""Where cells run on this machine: in this process, or each in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from basisprune.data.load import fetch
from basisprune.errors import BasisPruneError
from basisprune.files import read_checked
from basisprune.sweeps.cells import Cell, Failure, write_cell
from basisprune.sweeps.running import Running

_PAUSE = 0.05  # seconds between two looks at the processes
_PATIENCE = 10.0  # seconds for a process to end by itself


class Here:
    """Runs cells in this process, one after the other; an error of one does not stop the next."""

    def __init__(self, work: Callable[[Cell], None]) -> None:
        self._work = work
        self._ended: deque[tuple[Cell, Failure | None]] = deque()

    @property
    def has_room(self) -> bool:
        """Whether the last one was asked for."""
        return not self._ended

    def start(self, cell: Cell) -> None:
        """Does all of it."""
        try:
            self._work(cell)
        except Exception as error:
            self._ended.append((cell, Failure.of(error)))
        else:
            self._ended.append((cell, None))

    def ended(self) -> tuple[Cell, Failure | None]:
        """How it ended."""
        return self._ended.popleft()

    def close(self) -> None:
        """Nothing runs any more."""


class Processes:
    """Runs each cell in a process of its own, so that one that is killed or runs out of memory takes nothing with it.

    The cores are divided. A process ends when this one does, because its standard input does.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._at_work: list[tuple[Cell, subprocess.Popen[bytes]]] = []
        self._fetched: set[str] = set()

    @property
    def has_room(self) -> bool:
        """Whether fewer than `jobs` run."""
        return len(self._at_work) < self._running.jobs

    def start(self, cell: Cell) -> None:
        """Starts a process for the cell, whose images are here by then: two processes would download them at once."""
        if self._running.jobs > 1 and cell.data not in self._fetched:
            self._fetched.add(cell.data)
            with suppress(BasisPruneError):  # of which the cell will tell
                fetch(cell.data)
        job, failure = files(cell)
        write_cell(job, cell)
        failure.unlink(missing_ok=True)
        threads = str(self._running.threads)
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        environment["PYTHONSAFEPATH"] = "1"  # or files in the current folder would pass for installed packages
        with open(cell.log, "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "basisprune.sweeps.worker", str(job), threads],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others
            )
        self._at_work.append((cell, process))

    def ended(self) -> tuple[Cell, Failure | None]:
        """Waits for one to end; what it says of its failure, or how it was killed."""
        while True:
            for cell, process in self._at_work:
                if process.poll() is not None:
                    self._at_work.remove((cell, process))
                    _let_go(process)
                    return cell, _failure(cell, process.returncode)
            time.sleep(_PAUSE)

    def close(self) -> None:
        """Ends all that run."""
        for _, process in self._at_work:
            process.terminate()
        for _, process in self._at_work:
            try:
                process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _let_go(process)
        self._at_work.clear()


def files(cell: Cell) -> tuple[Path, Path]:
    """The file with the cell, and that with its failure, beside its folder."""
    name = cell.folder.name
    return cell.folder.with_name(f"{name}.cell"), cell.folder.with_name(f"{name}.failed")


def _let_go(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()


def _failure(cell: Cell, code: int) -> Failure | None:
    if code == 0:
        return None
    try:
        return Failure.from_json(read_checked(files(cell)[1]))
    except (OSError, BasisPruneError):
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Failure(f"its process {how}; see {cell.log}")
