"""Runs as JSON values, and where they are done: in this process, in processes of their own, or on a Ray cluster."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Literal, TypeAlias

import pydantic
from joblib import Parallel, cpu_count, delayed

from basisprune.callback import Callback
from basisprune.data.load import fetch
from basisprune.errors import (
    BasisPruneError,
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
    ModelError,
    broken_rules,
)
from basisprune.torchkit.imports import Code, in_folder_of_python
from basisprune.torchkit.processes import Processes
from basisprune.types import JsonValue

Kind: TypeAlias = Literal["compress", "train", "probe", "start", "search", "deliver"]
"""What is done: a whole run, a training without pruning, or one of the stages of a portfolio, in their order."""

LOCAL = "local"
AT_LEAST_ONE = (lambda number: number >= 1, "at least 1 is needed")
_FINAL = (ConfigError, DataError, ModelError, MissingExtraError)
_LONGEST_NAME = 80
_MOST_TASKS = 1000  # on Ray at a time, each of which has a thread that waits for it
_SMALL_STORE = 100 << 20  # bytes; Ray stores nothing but the runs, as text


@dataclass(frozen=True)
class Backbone(JsonValue):
    """A network to start from; `weights` is a local file for a timm name, `cached` means that the hub is not asked."""

    name: str
    weights: str | None = None
    cached: bool = False


@dataclass(frozen=True)
class Run(JsonValue):
    """A training or a search in a folder: what to start from, on which images, and with which options.

    Of a portfolio, `root` is the folder of the whole, `epochs` how long a probe trains, and `best` the backbone that
    accuracies are compared with. `code` lists the references that may be imported, because the user typed them.
    """

    name: str
    kind: Kind
    folder: Path
    backbone: Backbone
    data: str
    options: dict[str, pydantic.JsonValue] = field(default_factory=dict)
    root: Path = Path()
    epochs: int = 0
    best: Backbone | None = None
    code: tuple[Code, ...] = ()

    @property
    def log(self) -> Path:
        return self.beside("log")

    @property
    def result(self) -> Path:
        """The file that a stage of a portfolio writes at its end, a different one for each `best`."""
        part = f"{self.kind}-{self.epochs}" if self.epochs else str(self.kind)
        return self.beside(f"{part}{'' if self.best is None else f'-against-{slug(self.best.name)}'}.json")

    def beside(self, suffix: str) -> Path:
        return self.folder.with_name(f"{self.folder.name}.{suffix}")


@dataclass(frozen=True)
class Failure(JsonValue):
    """Why a run failed; one that is `final` would fail again."""

    error: str
    final: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Describe an exception; wrong settings, data or models stay wrong."""
        message = str(error) if isinstance(error, BasisPruneError) else f"{type(error).__name__}: {error}"
        return cls(message, isinstance(error, _FINAL))


@dataclass(frozen=True)
class RunResult:
    """How a run ended, after how many attempts; `failure` is None if it succeeded."""

    run: Run
    failure: Failure | None = None
    attempts: int = 1


@dataclass(frozen=True)
class Resources:
    """What a run needs: `cpus` (None for a share of the machine's cores), `gpus`, and `memory` in bytes."""

    cpus: int | None = None
    gpus: float = 0.0
    memory: int | None = None

    def __post_init__(self) -> None:
        part_or_whole = lambda gpus: 0 <= gpus <= 1 or (gpus < float("inf") and gpus == int(gpus) > 0)  # noqa: E731
        rules = (
            ("cpus memory", *AT_LEAST_ONE),
            ("gpus", part_or_whole, "a part of one (0.5) or a whole number is needed"),
        )
        if faults := broken_rules(self, *rules):
            raise ConfigError.of("Resources", faults)


