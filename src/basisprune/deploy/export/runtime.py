"""A runtime as a value, and the files that it runs: as networks, and bounded in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from basisprune.deploy.export import sandboxed
from basisprune.deploy.export.exportable import Exportable, GraphInput, PixelLayout, read_classes, read_input
from basisprune.deploy.export.sandboxed import Array, Opened
from basisprune.errors import LayerError, MissingExtraError, ModelError, pass_on
from basisprune.torchkit.imports import folder_of_python
from basisprune.torchkit.running import mode, placed
from basisprune.types import InputSpec

_T = TypeVar("_T")
_BATCH = 16  # images at a time, so that large batches need no more memory than small ones
_LEAST_BYTES, _TIMES_FILE = 4 << 30, 4  # of memory, and as many times the size of the file beside it
_START, _READ = 60, 20 << 20  # seconds to start, and bytes read in each one more
_LEAST, _TIMES_SLOWEST = 60, 10  # seconds for a batch, and as many times what its images took before


@dataclass(frozen=True)
class Runtime:
    """One runtime and the format of its files.

    The extra of its name has its `packages`. `suffixes` are those of all files that belong together, that of the one
    to open first. `write` gets the path of that one in an empty folder; `open` gets it with the number of threads, and
    gives the notes of the `Exportable` back, with the function that runs batches. `quantise`, where there is 8-bit
    arithmetic, makes an int8 file of a float one from batches of inputs. `locate` finds the layer that differs.
    Outputs may differ from PyTorch's by the share `tolerance` of the largest.
    """

    name: str
    title: str
    what: str
    packages: tuple[str, ...]
    suffixes: tuple[str, ...]
    write: Callable[[Exportable, Path], object]
    open: Callable[[Path, int], Opened]
    quantise: Callable[[Path, Path, Sequence[Tensor]], object] | None = None
    locate: Callable[[Exportable, Tensor, float], LayerError] | None = None
    takes_pixels: bool = True
    takes_batches: bool = True
    tolerance: float = 1e-4

    @property
    def is_installed(self) -> bool:
        return all(find_spec(package) is not None for package in self.packages)

    @property
    def is_data(self) -> bool:
        """Whether its files are data, which may be anybody's; others may run code when they are read."""
        return self.name in sandboxed.OPENERS

    def require(self) -> None:
        """Raise MissingExtraError for the first of its packages that is not installed."""
        for package in self.packages:
            if find_spec(package) is None:
                raise MissingExtraError(package, extra=self.name)

    def layout(self, *, prepared: bool) -> PixelLayout | None:
        """The layout of the pixels that its files take, None for prepared images."""
        return "NHWC" if self.takes_pixels and not prepared else None

    def files(self, stem: str = "model") -> tuple[str, ...]:
        """The names of the files that belong together, the one to open first."""
        return tuple(f"{stem}{suffix}" for suffix in self.suffixes)

    @contextmanager
    def errors(self, where: object) -> Iterator[None]:
        """Turn whatever the runtime raises into a ModelError that says where."""
        try:
            yield
        except ModelError:
            raise
        except Exception as error:  # runtimes raise errors of their own kinds
            pass_on(error, where)
            reason = " ".join(str(error).split())[:500]
            raise ModelError(f"{where}: {self.title} cannot take it ({type(error).__name__}: {reason})") from error


class FileModel(nn.Module):
    """An exported file, run on the CPU, as a network for images that are prepared by its `input_spec`.

    Files of data run in a process of their own, bounded in memory and time, unless they are `trusted`. Of a file with
    several outputs, `like` is the network that it was made from, which tells how they are nested.
    """

    def __init__(
        self,
        path: Path,
        runtime: Runtime,
        threads: int | None = None,
        *,
        like: nn.Module | None = None,
        trusted: bool = False,
    ) -> None:
        super().__init__()
        runtime.require()
        self.path, self.runtime = path, runtime
        with runtime.errors(path):
            opened = runtime.open if trusted or not runtime.is_data else partial(Sandbox.opened, runtime)
            self.notes, self.run = opened(path, threads or torch.get_num_threads())
        self.structure: TreeSpec | None = None
        self.like = () if like is None else (like,)  # in a tuple, so that it is no part of this network
        # A parameter, because callers look for a network's device there.
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)

    @cached_property
    def input(self) -> GraphInput:
        """What the file takes; raises ModelError where it does not say it."""
        return read_input(self.path, self.notes)

    @property
    def input_spec(self) -> InputSpec:
        return self.input.outside

    @property
    def classes(self) -> tuple[str, ...] | None:
        return read_classes(self.path, self.notes)

    def forward(self, images: Tensor) -> Any:
        found = [output.to(images.device) for output in self.outputs(self.input.taken(images))]
        if self.like and self.structure is None:
            self.structure = _structure(self.like[0], images)
        return found[0] if self.structure is None else tree_unflatten(found, self.structure)

    def outputs(self, batch: Tensor) -> list[Tensor]:
        """Compute the outputs for a batch of what the file takes, one by one where the runtime takes no batches."""
        inputs = np.ascontiguousarray(batch.cpu().numpy())
        with self.runtime.errors(inputs.shape):
            parts = [inputs] if self.runtime.takes_batches else np.split(inputs, len(inputs))
            found = zip(*(self.run(part) for part in parts), strict=True)
            return [torch.from_numpy(np.concatenate(each) if len(each) > 1 else each[0]) for each in found]


