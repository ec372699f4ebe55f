"""Where cells run on a Ray cluster; the folder of the output must be one that all its machines share."""

from __future__ import annotations

import warnings
from importlib import import_module
from types import ModuleType
from typing import Any

from basisprune.errors import ConfigError, MissingExtraError
from basisprune.sweeps.cells import Cell, Failure
from basisprune.sweeps.running import Running

LOCAL = "local"
_SMALL_STORE = 100 << 20  # cells are given by name, so that hardly anything is stored


class OnRay:
    """Runs cells as Ray tasks, each in a worker process of its own, with the resources that it asks for.

    Raises MissingExtraError without Ray, and ConfigError where there is no cluster at the address.
    """

    def __init__(self, running: Running) -> None:
        self._ray, self._running = require_ray(), running
        self._owned = not self._ray.is_initialized()
        if self._owned:
            _connect(self._ray, running)
        self._at_work: dict[Any, Cell] = {}
        needs = running.resources
        task = self._ray.remote(max_retries=0, max_calls=1)(_on_node)
        self._task = task.options(num_cpus=running.threads, num_gpus=needs.gpus, memory=needs.memory)

    @property
    def has_room(self) -> bool:
        """Always: the cluster lets cells wait for what they need."""
        return True

    def start(self, cell: Cell) -> None:
        """Hands the cell to the cluster."""
        self._at_work[self._task.remote(cell.to_json(), self._running.threads)] = cell

    def ended(self) -> tuple[Cell, Failure | None]:
        """Waits for one to end; a worker or machine that died is a failure."""
        (first, *_), _ = self._ray.wait(list(self._at_work), num_returns=1)
        cell = self._at_work.pop(first)
        try:
            said = self._ray.get(first)
        except self._ray.exceptions.RayError as error:
            return cell, Failure(f"its Ray worker died: {str(error).splitlines()[0]}")
        return cell, None if said is None else Failure.from_json(said)

    def close(self) -> None:
        """Cancels what still runs, and leaves the cluster, or ends it if it was started here."""
        for task in self._at_work:
            self._ray.cancel(task, force=True)
        self._at_work.clear()
        if self._owned:
            self._ray.shutdown()


def require_ray() -> ModuleType:
    """The package; raises MissingExtraError that names the extra."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # of Ray's own future defaults
            return import_module("ray")
    except ModuleNotFoundError as error:
        raise MissingExtraError("ray", extra="ray") from error


def _connect(ray: ModuleType, running: Running) -> None:
    quiet = {"log_to_driver": False, "logging_level": "warning"}
    try:
        if running.ray_address == LOCAL:
            cpus = running.jobs * running.threads
            ray.init(num_cpus=cpus, include_dashboard=False, object_store_memory=_SMALL_STORE, **quiet)
        else:
            ray.init(address=running.ray_address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"ray_address: {running.ray_address!r} given; no Ray cluster answers there ({error}); start one with "
            f"`ray start --head`, or pass {LOCAL!r}"
        ) from error


def _on_node(text: str, threads: int) -> str | None:
    """What went wrong with a cell, as JSON; None if it was done. Runs in a worker of the cluster."""
    from basisprune.sweeps.worker import perform_logged

    try:
        perform_logged(Cell.from_json(text), threads)
    except Exception as error:
        return Failure.of(error).to_json()
    return None
