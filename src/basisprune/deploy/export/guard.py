"""Exported files that anybody may have made, run in a process of their own that is bounded in memory and time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from basisprune.deploy.export import runner
from basisprune.deploy.export.interface import Run, Runtime
from basisprune.errors import ModelError

_T = TypeVar("_T")
_BATCH = 16  # images at a time, so that large batches need no more memory than small ones
_LEAST_BYTES, _TIMES_FILE = 4 << 30, 4  # of memory, and as many times the size of the file beside it
_START, _READ = 60, 20 << 20  # seconds to start, and bytes read in each one more
_LEAST, _TIMES_SLOWEST = 60, 10  # seconds for a batch, and as many times what its images took before


def guarded(runtime: Runtime, threads: int) -> Runtime:
    """The runtime, whose files run in processes of their own; one that only runs files of ours stays as it is."""
    if runtime.name not in runner.RUNNERS:
        return runtime
    started: dict[Path, Guarded] = {}

    def start(path: Path) -> Guarded:
        return Guarded(runtime, path, threads)

    def notes(path: Path) -> Mapping[str, str]:
        started[path] = start(path)
        return started[path].notes

    def opened(path: Path, _threads: int) -> Run:
        return started.pop(path, None) or start(path)

    return replace(runtime, open=opened, notes=notes)


class Guarded:
    """One file in a process of its own: `notes` is what it says of itself, and a call gives the scores of a batch.

    Raises ModelError for a file that its runtime cannot take, and for one that asks for too much memory or time.
    """

    def __init__(self, runtime: Runtime, path: Path, threads: int) -> None:
        self._title, self._path, self._slowest = runtime.title, path, 0.0
        size = sum(path.with_name(name).stat().st_size for name in runtime.files(_stem(runtime, path)))
        self._most, seconds = _LEAST_BYTES + _TIMES_FILE * size, _START + size // _READ
        words = [runtime.name, str(path.absolute()), str(threads), str(self._most), str(seconds)]
        command = [sys.executable, "-P", str(Path(runner.__file__)), *words]  # no module beside it shadows another
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        weakref.finalize(self, _end, self._process)
        answer = self._within(seconds, "to be opened", self._line)
        notes = answer.get("notes")
        self.notes = {str(name): str(text) for name, text in notes.items()} if isinstance(notes, dict) else {}

    def __call__(self, batch: NDArray[np.generic]) -> NDArray[np.generic]:
        """The scores of the batch, of which a few images are run at a time, the first one by itself."""
        first = 0 if self._slowest else 1
        starts = [0] * first + list(range(first, len(batch), _BATCH))
        ends = [*starts[1:], len(batch)]
        return np.concatenate([self._scores(batch[start:end]) for start, end in zip(starts, ends, strict=True)])

    def _scores(self, batch: NDArray[np.generic]) -> NDArray[np.generic]:
        seconds = round(_LEAST + _TIMES_SLOWEST * len(batch) * self._slowest)
        pipe, started = self._process.stdin, time.monotonic()
        assert pipe is not None

        def asked() -> NDArray[np.generic]:
            runner.send(pipe, batch, seconds=seconds)
            about = self._line()
            assert self._process.stdout is not None
            return runner.receive(self._process.stdout, about)

        scores = self._within(seconds, f"for {len(batch)} images", asked)
        self._slowest = max(self._slowest, (time.monotonic() - started) / len(batch))
        return scores

    def _line(self) -> dict[str, Any]:
        """The next answer; raises ModelError if it tells of an error."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline(2 * runner.MOST_NOTES)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            said = f"{self._title} cannot take it ({answer['error']})"
            raise ModelError(f"{self._path}: {said}; export it again ({self._limits})")
        return answer

    def _within(self, seconds: float, what: str, work: Callable[[], _T]) -> _T:
        """What the work gives; the process is ended after so many seconds, which ends the work too."""
        timer, started = threading.Timer(seconds, self._process.kill), time.monotonic()
        timer.daemon = True
        timer.start()
        try:
            return work()
        except (OSError, EOFError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            _end(self._process)
            said = f"{self._title} ended with code {self._process.returncode}"
            if time.monotonic() - started >= seconds:
                said = f"it takes {self._title} more than {seconds:.0f} seconds {what}"
            raise ModelError(f"{self._path}: {said} ({self._limits}); do not use it, or export it again") from error
        finally:
            timer.cancel()

    @property
    def _limits(self) -> str:
        return f"files run in at most {self._most / (1 << 30):.1f} GB"


def _stem(runtime: Runtime, path: Path) -> str:
    return path.name.removesuffix(runtime.suffixes[0])


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was to be sent has nowhere to go
                pipe.close()