def _structure(like: nn.Module, inputs: Tensor) -> TreeSpec:
    with mode(like, training=False):
        leaves, structure = tree_flatten(like(placed(inputs[:1], like)))
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        raise ModelError(f"{type(like).__name__} outputs other things than tensors, which no file has")
    return structure


class Sandbox:
    """One file in a process of its own: `notes` is its metadata, and a call gives the scores of a batch.

    Raises ModelError for a file that its runtime cannot take, and for one that asks for too much memory or time.
    """

    def __init__(self, path: Path, runtime: Runtime, threads: int) -> None:
        self._title, self._path, self._slowest = runtime.title, path, 0.0
        names = runtime.files(path.name.removesuffix(runtime.suffixes[0]))
        size = sum(path.with_name(name).stat().st_size for name in names)
        self._most, seconds = _LEAST_BYTES + _TIMES_FILE * size, _START + size // _READ
        words = [runtime.name, str(path.absolute()), str(threads), str(self._most), str(seconds)]
        command = [sys.executable, "-P", str(Path(sandboxed.__file__)), *words]  # no module beside it shadows another
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, cwd=folder_of_python()
        )
        weakref.finalize(self, _end, self._process)
        notes = self._within(seconds, "to be opened", self._line).get("notes")
        self.notes = {str(name): str(text) for name, text in notes.items()} if isinstance(notes, dict) else {}

    @classmethod
    def opened(cls, runtime: Runtime, path: Path, threads: int) -> Opened:
        sandbox = cls(path, runtime, threads)
        return sandbox.notes, sandbox

    def __call__(self, batch: Array) -> list[Array]:
        first = 0 if self._slowest else 1  # a single image at first, to see how long it takes
        starts = [0] * first + list(range(first, len(batch), _BATCH))
        ends = [*starts[1:], len(batch)]
        return [np.concatenate([self._scores(batch[start:end]) for start, end in zip(starts, ends, strict=True)])]

    def _scores(self, batch: Array) -> Array:
        seconds = round(_LEAST + _TIMES_SLOWEST * len(batch) * self._slowest)
        started = time.monotonic()

        def exchange() -> Array:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            sandboxed.send(self._process.stdin, batch, seconds=seconds)
            return sandboxed.receive(self._process.stdout, self._line())

        scores = self._within(seconds, f"for {len(batch)} images", exchange)
        self._slowest = max(self._slowest, (time.monotonic() - started) / len(batch))
        return scores

    def _line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        answer: dict[str, Any] = json.loads(self._process.stdout.readline(2 * sandboxed.MOST_NOTES))
        if "error" in answer:
            reason = f"{self._title} cannot take it ({answer['error']})"
            raise ModelError(f"{self._path}: {reason}; export it again ({self._limits})")
        return answer

    def _within(self, seconds: float, what: str, work: Callable[[], _T]) -> _T:
        """Return the result of the work; after this many seconds, end the process, which ends the work too."""
        timer, started = threading.Timer(seconds, self._process.kill), time.monotonic()
        timer.daemon = True
        timer.start()
        try:
            return work()
        except ModelError:
            raise
        except (OSError, EOFError, ValueError) as error:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            _end(self._process)
            reason = f"{self._title} ended with code {self._process.returncode}"
            if time.monotonic() - started >= seconds:
                reason = f"it takes {self._title} more than {seconds:.0f} seconds {what}"
            raise ModelError(f"{self._path}: {reason} ({self._limits}); do not use it, or export it again") from error
        finally:
            timer.cancel()

    @property
    def _limits(self) -> str:
        return f"files run in at most {self._most / (1 << 30):.1f} GB"


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what was to be sent has nowhere to go
                pipe.close()
