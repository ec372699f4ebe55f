"""How long models take on this machine, side by side: numbers, no formatting."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from basisprune.errors import ConfigError
from basisprune.transfer.model import known_spec
from basisprune.types import JsonValue

if TYPE_CHECKING:
    from basisprune.deploy.export.runtime import Session

Backend: TypeAlias = Literal["eager", "onnxruntime"]
Seconds: TypeAlias = dict[str, list[float]]


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
        """The one row of this setting; raises KeyError where it was not measured."""
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
    """The latency of each model on the CPU, for batches of inputs of `input_shape`, without the batch.

    By default that is what the first model's `input_spec` says. The models take turns, so that what else the
    machine does disturbs all of them alike: trust the ratios more than the seconds. With one thread its CPU time
    is taken, the latency on a machine that does nothing else; with more, the time that passes. Eager PyTorch runs
    in channels_last and inference mode; onnxruntime runs what torch's exporter makes of the model, with a dynamic
    batch. The models are copied, and not changed.

    Raises ConfigError for wrong settings, MissingExtraError without onnxruntime where it is asked for.

    >>> report = measure_latency({"a": nn.Conv2d(3, 8, 3)}, (3, 8, 8), backends=["eager"], repeats=3)
    >>> [(row.batch_size, row.speedup) for row in report.rows]
    [(1, 1.0), (32, 1.0)]
    """
    _check_settings(models, batch_sizes, backends, threads, repeats)
    shape = _shape(models, input_shape)
    rows: list[Latency] = []
    with limited_threads(threads):
        for backend in backends:
            ready = {name: _READY[backend](model, shape, threads) for name, model in models.items()}
            for batch_size in batch_sizes:
                images = torch.randn(batch_size, *shape, generator=torch.Generator().manual_seed(0))
                runs = {name: make(images) for name, make in ready.items()}
                seconds = interleaved(runs, repeats=repeats)
                rows += latency_rows(backend, batch_size, seconds)
        clock = "cpu" if stopwatch() is time.thread_time else "wall"
    return LatencyReport(tuple(rows), shape, threads, repeats, clock)


def stopwatch() -> Callable[[], float]:
    """What to take times by: the CPU time of the thread if torch uses only one, else the time that passes.

    A busy machine interrupts long runs more often than short ones, which makes ratios of passing time too good.
    """
    is_fine = time.get_clock_info("thread_time").resolution < 1e-6
    return time.thread_time if is_fine and torch.get_num_threads() == 1 else time.perf_counter


def interleaved(
    runs: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 2,
    settle: int = 0,
    now: Callable[[], float] | None = None,
) -> Seconds:
    """The seconds of each run in every round; the runs take turns, so that a noisy machine disturbs all alike.

    Each turn begins with `settle` runs that are not timed, for what has a steady state of its own: memory that the
    run before left in another shape has to be fetched anew. `now` tells the time, by default that of `stopwatch`.

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
        """Runs the model once more."""
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
    """A copy of the model in eval mode, with the weights of its 2d and 3d convs in channels_last."""
    result = copy.deepcopy(model).eval()
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    for parameter in result.parameters():
        if parameter.dim() in formats:
            parameter.data = parameter.data.contiguous(memory_format=formats[parameter.dim()])
    return result


def onnx_session(model: nn.Module, input_shape: tuple[int, ...], threads: int) -> Session:
    """An onnxruntime session for the model with a dynamic batch; raises MissingExtraError without onnxruntime."""
    runtime = _onnx_runtime()
    proto = runtime.to_proto(copy.deepcopy(model).cpu().eval(), torch.zeros(2, *input_shape))
    session: Session = runtime.open_session(proto.SerializeToString(), threads)
    return session


