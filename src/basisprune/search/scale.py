"""What networks weigh in the form in which they are deployed: parameters, multiply-adds, milliseconds."""

from __future__ import annotations

from torch import nn

from basisprune.costs import measure
from basisprune.deploy.export.runtime import has_onnx
from basisprune.deploy.fold import deploy
from basisprune.deploy.latency import Backend, measure_latency, onnx_session
from basisprune.deploy.timing import table_milliseconds
from basisprune.pipeline import Pipeline
from basisprune.search.candidates import Size
from basisprune.states import State


class Scale:
    """Weighs the networks of a search; if it is `timed`, or if they are planned by time, their milliseconds too.

    All are timed in the same program, which the first one chooses, and once: a time is stored beside the steps of its
    network. The steps of the `foreign` one, from another backbone, have the same names, so its time is stored apart.
    """

    def __init__(self, pipeline: Pipeline, *, timed: bool = False, foreign: State | None = None) -> None:
        planner = pipeline.planner
        self.pipeline, self.foreign = pipeline, foreign
        self.timed = timed or (planner is not None and planner.optimize == "latency")
        self.timed_in: Backend | None = None
        self._last: tuple[State, nn.Module] | None = None

    def deployed(self, state: State) -> nn.Module:
        """The state's network in deployed form; folded only once if requested twice in a row."""
        if self._last is None or self._last[0] is not state:
            planner = self.pipeline.planner
            times = None if planner is None else planner.table
            folded = deploy(state.model, self.pipeline.spec, self.pipeline.splits.classes, times)
            self._last = state, folded
        return self._last[1]

    def size(self, state: State) -> Size:
        """What the network costs; milliseconds only if they are asked for."""
        deployed = self.deployed(state)
        report = measure(deployed, self.pipeline.spec.shape)
        return Size(report.parameters, report.macs, self.milliseconds(state, deployed) if self.timed else None)

    def milliseconds(self, state: State, deployed: nn.Module) -> float:
        """Milliseconds per image, measured once; on another device, what the table of its times adds up to."""
        planner = self.pipeline.planner
        if planner is not None and planner.elsewhere and planner.table is not None:
            return table_milliseconds(deployed, self.pipeline.spec.shape, planner.table)
        self.timed_in = backend = self.timed_in or self.program(deployed)
        file = f"latency-{backend}-reference" if state is self.foreign else f"latency-{backend}"
        return self.pipeline.store.number(state.steps, file, lambda: self.measured(deployed, backend))

    def measured(self, deployed: nn.Module, backend: Backend) -> float:
        """Milliseconds per image in that program, on this machine."""
        shape = self.pipeline.spec.shape
        report = measure_latency({"model": deployed}, shape, batch_sizes=(1,), backends=(backend,))
        return 1000 * report.rows[0].seconds

    def program(self, deployed: nn.Module) -> Backend:
        """What networks are timed in: ONNX Runtime if it is installed and can run this one, or else PyTorch."""
        if not has_onnx():
            return "eager"
        try:
            onnx_session(deployed, self.pipeline.spec.shape, threads=1)
        except Exception as error:  # torch's exporter can raise anything for an unsupported network
            said = f"measuring latency in PyTorch, because ONNX Runtime cannot run the network: {error}"
            self.pipeline.notify.log(said)
            return "eager"
        return "onnxruntime"
