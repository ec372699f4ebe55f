"""How long exported files take for a batch, side by side, in any runtimes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from basisprune.deploy.export.facts import GraphInput
from basisprune.deploy.export.interface import Runtime
from basisprune.deploy.latency import Latency, Seconds, interleaved, latency_rows, limited_threads, ready_eager
from basisprune.transfer.model import spec_of

PYTORCH = "PyTorch"


@dataclass(frozen=True)
class Timed:
    """The median milliseconds for one image, and the range of their middle half."""

    milliseconds: float
    spread: float


def time_files(files: Mapping[str, tuple[Runtime, Path]], eager: nn.Module, *, repeats: int = 30) -> dict[str, Timed]:
    """How long one image takes on one thread in each file and, as "PyTorch", in the network; all take turns."""
    found = seconds_of(files, eager, repeats=repeats)
    return {name: _timed(values) for name, values in found.items()}


def seconds_of(
    files: Mapping[str, tuple[Runtime, Path]], eager: nn.Module | None = None, *, repeats: int, threads: int = 1
) -> Seconds:
    """The seconds of one image in each file and round, and of the network in eager PyTorch if there is one.

    Files that prepare their images do so within that time. With one thread the CPU time of the process is taken, which
    a busy machine does not change; runtimes have threads of their own, so that of one thread would say nothing. Each
    turn starts with runs that are not timed, so that a network finds the caches as it leaves them itself.
    """
    runs: dict[str, Callable[[], object]] = {}
    with limited_threads(threads):
        for name, (runtime, path) in files.items():
            run, image = runtime.open(path, threads), random_images(runtime.facts(path).input, 1)
            runs[name] = partial(run, image)
        if eager is not None:
            shape = spec_of(eager).shape
            runs[PYTORCH] = ready_eager(eager, shape, threads)(torch.randn(1, *shape))
        return interleaved(runs, repeats=repeats, settle=2, now=_clock(threads))


def measure_files(
    files: Mapping[str, Path], runtime: Runtime, *, batch_sizes: Sequence[int], repeats: int, threads: int = 1
) -> list[Latency]:
    """The latency of each file in one runtime at each batch size; `speedup` is over the first."""
    rows: list[Latency] = []
    with limited_threads(threads):
        opened = {name: (runtime.open(path, threads), runtime.facts(path).input) for name, path in files.items()}
        for size in batch_sizes:
            runs = {name: partial(run, random_images(wanted, size)) for name, (run, wanted) in opened.items()}
            seconds = interleaved(runs, repeats=repeats, settle=1, now=_clock(threads))
            rows += latency_rows("onnxruntime" if runtime.name == "onnx" else runtime.name, size, seconds)
    return rows


def random_images(wanted: GraphInput, count: int) -> NDArray[np.generic]:
    """A batch of noise of the kind that a file takes."""
    dice, spec = np.random.default_rng(0), wanted.spec
    if not wanted.prepares:
        return dice.standard_normal((count, *spec.shape), dtype=np.float32)
    shape = (*spec.size, spec.channels) if wanted.layout == "NHWC" else spec.shape
    return dice.integers(0, 256, (count, *shape), dtype=np.uint8)


def _clock(threads: int) -> Callable[[], float]:
    return time.process_time if threads == 1 else time.perf_counter


def _timed(seconds: Sequence[float]) -> Timed:
    low, _, high = statistics.quantiles(seconds, n=4)
    return Timed(1000 * statistics.median(seconds), 1000 * (high - low))
