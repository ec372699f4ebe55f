"""The networks that a search tries: what was removed, how good each is, and what it costs in deployed form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import nn

from basisprune.budget import Budget, Optimize
from basisprune.budget.certify import AcceptanceRule, Certificate, interval_of, loss_of
from basisprune.budget.metrics import value_of
from basisprune.callback import Row
from basisprune.costs import measure
from basisprune.deploy.export.onnx import has_onnx
from basisprune.deploy.fold import deploy
from basisprune.deploy.latency import Backend, measure_latency, onnx_session
from basisprune.deploy.timing import table_milliseconds
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import State
from basisprune.recipes import POLISHED, Axis, Steps
from basisprune.training.checkpoint import EpochRecord
from basisprune.types import BasisPlan, BlockPlan

Shares: TypeAlias = Mapping[Axis, float]
"""The fractions of basis vectors and of filters that remain."""

ALL: Shares = {"basis": 1.0, "filters": 1.0}


@dataclass(frozen=True)
class Size:
    """What a network costs in deployed form; `latency_ms` only if the budget needs it."""

    parameters: int
    macs: int
    latency_ms: float | None = None


@dataclass(frozen=True)
class Candidate:
    """A network that was tried, judged on the validation images; its size is that of the deployed form.

    The ratios are the fractions of basis vectors and filters actually removed; with blocks of `round_to`, they are
    smaller than requested. `accuracy` is the metric of the task, named `metric`, `shown` its text, and `score` that of
    the budget. `drop` is what is lost relative to the unpruned network. Its paired 95% interval is that of a network
    that was not selected: all candidates are judged on the same images, so that it is too narrow for those that look
    best. A candidate is `undecided` if it contains the limit. `chance` is how likely it is to be certified on the
    confirming images, where there are enough. `branches` counts the residual branches removed as a whole.
    """

    steps: Steps
    basis_ratio: float
    filter_ratio: float
    accuracy: float
    interval: tuple[float, float]
    drop: float
    drop_interval: tuple[float, float]
    passed: bool
    undecided: bool
    parameters: int
    macs: int
    history: tuple[EpochRecord, ...]
    latency_ms: float | None = None
    score: float | None = None
    chance: float | None = None
    branches: int = 0
    metric: str = "accuracy"
    shown: str = ""

    @classmethod
    def of(cls, state: State, reference: State, size: Size, asked: Shares = ALL) -> Candidate:
        """Describe a state, assumed to pass until it is judged; `asked` are the requested shares."""
        kept, outcomes = really_kept(state, asked), state.outcomes
        loss = loss_of(reference.outcomes, outcomes)
        # The last training; of a network that was split after its training, that training.
        stages = state.stages[-1:] if state.plans else state.stages[::-1]
        return cls(
            steps=state.steps,
            basis_ratio=1 - kept["basis"],
            filter_ratio=1 - kept["filters"],
            accuracy=outcomes.value,
            interval=interval_of(outcomes),
            drop=loss.drop,
            drop_interval=loss.interval(),
            passed=True,
            undecided=False,
            parameters=size.parameters,
            macs=size.macs,
            history=next((stage.history for stage in stages if stage.history), ()),
            latency_ms=size.latency_ms,
            branches=state.branches,
            metric=outcomes.task.metric_name,
            shown=outcomes.task.format(outcomes.value),
        )

    def judged(self, budget: Budget) -> Candidate:
        return replace(self, passed=budget.allows(self.parameters, self.macs, self.latency_ms))

    def judged_by(self, standard: AcceptanceRule, state: State, reference: State) -> Candidate:
        """Judge it by a budget of accuracy; `reference` is the unpruned network."""
        promise, before, after = standard.promise, reference.outcomes, state.outcomes
        evidence = promise.evidence(before, after)
        low, high = evidence.interval()
        loss = replace(promise, budget=Budget(max_drop=0.0)).evidence(before, after)
        return replace(
            self,
            passed=standard.passes(before, after),
            undecided=low <= promise.margin <= high,
            drop=loss.drop,
            drop_interval=loss.interval(),
            score=value_of(promise.metric, after),
            chance=standard.chance(before, after),
        )

    def order(self, optimize: Optimize) -> tuple[float, ...]:
        sizes = {"params": float(self.parameters), "macs": float(self.macs)}
        if self.latency_ms is not None:
            sizes["latency"] = self.latency_ms
        first = sizes.pop(optimize, self.parameters)
        return first, *(value for name, value in sizes.items() if name != "latency")

    @property
    def label(self) -> str:
        ratios = {"basis": self.basis_ratio, "filters": self.filter_ratio}
        parts = [f"{share_of(ratio)} of the {name}" for name, ratio in ratios.items() if ratio]
        if self.branches:
            parts.append(f"{self.branches} residual branch{'es' if self.branches > 1 else ''}")
        if not parts:
            return "unpruned"
        return ", ".join(parts) + (f", {POLISHED}" if POLISHED in self.steps else "")

    @property
    def row(self) -> Row:
        """The candidate in a live table."""
        interval = f" ({self.interval[0]:.1%} to {self.interval[1]:.1%})" if self.shown.endswith("%") else ""
        state = "unpruned" if not self.basis_ratio and not self.filter_ratio else "passed" if self.passed else "failed"
        return Row(self.label, state, self.parameters, self.latency_ms, self.shown + interval)

    @property
    def summary(self) -> str:
        """One line: what was removed, and how good it is."""
        name = self.label if self.label == "unpruned" else f"without {self.label}"
        outcome = "passed" if self.passed else "failed"
        doubt = ", but there are too few images to be sure" if self.undecided else ""
        if self.undecided and self.chance is not None:  # which is what it passed or failed by
            doubt = f" with a chance of {share_of(self.chance)} to be certified"
        value = self.shown or f"{self.accuracy:.1%}"
        return f"{name}: {self.metric} {value}, {self.parameters:,} parameters, {outcome}{doubt}"


@dataclass(frozen=True)
class Evaluated:
    """A candidate with its network, as trained and as deployed."""

    candidate: Candidate
    state: State
    deployed: nn.Module


@dataclass(frozen=True)
class SearchResult:
    """The result of a search: all trials, starting with the unpruned network, and the index of the chosen one.

    `interrupted` means that Ctrl-C ended it early, with the best result so far. `to_test` are the places of the
    candidates that are tested on the confirming images, in order; `certificate` is what came of that. `timed_in` is
    the program that the latencies of the candidates are of, if they were measured here.
    """

    trials: tuple[Evaluated, ...]
    chosen: int
    interrupted: bool = False
    to_test: tuple[int, ...] = ()
    certificate: Certificate | None = None
    timed_in: Backend | None = None

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        return tuple(trial.candidate for trial in self.trials)

    @property
    def state(self) -> State:
        return self.trials[self.chosen].state

    @property
    def reference(self) -> State:
        return self.trials[0].state


def really_kept(state: State, asked: Shares) -> Shares:
    """Return the shares that the state's plans actually kept; with blocks, possibly more than requested."""
    if not state.plans:
        return asked
    kept = dict(ALL)
    for plan in state.plans:
        if isinstance(plan, BlockPlan):
            continue
        kept["basis" if isinstance(plan, BasisPlan) else "filters"] *= 1 - plan.removed / max(plan.total, 1)
    return kept


