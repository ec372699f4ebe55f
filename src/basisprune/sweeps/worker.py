"""What a run does, and the process that does it: `python -m basisprune.sweeps.worker FILE THREADS`."""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import TextIO, cast

import torch

from basisprune.callback import Callback, NullCallback, Tried
from basisprune.errors import BasisPruneError, printable
from basisprune.results import RunSummary, read_sealed
from basisprune.runs.compress import run_job
from basisprune.runs.folder import SUMMARY, OutputFolder
from basisprune.runs.preflight import preflight
from basisprune.runs.settings import Options
from basisprune.runs.train import check_training, train_job
from basisprune.sweeps.backbones import AUTO
from basisprune.sweeps.portfolio import check_portfolio, compress_portfolio
from basisprune.sweeps.running import Run, attempt
from basisprune.sweeps.stages import do_stage, job_of
from basisprune.torchkit.imports import only_code


class Log(NullCallback):
    """Writes messages, with the time, to a file."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def log(self, line: str) -> None:
        self._file.write(f"{time.strftime('%H:%M:%S')} {printable(line)}\n")
        self._file.flush()

    def judged(self, candidate: Tried) -> None:
        self.log(candidate.summary)


def perform(run: Run, callback: Callback) -> None:
    """Do the run in its folder, from where it was stopped; raise whatever goes wrong."""
    if run.kind == "train":
        train_job(job_of(run, callback), run.folder, callback)
    elif run.kind != "compress":
        do_stage(run, callback)
    elif run.backbone.name == AUTO:
        compress_portfolio(AUTO, run.data, output=run.folder, callback=callback, **cast("Options", run.options))
    elif run_job(job_of(run, callback), output=run.folder, callback=callback).summary.interrupted:
        raise KeyboardInterrupt


def check_run(run: Run, callback: Callback) -> None:
    """Raise the error that the run would end with, as far as it can be known; write nothing."""
    if run.backbone.name == AUTO:
        check_portfolio(AUTO, run.data, output=run.folder, callback=callback, **cast("Options", run.options))
        return
    job = job_of(run, callback)
    if run.kind == "train":
        check_training(job, run.folder, callback)
    else:
        preflight(job, OutputFolder(run.folder), job.to_dict(), callback)


def is_done(run: Run) -> bool:
    """Whether the folder holds the sound result of a whole run or training that was not stopped early."""
    path = run.folder / SUMMARY
    try:
        return bool(read_sealed(path)) if run.kind == "train" else not RunSummary.read(path).interrupted
    except (OSError, ValueError, BasisPruneError):
        return False


def perform_logged(run: Run, threads: int) -> None:
    """Do the run with this many threads; its messages, and why it failed, go to its log."""
    torch.set_num_threads(threads)
    run.log.parent.mkdir(parents=True, exist_ok=True)
    with open(run.log, "a", encoding="utf-8") as file:
        log = Log(file)
        log.log(f"process {os.getpid()} on {platform.node()}, {threads} threads")
        with only_code(None if run.options.get("trust_code") else run.code):
            try:
                perform(run, log)
            except Exception:
                traceback.print_exc(file=file)
                raise


def main(arguments: list[str]) -> int:
    """Do the run in a file; return 0 if it is done, 1 if it failed, with the reason in another file."""

    def end_with_parent() -> None:  # which closes the pipe
        os.read(sys.stdin.fileno(), 1)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    file, threads = Path(arguments[0]), int(arguments[1])
    failure = attempt(partial(perform_logged, threads=threads), Run.read(file))
    if failure is not None:
        failure.write(file.with_suffix(".failed"))
    return int(failure is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