@dataclass(frozen=True)
class Running:
    """Where runs are done: in `jobs` processes on this machine, or on the Ray cluster at `ray_address`.

    The address is that of a running cluster, "auto" for the cluster of this machine, or "local" to start one for the
    duration of the call. `retries` is how often a failed run is repeated.
    """

    jobs: int = 1
    ray_address: str | None = None
    resources: Resources = field(default_factory=Resources)
    retries: int = 2

    def __post_init__(self) -> None:
        rules = ("jobs", *AT_LEAST_ONE), ("retries", lambda retries: retries >= 0, "at least 0 is needed")
        if faults := broken_rules(self, *rules):
            raise ConfigError.of("Running", faults)

    @property
    def threads(self) -> int:
        """The threads of each run: the cores it asks for, or an equal share of this machine's."""
        if self.resources.cpus is not None:
            return self.resources.cpus
        return 1 if self.ray_address is not None else max(1, cpu_count() // self.jobs)


Pool: TypeAlias = Callable[[Sequence[Run]], Iterator[tuple[Run, Failure | None]]]
"""Does all runs and yields each when it ends, with its failure if it has failed."""
Do: TypeAlias = Callable[[Run], Failure | None]


def run_all(
    runs: Sequence[Run],
    pool: Pool,
    retries: int,
    callback: Callback,
    done: Callable[[Run], bool] = lambda _: False,
) -> list[RunResult]:
    """Return how each run ended; skip those that are `done`, and repeat failed ones last, unless that is final."""
    results = {run.name: RunResult(run, attempts=0) for run in runs if done(run)}
    waiting = [run for run in runs if run.name not in results]
    if results and waiting:
        callback.log(f"{len(results)} of {len(runs)} are done already")
    for attempt in range(1, retries + 2):
        failed = []
        for run, failure in pool(waiting):
            if failure is not None and not failure.final and attempt <= retries:
                callback.log(f"{run.name}: attempt {attempt} of {retries + 1} failed: {failure.error}")
                failed.append(run)
                continue
            results[run.name] = RunResult(run, failure, attempt)
            how = "done" if failure is None else f"failed: {failure.error}"
            callback.log(f"{run.name}: {how} ({len(results)} of {len(runs)})")
        waiting = failed
    return [results[run.name] for run in runs]


@contextmanager
def open_pool(running: Running, callback: Callback, in_process: Callable[[Run], None] | None = None) -> Iterator[Pool]:
    """Yield the pool for these settings; one job is done by `in_process` in this process, if it is given."""
    # The workers of joblib's own backends do several runs each, and one that is killed ends all others. So its threads
    # wait for processes that do one run each.
    place: AbstractContextManager[Do]
    jobs = running.jobs
    if running.ray_address is not None:
        place, jobs = _on_ray(running), _MOST_TASKS
    elif in_process is not None and running.jobs == 1:
        place = nullcontext(partial(attempt, in_process))
    else:
        place = _in_processes(running.threads)

    def pool(runs: Sequence[Run]) -> Iterator[tuple[Run, Failure | None]]:
        if running.jobs > 1:  # or two processes would download the same images
            for data in {run.data for run in runs}:
                with suppress(BasisPruneError):  # which the run reports
                    fetch(data)

        def job(run: Run) -> tuple[Run, Failure | None]:
            callback.log(f"{run.name}: {run.kind}")
            return run, do(run)

        count = max(min(jobs, len(runs)), 1)
        parallel = Parallel(n_jobs=count, backend="threading", return_as="generator_unordered")
        yield from parallel(delayed(job)(run) for run in runs)

    with place as do:
        yield pool


def attempt(do: Callable[[Run], None], run: Run) -> Failure | None:
    """Do the run; return its failure."""
    try:
        do(run)
    except Exception as error:
        return Failure.of(error)
    return None


@contextmanager
def _in_processes(threads: int) -> Iterator[Do]:
    """Do each run in a process of its own, so that one that is killed ends no other.

    The processes end with the block, or with this process, which closes their standard input.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environment["PYTHONSAFEPATH"] = "1"  # or files in the current folder would pass for installed packages
    lock, live, is_closed = threading.Lock(), set["subprocess.Popen[bytes]"](), threading.Event()

    def do(run: Run) -> Failure | None:
        run.write(run.beside("run"))
        run.beside("failed").unlink(missing_ok=True)
        with lock, open(run.log, "ab") as log:
            if is_closed.is_set():
                return Failure("stopped before it began")
            process = subprocess.Popen(
                [sys.executable, "-m", "basisprune.sweeps.worker", str(run.beside("run")), str(threads)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process, which ends the others
            )
            live.add(process)
        with process:
            code = process.wait()
        live.discard(process)
        if code == 0:
            return None
        with suppress(CheckpointError):
            return Failure.read(run.beside("failed"))
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return Failure(f"its process {how}; see {run.log}")

    try:
        yield do
    finally:
        with lock:
            is_closed.set()
        for process in list(live):
            process.kill()
            process.wait()


@contextmanager
def _on_ray(running: Running) -> Iterator[Do]:
    """Do each run in a Ray task with a worker process of its own and the resources that it asks for."""
    ray = require_ray()
    is_owner = not ray.is_initialized()
    if is_owner:
        _connect(ray, running)
    needs, unfinished = running.resources, set[object]()
    task = ray.remote(max_retries=0, max_calls=1)(_on_node)
    task = task.options(num_cpus=running.threads, num_gpus=needs.gpus, memory=needs.memory)

    def do(run: Run) -> Failure | None:
        submitted = task.remote(run.to_json(), running.threads)
        unfinished.add(submitted)
        try:
            failure = ray.get(submitted)
        except ray.exceptions.RayError as error:
            return Failure(f"its Ray worker died: {str(error).splitlines()[0]}")
        finally:
            unfinished.discard(submitted)
        return None if failure is None else Failure.from_json(failure)

    try:
        yield do
    finally:
        for submitted in list(unfinished):
            ray.cancel(submitted, force=True)
        if is_owner:
            ray.shutdown()


def require_ray() -> ModuleType:
    """Return the package; raise MissingExtraError that names the extra."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # about Ray's own future defaults
            return import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingExtraError("ray", extra="ray") from error


def _connect(ray: ModuleType, running: Running) -> None:
    options: dict[str, object] = {"address": running.ray_address, "log_to_driver": False, "logging_level": "warning"}
    if running.ray_address == LOCAL:
        cpus = running.jobs * running.threads
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _SMALL_STORE}
    try:
        with in_folder_of_python():  # Ray has workers import modules from the current folder
            ray.init(**options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"ray_address: {running.ray_address!r} given; no Ray cluster answers there ({error}); start one with "
            f"`ray start --head`, or pass {LOCAL!r}"
        ) from error


def _on_node(text: str, threads: int) -> str | None:
    """Do a run on a worker of the cluster; return its failure as JSON."""
    from basisprune.sweeps.worker import perform_logged  # which imports this module

    failure = attempt(partial(perform_logged, threads=threads), Run.from_json(text))
    return None if failure is None else failure.to_json()


def refuse_launcher(where: str) -> None:
    """Raise ConfigError if a launcher started several processes, where one starts all others."""
    if Processes.joined().count > 1:
        raise ConfigError(
            f"{where}: started in several processes; start one, without a launcher, and pass jobs or ray_address"
        )


def slug(name: str) -> str:
    """Turn a name into that of a folder: letters, digits, dots and dashes, and a checksum where others were lost.

    >>> slug("resnet50"), slug("photos/large set")
    ('resnet50', 'photos-large-set-23e998')
    """
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.")[:_LONGEST_NAME]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}".strip("-")


def absolute(source: str) -> str:
    """Make a path absolute, for processes in another folder; return other names as they are."""
    try:
        path = Path(source).expanduser()
        return str(path.resolve()) if path.exists() else source
    except (OSError, RuntimeError, ValueError):
        return source
