"""Cells -> what became of each: as many at once as there is room for, what failed once more, nothing that is done."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from basisprune.errors import ConfigError
from basisprune.listener import Listener
from basisprune.sweeps.cells import Cell, Failure
from basisprune.torchkit.processes import Processes


@dataclass(frozen=True)
class Resources:
    """What a cell needs of a machine: `memory` in bytes. None is a share of the machine's cores."""

    cpus: int | None = None
    gpus: float = 0.0
    memory: int | None = None

    def __post_init__(self) -> None:
        faults = []
        if self.cpus is not None and self.cpus < 1:
            faults.append(f"cpus: {self.cpus} given; at least 1 is needed")
        if not 0 <= self.gpus < float("inf") or (self.gpus > 1 and self.gpus != int(self.gpus)):
            faults.append(f"gpus: {self.gpus} given; a part of one, such as 0.5, or a whole number is needed")
        if self.memory is not None and self.memory < 1:
            faults.append(f"memory: {self.memory} given; a number of bytes such as 8G is needed")
        if faults:
            raise ConfigError.of("Resources", faults)


@dataclass(frozen=True)
class Running:
    """How cells are run: `jobs` processes here, or on the Ray cluster at `ray_address`; what failed is tried again.

    The address is that of a running cluster ("auto" finds the one that this machine belongs to), or "local" for one
    that is started here for as long as the call takes. `retries` is how often a cell is tried again.
    """

    jobs: int = 1
    ray_address: str | None = None
    resources: Resources = field(default_factory=Resources)
    retries: int = 2

    def __post_init__(self) -> None:
        faults = []
        if self.jobs < 1:
            faults.append(f"jobs: {self.jobs} given; at least 1 is needed")
        if self.retries < 0:
            faults.append(f"retries: {self.retries} given; 0 or more are possible")
        if faults:
            raise ConfigError.of("Running", faults)

    @property
    def threads(self) -> int:
        """The threads of each cell: the cores it asks for, or an equal share of this machine's."""
        if self.resources.cpus is not None:
            return self.resources.cpus
        return 1 if self.ray_address is not None else max(1, cores() // self.jobs)


@dataclass(frozen=True)
class Outcome:
    """What became of a cell, in which attempt; `failure` is None if it was done."""

    cell: Cell
    failure: Failure | None = None
    attempts: int = 1


class Pool(Protocol):
    """Where cells are run."""

    @property
    def has_room(self) -> bool:
        """Whether one more may be started."""

    def start(self, cell: Cell) -> None:
        """Starts the cell."""

    def ended(self) -> tuple[Cell, Failure | None]:
        """Waits for a cell that ends, and says how it did."""

    def close(self) -> None:
        """Ends what still runs."""


def run_cells(
    cells: Sequence[Cell],
    pool: Pool,
    retries: int,
    listener: Listener,
    done: Callable[[Cell], bool] = lambda _: False,
) -> list[Outcome]:
    """What became of each cell, in their order; those that are `done` already are not run.

    A cell that fails is tried again, after all that wait, unless it would fail for the same reason once more. What
    fails for good does not stop the others.
    """
    found = {cell.name: Outcome(cell, attempts=0) for cell in cells if done(cell)}
    waiting = deque((cell, 1) for cell in cells if cell.name not in found)
    attempts: dict[str, int] = {}
    if found and waiting:
        listener.say(f"{len(found)} of {len(cells)} are done already")
    while waiting or attempts:
        while waiting and pool.has_room:
            cell, attempt = waiting.popleft()
            attempts[cell.name] = attempt
            listener.say(f"{cell.name}: {cell.kind}" + (f", attempt {attempt}" if attempt > 1 else ""))
            pool.start(cell)
        cell, failure = pool.ended()
        attempt = attempts.pop(cell.name)
        if failure is not None and not failure.final and attempt <= retries:
            listener.say(f"{cell.name}: failed, and is tried again: {failure.error}")
            waiting.append((cell, attempt + 1))
            continue
        found[cell.name] = Outcome(cell, failure, attempt)
        how = "done" if failure is None else f"failed: {failure.error}"
        listener.say(f"{cell.name}: {how} ({len(found)} of {len(cells)})")
    return [found[cell.name] for cell in cells]


def started_by_a_launcher() -> list[str]:
    """The fault that several processes were started where one starts all others; none if it is so."""
    if Processes.joined().count == 1:
        return []
    return ["started in several processes; start one, without a launcher, and pass jobs or ray_address"]


@contextmanager
def closing(pool: Pool) -> Iterator[Pool]:
    """The pool, which is closed however the block ends."""
    try:
        yield pool
    finally:
        pool.close()


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
