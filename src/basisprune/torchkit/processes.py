"""The processes that share a run, as `accelerate launch` and `torchrun` start them; a process by itself is all of them.

Each sees its part of the images. What they find is summed, the main one decides, writes and informs the others.
Below are those that load images for one of them.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import chain
from multiprocessing import get_context, resource_tracker
from multiprocessing.context import BaseContext, SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn

from basisprune.errors import BasisPruneError, ProcessError
from basisprune.torchkit.imports import in_folder_of_python

_PATIENCE = timedelta(days=7)  # while the main one works alone; one that has died is noticed at once all the same
_MMAP_THRESHOLD, _LARGE = -3, 1 << 14  # a setting of glibc's malloc, and bytes
_DONE, _FAILED = b"+", b"-"
_alone: ContextVar[bool] = ContextVar("alone", default=False)
Item = TypeVar("Item")


@dataclass(frozen=True)
class Processes:
    """How many processes share the work, and which of them this is; the first one is the main one.

    >>> one = Processes()
    >>> one.is_main, one.share([1, 2, 3]), one.from_main(lambda: b"plan")
    (True, [1, 2, 3], b'plan')
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def here(cls) -> Processes:
        if _alone.get() or not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @classmethod
    def joined(cls) -> Processes:
        """The same, after the processes that a launcher started with this one have found each other."""
        if not _alone.get():
            was_joined = dist.is_available() and dist.is_initialized()
            with answering():
                PartialState()
            if dist.is_available() and dist.is_initialized() and not was_joined:
                _messages()  # made now, because one that has died could not take part
                atexit.register(_leave)
        return cls.here()

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: list[Item]) -> list[Item]:
        """This process's part of the items; all of them where there are too few for each to have one."""
        return items[self.rank :: self.count] if len(items) >= self.count else items

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of the processes' tensors, the same in each."""
        if self.count == 1:
            return tensor
        total = _sendable(tensor.clone())
        with answering():
            dist.all_reduce(total)
        return total.to(tensor.device)

    def total(self, number: int) -> int:
        return number if self.count == 1 else int(self.sum(torch.tensor(number, dtype=torch.int64)))

    def agree(self, model: nn.Module) -> nn.Module:
        """The same model, with the weights and statistics of the main process."""
        if self.count > 1:
            with answering(), torch.no_grad():
                for tensor in chain(model.parameters(), model.buffers()):
                    sent = _sendable(tensor.detach().contiguous())
                    dist.broadcast(sent, 0)
                    tensor.copy_(sent)
        return model

    def from_main(self, work: Callable[[], bytes]) -> bytes:
        """What the work gives, which the main process does by itself; its errors end the others too."""
        if self.count == 1:
            return work()
        if not self.is_main:
            told = _told(b"")
            if told[:1] == _FAILED:
                raise ProcessError(f"the main process has ended: {told[1:].decode()}")
            return told[1:]
        try:
            with _by_itself():
                content = work()
        except BaseException as error:
            said = str(error) if isinstance(error, BasisPruneError) else f"{type(error).__name__}: {error}"
            _told(_FAILED + said.encode(errors="backslashreplace"))
            raise
        _told(_DONE + content)
        return content

    def on_main(self, work: Callable[[], object]) -> None:
        self.from_main(lambda: (work(), b"")[1])

    def wait(self) -> None:
        self.total(0)


@contextmanager
def _by_itself() -> Iterator[None]:
    """What runs inside does not wait for other processes."""
    token = _alone.set(True)
    try:
        yield
    finally:
        _alone.reset(token)


@contextmanager
def answering() -> Iterator[None]:
    """Turns the errors of a process whose others do not answer into a ProcessError."""
    try:
        yield
    except RuntimeError as error:
        if not is_about_others(error):
            raise
        raise ProcessError(
            f"another process of this run has ended or does not answer ({str(error)[:200]}); see what it said, and "
            "start the run again: it resumes from its output folder"
        ) from error


def is_about_others(error: RuntimeError) -> bool:
    """Whether the error says that another process has gone: Gloo has no type for it, and names itself instead."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _sendable(tensor: Tensor) -> Tensor:
    """The tensor on the device of this process: NCCL and its like exchange nothing else."""
    return tensor.to(PartialState().device)


def _told(content: bytes) -> bytes:
    """What the main process says, in all processes; bytes and not objects, because nothing is unpickled."""
    size = torch.tensor(len(content), dtype=torch.int64)
    with answering():
        group = _messages()
        dist.broadcast(size, 0, group)
        letters = torch.frombuffer(bytearray(content or bytes(int(size))), dtype=torch.uint8)
        dist.broadcast(letters, 0, group)
    return letters.numpy().tobytes()


@cache
def _messages() -> dist.ProcessGroup:
    """Connections for messages, over which one waits as long as the main process is busy."""
    group = dist.new_group(backend="gloo", timeout=_PATIENCE)
    assert isinstance(group, dist.ProcessGroup)  # of which every process is a member
    return group


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- those that load images


class _WorkerProcess(SpawnProcess):
    """Begins in Python's own folder, where it imports what it needs before this package can tell it where to."""

    @staticmethod
    def _Popen(process: BaseProcess) -> Any:  # noqa: N802
        with in_folder_of_python():
            return SpawnProcess._Popen(process)


class WorkerContext(SpawnContext):
    """Start such processes."""

    Process = _WorkerProcess


def worker_context() -> BaseContext:
    """Return how to start processes that load images: copies on Linux; elsewhere, where these may crash, new ones."""
    if sys.platform == "linux":
        return get_context("fork")
    if os.name == "posix":
        with in_folder_of_python():  # or the first lock would begin this process of Python's in the current folder
            resource_tracker.ensure_running()
    return WorkerContext()


def prepare_worker(folder: str, _worker: int) -> None:
    """Go to the folder, and keep the memory of this process small."""
    os.chdir(folder)
    gc.freeze()  # a collection would write to all objects that it was forked with, and so copy them
    if platform.libc_ver()[0] == "glibc":
        # Its heap would grow by half of every image, in pieces that fit nothing; so large blocks go back at once.
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)