def share_of(value: float) -> str:
    """Format a fraction as a percentage, with more digits near 1.

    >>> share_of(0.5), share_of(0.9953)
    ('50%', '99.5%')
    """
    return f"{value:.0%}" if value < 0.98 else f"{value:.1%}"


class Scale:
    """Weighs the networks of a search; if it is `timed`, or if they are planned by time, their milliseconds too.

    All are timed in the same program, which the first one chooses, and once: a time is stored beside the steps of its
    network. The steps of the `foreign` one, from another backbone, have the same names, so its time is stored apart.
    """

    def __init__(self, pipeline: Pipeline, *, timed: bool = False, foreign: State | None = None) -> None:
        planner = pipeline.planner
        self.pipeline, self.foreign = pipeline, foreign
        self.table = None if planner is None else planner.table
        self.timed = timed or (planner is not None and planner.optimize == "latency")
        self.timed_in: Backend | None = None
        self._last: tuple[State, nn.Module] | None = None

    def deployed(self, state: State) -> nn.Module:
        """Return the state's network in deployed form; folded only once if requested twice in a row."""
        if self._last is None or self._last[0] is not state:
            self._last = state, deploy(state.model, self.pipeline.spec, self.pipeline.splits.classes, self.table)
        return self._last[1]

    def size(self, state: State) -> Size:
        """Return what the network costs; milliseconds only if they are asked for."""
        deployed = self.deployed(state)
        report = measure(deployed, self.pipeline.spec.shape)
        return Size(report.parameters, report.macs, self.milliseconds(state, deployed) if self.timed else None)

    def milliseconds(self, state: State, deployed: nn.Module) -> float:
        """Return milliseconds per image, measured once; on another device, what the table of its times adds up to."""
        planner = self.pipeline.planner
        if planner is not None and planner.elsewhere and self.table is not None:
            return table_milliseconds(deployed, self.pipeline.spec.shape, self.table)
        self.timed_in = backend = self.timed_in or self.program(deployed)
        file = f"latency-{backend}-reference" if state is self.foreign else f"latency-{backend}"
        return self.pipeline.store.number(state.steps, file, lambda: self.measured(deployed, backend))

    def measured(self, deployed: nn.Module, backend: Backend) -> float:
        shape = self.pipeline.spec.shape
        report = measure_latency({"model": deployed}, shape, batch_sizes=(1,), backends=(backend,))
        return 1000 * report.rows[0].seconds

    def program(self, deployed: nn.Module) -> Backend:
        """Return what networks are timed in: ONNX Runtime if it is installed and can run this one, or else PyTorch."""
        if not has_onnx():
            return "eager"
        try:
            onnx_session(deployed, self.pipeline.spec.shape, threads=1)
        except Exception as error:  # torch's exporter can raise anything for an unsupported network
            why = f"ONNX Runtime cannot run the network: {error}"
            self.pipeline.notify.log(f"measuring latency in PyTorch, because {why}")
            return "eager"
        return "onnxruntime"