def onnx_layer_seconds(
    forms: Mapping[str, Sequence[nn.Module]], shapes: Mapping[str, tuple[int, ...]], repeats: int
) -> dict[str, list[float]]:
    """The median seconds of all forms of each layer on its own in onnxruntime, on an input of the layer's shape.

    All take turns, so that each finds its weights outside the caches, as it does in the network. What it takes to
    bring one layer's input and output into onnxruntime's own memory format is in the times of all its forms.

    >>> onnx_layer_seconds({}, {}, repeats=3)
    {}
    """
    runtime = _onnx_runtime()
    order = [(name, index) for name, listed in forms.items() for index in range(len(listed))]
    if not order:
        return {}
    layers = [copy.deepcopy(forms[name][index]).float().cpu() for name, index in order]
    inputs = [torch.randn(shapes[name], generator=torch.Generator().manual_seed(0)) for name, _ in order]
    sessions = [
        runtime.open_session(proto.SerializeToString(), torch.get_num_threads())
        for proto in runtime.layer_protos(layers, inputs)
    ]
    runs = {
        str(place): partial(session.run, None, {session.get_inputs()[0].name: features.numpy()})
        for place, (session, features) in enumerate(zip(sessions, inputs, strict=True))
    }
    medians = [statistics.median(values) for values in interleaved(runs, repeats=repeats).values()]
    return {
        name: [seconds for (other, _), seconds in zip(order, medians, strict=True) if other == name] for name in forms
    }


def _onnx_runtime() -> ModuleType:
    """The module that exports to ONNX; its package takes seconds to import, which eager timing need not wait for."""
    runtime = import_module("basisprune.deploy.export.runtime")
    runtime.require_onnx()
    return runtime


def ready_eager(
    model: nn.Module, input_shape: tuple[int, ...], _threads: int
) -> Callable[[Tensor], Callable[[], object]]:
    """What makes a run of the model in eager PyTorch out of a batch."""
    twin = in_channels_last(model).cpu()

    def make(images: Tensor) -> Callable[[], object]:
        batch = images.contiguous(memory_format=torch.channels_last) if len(input_shape) == 3 else images

        @torch.inference_mode()
        def run() -> object:
            return twin(batch)

        return run

    return make


def _onnxruntime(
    model: nn.Module, input_shape: tuple[int, ...], threads: int
) -> Callable[[Tensor], Callable[[], object]]:
    session = onnx_session(model, input_shape, threads)
    name = session.get_inputs()[0].name

    def make(images: Tensor) -> Callable[[], object]:
        feed = {name: images.numpy()}
        return lambda: session.run(None, feed)

    return make


_READY = {"eager": ready_eager, "onnxruntime": _onnxruntime}


def latency_rows(backend: str, batch_size: int, seconds: Seconds) -> list[Latency]:
    """One row for each run, compared with the first."""
    first, rows = next(iter(seconds)), []
    for name, values in seconds.items():
        low, _, high = statistics.quantiles(values, n=4)
        middle = statistics.median(values)
        rows.append(Latency(name, backend, batch_size, middle, high - low, speedup(seconds, first, name)))
    return rows


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """PyTorch computes with this many threads temporarily."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _shape(models: Mapping[str, nn.Module], given: Sequence[int] | None) -> tuple[int, ...]:
    first = next(iter(models.values()))
    spec = known_spec(first)
    if given is not None:
        return tuple(given)
    if spec is None:
        fault = f"{type(first).__name__} does not know it; pass that of one input, such as (3, 224, 224)"
        raise ConfigError.of("measure_latency", [f"input_shape: {fault}"])
    return spec.shape


def _check_settings(
    models: Mapping[str, nn.Module], batch_sizes: Sequence[int], backends: Sequence[str], threads: int, repeats: int
) -> None:
    faults = []
    if not models:
        faults.append("models: none given; pass a dict such as {'original': model, 'pruned': pruned}")
    if not batch_sizes or min(batch_sizes) < 1:
        faults.append(f"batch_sizes: {tuple(batch_sizes)} given; at least one is needed, each at least 1")
    faults += [f"backends: {b!r} given; allowed are {get_args(Backend)}" for b in backends if b not in _READY]
    if threads < 1:
        faults.append(f"threads: {threads} given; at least 1 is needed")
    if repeats < 2:
        faults.append(f"repeats: {repeats} given; at least 2 are needed for a spread")
    if faults:
        raise ConfigError.of("measure_latency", faults)
