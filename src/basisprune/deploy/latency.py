"""How long models and exported files take on this machine, side by side: numbers, no formatting."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from basisprune.deploy.export.exportable import GraphInput
from basisprune.deploy.export.onnx import ONNX, layer_protos, open_session, to_proto
from basisprune.deploy.export.runtime import FileModel, Runtime
from basisprune.deploy.export.sandboxed import fed
from basisprune.errors import ConfigError
from basisprune.transfer.model import known_spec, spec_of
from basisprune.types import JsonValue

Backend: TypeAlias = Literal["eager", "onnxruntime"]
Seconds: TypeAlias = dict[str, list[float]]
Run: TypeAlias = Callable[[], object]

PYTORCH = "PyTorch"


@dataclass(frozen=True)
class Latency:
    """One model in one setting: the median seconds for one batch and the range of their middle half.

    `speedup` is how many times faster than the first model it is, the median over all rounds.
    """

    model: str
    backend: str
    batch_size: int
    seconds: float
    spread: float
    speedup: float


@dataclass(frozen=True)
class LatencyReport(JsonValue):
    """The latency of every model in every setting, on this many CPU threads, from this many rounds.

    `clock` is "cpu" for the CPU time of the one thread, "wall" for the time that passed.
    """

    rows: tuple[Latency, ...]
    input_shape: tuple[int, ...]
    threads: int
    repeats: int
    clock: str

    def row(self, model: str, backend: Backend, batch_size: int) -> Latency:
        """Return the row of this setting; raises KeyError where it was not measured."""
        for row in self.rows:
            if (row.model, row.backend, row.batch_size) == (model, backend, batch_size):
                return row
        raise KeyError((model, backend, batch_size))


def measure_latency(
    models: Mapping[str, nn.Module],
    input_shape: Sequence[int] | None = None,
    *,
    batch_sizes: Sequence[int] = (1, 32),
    backends: Sequence[Backend] = ("eager", "onnxruntime"),
    threads: int = 1,
    repeats: int = 20,
) -> LatencyReport:
    """Measure the latency of each model on the CPU.

    The models take turns, so that what else the machine does disturbs all of them alike: trust the ratios more than the
    seconds. With one thread its CPU time is taken, the latency on a machine that does nothing else; with more, the time
    that passes. Eager PyTorch runs in channels_last and inference mode; onnxruntime runs what torch's exporter makes of
    the model, with a dynamic batch.

    Args:
        models: The models by name, which are copied, and not changed.
        input_shape: That of one input without the batch, by default what the first model's `input_spec` says.
        batch_sizes: How many inputs at a time.
        backends: What runs the models.
        threads: CPU threads.
        repeats: Rounds, in each of which every model runs once.

    Raises:
        ConfigError: For wrong settings.
        MissingExtraError: Without onnxruntime where it is asked for.

    >>> report = measure_latency({"a": nn.Conv2d(3, 8, 3)}, (3, 8, 8), backends=["eager"], repeats=3)
    >>> [(row.batch_size, row.speedup) for row in report.rows]
    [(1, 1.0), (32, 1.0)]
    """
    _check_settings(models, batch_sizes, backends, threads, repeats)
    first = next(iter(models.values()))
    spec = known_spec(first)
    if input_shape is None and spec is None:
        fault = f"{type(first).__name__} does not know it; pass that of one input, such as (3, 224, 224)"
        raise ConfigError.of("measure_latency", [f"input_shape: {fault}"])
    shape = spec.shape if input_shape is None and spec is not None else tuple(input_shape or ())
    rows: list[Latency] = []
    with _limited_threads(threads):
        for backend in backends:
            make = _eager if backend == "eager" else partial(_onnxruntime, shape=shape, threads=threads)
            ready = {name: make(model) for name, model in models.items()}
            for batch_size in batch_sizes:
                images = torch.randn(batch_size, *shape, generator=torch.Generator().manual_seed(0))
                runs = {name: run_on(images) for name, run_on in ready.items()}
                rows += _rows(backend, batch_size, interleaved(runs, repeats=repeats))
        clock = "cpu" if stopwatch() is time.thread_time else "wall"
    return LatencyReport(tuple(rows), shape, threads, repeats, clock)


def file_seconds(
    files: Mapping[str, tuple[Runtime, Path]],
    eager: nn.Module | None = None,
    *,
    batch_size: int = 1,
    repeats: int = 30,
    threads: int = 1,
) -> Seconds:
    """Measure the seconds of a batch in each exported file and, as "PyTorch", in the network, round by round.

    Files that prepare their images do so within that time. With one thread the CPU time of the process is taken, which
    a busy machine does not change; runtimes have threads of their own, so that of one thread would say nothing. Each
    turn starts with runs that are not timed, so that a network finds the caches as it leaves them itself.
    """
    runs: dict[str, Run] = {}
    with _limited_threads(threads):
        for name, (runtime, path) in files.items():
            file = FileModel(path, runtime, threads, trusted=True)
            runs[name] = partial(file.run, random_images(file.input, batch_size).numpy())
        if eager is not None:
            runs[PYTORCH] = _eager(eager)(torch.randn(batch_size, *spec_of(eager).shape))
        return interleaved(runs, repeats=repeats, settle=2, now=time.process_time if threads == 1 else None)


def file_latencies(
    files: Mapping[str, tuple[Runtime, Path]],
    eager: nn.Module | None = None,
    *,
    batch_sizes: Sequence[int] = (1,),
    repeats: int = 30,
    threads: int = 1,
) -> list[Latency]:
    """Measure the latency of exported files as `file_seconds` does; `speedup` is over the first."""
    rows = []
    for size in batch_sizes:
        seconds = file_seconds(files, eager, batch_size=size, repeats=repeats, threads=threads)
        backends = {name: "onnxruntime" if runtime is ONNX else runtime.name for name, (runtime, _) in files.items()}
        rows += [replace(row, backend=backends.get(row.model, "eager")) for row in _rows("", size, seconds)]
    return rows


def random_images(wanted: GraphInput, count: int) -> Tensor:
    """Make a batch of noise of the kind that a file takes."""
    dice = torch.Generator().manual_seed(0)
    if wanted.layout is None:
        return torch.randn(count, *wanted.shape, generator=dice)
    return torch.randint(0, 256, (count, *wanted.shape), dtype=torch.uint8, generator=dice)


def stopwatch() -> Callable[[], float]:
    """Return the clock to use: the CPU time of the thread if torch uses only one, else the time that passes.

    A busy machine interrupts long runs more often than short ones, which makes ratios of passing time too good.
    """
    is_fine = time.get_clock_info("thread_time").resolution < 1e-6
    return time.thread_time if is_fine and torch.get_num_threads() == 1 else time.perf_counter


def interleaved(
    runs: Mapping[str, Run],
    *,
    repeats: int,
    warmup: int = 2,
    settle: int = 0,
    now: Callable[[], float] | None = None,
) -> Seconds:
    """Measure the seconds of each run in every round; the runs take turns, so that noise disturbs all alike.

    Each turn begins with `settle` runs that are not timed, for what has a steady state of its own: memory that the
    run before left in another shape has to be fetched again. `now` tells the time, by default that of `stopwatch`.

    >>> {name: len(values) for name, values in interleaved({"nothing": lambda: None}, repeats=3).items()}
    {'nothing': 3}
    """
    seconds: Seconds = {name: [] for name in runs}
    now = now or stopwatch()
    for round_ in range(warmup + repeats):
        for name, run in runs.items():
            for _ in range(settle):
                run()
            start = now()
            run()
            if round_ >= warmup:
                seconds[name].append(now() - start)
    return seconds


class LayerTimer:
    """Runs a model and takes the time of some of its layers, over all their calls of a run.

    >>> timer = LayerTimer(nn.Sequential(nn.ReLU()), ["0"])
    >>> timer.run(torch.zeros(1))
    >>> timer.seconds("0") > 0
    True
    """

    def __init__(self, model: nn.Module, layers: Iterable[str]) -> None:
        self.model = model
        self._now = stopwatch()
        self._starts: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        self._runs: dict[str, list[float]] = {name: [] for name in layers}
        for name in self._runs:
            layer = model.get_submodule(name)
            layer.register_forward_pre_hook(partial(self._start, name))
            layer.register_forward_hook(partial(self._stop, name))

    def run(self, *inputs: object) -> None:
        self._sums = dict.fromkeys(self._runs, 0.0)
        self.model(*inputs)
        for name, seconds in self._sums.items():
            self._runs[name].append(seconds)

    def seconds(self, layer: str) -> float:
        """The median of the runs so far."""
        return statistics.median(self._runs[layer])

    def _start(self, name: str, *_: object) -> None:
        self._starts[name] = self._now()

    def _stop(self, name: str, *_: object) -> None:
        self._sums[name] += self._now() - self._starts[name]


def speedup(seconds: Seconds, slow: str, fast: str) -> float:
    """How many times faster `fast` is than `slow`: the median over the rounds."""
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def in_channels_last(model: nn.Module) -> nn.Module:
    """Return a copy of the model in eval mode, with the weights of its 2d and 3d convs in channels_last."""
    result = copy.deepcopy(model).eval()
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in result.parameters():
        if parameter.dim() in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.dim()])
    return result


def onnx_session(model: nn.Module, input_shape: tuple[int, ...], threads: int) -> Any:
    """Open an onnxruntime session for the model with a dynamic batch; raises MissingExtraError without onnxruntime."""
    ONNX.require()
    proto = to_proto(copy.deepcopy(model).cpu().eval(), torch.zeros(2, *input_shape))
    return open_session(proto.SerializeToString(), threads)


def onnx_layer_seconds(
    forms: Mapping[str, Sequence[nn.Module]], shapes: Mapping[str, tuple[int, ...]], repeats: int
) -> dict[str, list[float]]:
    """Measure the median seconds of all forms of each layer in onnxruntime, on an input of the layer's shape.

    All take turns, so that each finds its weights outside the caches, as it does in the network. What it takes to
    bring one layer's input and output into onnxruntime's own memory format is in the times of all its forms.

    >>> onnx_layer_seconds({}, {}, repeats=3)
    {}
    """
    ONNX.require()
    order = [(name, form) for name, listed in forms.items() for form in listed]
    if not order:
        return {}
    layers = [copy.deepcopy(form).float().cpu() for _, form in order]
    inputs = [torch.randn(shapes[name], generator=torch.Generator().manual_seed(0)) for name, _ in order]
    runs: dict[str, Run] = {}
    for place, (proto, features) in enumerate(zip(layer_protos(layers, inputs), inputs, strict=True)):
        session = open_session(proto.SerializeToString(), torch.get_num_threads())
        runs[str(place)] = partial(session.run, None, {session.get_inputs()[0].name: features.numpy()})
    medians = map(statistics.median, interleaved(runs, repeats=repeats).values())
    found: dict[str, list[float]] = {name: [] for name in forms}
    for (name, _), seconds in zip(order, medians, strict=True):
        found[name].append(seconds)
    return found


def _eager(model: nn.Module) -> Callable[[Tensor], Run]:
    twin = in_channels_last(model).cpu()

    def run_on(images: Tensor) -> Run:
        batch = images.contiguous(memory_format=torch.channels_last) if images.dim() == 4 else images
        return torch.inference_mode()(partial(twin, batch))

    return run_on


def _onnxruntime(model: nn.Module, shape: tuple[int, ...], threads: int) -> Callable[[Tensor], Run]:
    session = onnx_session(model, shape, threads)
    return lambda images: partial(session.run, None, fed(session, images.numpy()))


def _rows(backend: str, batch_size: int, seconds: Seconds) -> list[Latency]:
    """One row for each run, compared with the first."""
    first, rows = next(iter(seconds)), []
    for name, values in seconds.items():
        low, _, high = statistics.quantiles(values, n=4)
        middle = statistics.median(values)
        rows.append(Latency(name, backend, batch_size, middle, high - low, speedup(seconds, first, name)))
    return rows


@contextmanager
def _limited_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _check_settings(
    models: Mapping[str, nn.Module], batch_sizes: Sequence[int], backends: Sequence[str], threads: int, repeats: int
) -> None:
    faults = []
    if not models:
        faults.append("models: none given; pass a dict such as {'original': model, 'pruned': pruned}")
    if not batch_sizes or min(batch_sizes) < 1:
        faults.append(f"batch_sizes: {tuple(batch_sizes)} given; at least one is needed, each at least 1")
    known = get_args(Backend)
    faults += [f"backends: {name!r} given; allowed are {known}" for name in backends if name not in known]
    if threads < 1:
        faults.append(f"threads: {threads} given; at least 1 is needed")
    if repeats < 2:
        faults.append(f"repeats: {repeats} given; at least 2 are needed for a spread")
    if faults:
        raise ConfigError.of("measure_latency", faults)
