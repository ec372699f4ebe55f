"""The smallest model within an accuracy budget: the paper's search for the largest ratios, done for the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

from torch import nn

from basisprune.costs import measure
from basisprune.deploy.export.runtime import has_onnx
from basisprune.deploy.fold import deploy
from basisprune.deploy.latency import Backend, measure_latency
from basisprune.errors import ConfigError, TooMuchError
from basisprune.pipeline import Enough, Framework, Pipeline, State
from basisprune.training.history import EpochRecord
from basisprune.training.intervals import paired_drop, wilson_interval
from basisprune.types import BasisPlan

Axis: TypeAlias = Literal["basis", "filters"]


@dataclass(frozen=True)
class Budget:
    """What the pruned model must keep to: one of these.

    `max_drop` is the accuracy that may be lost against the unpruned model, `min_accuracy` the least that is
    wanted, both as fractions; `target_params` and `target_macs` are the most that it may have in the form that
    is deployed, and `target_latency` the most milliseconds that it may take for one image here, on one thread.
    """

    max_drop: float | None = None
    min_accuracy: float | None = None
    target_params: int | None = None
    target_macs: int | None = None
    target_latency: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in vars(self).items() if value is not None}
        faults = []
        if len(given) != 1:
            faults.append(f"{len(given)} of {', '.join(vars(self))} given; exactly one is needed")
        faults += [
            f"{name}: {given[name]} given; it is a fraction, 0 <= {name} < 1 (1 % is 0.01)"
            for name in ("max_drop", "min_accuracy")
            if name in given and not 0 <= given[name] < 1
        ]
        faults += [
            f"{name}: {given[name]} given; at least 1 is needed"
            for name in ("target_params", "target_macs")
            if name in given and given[name] < 1
        ]
        if not given.get("target_latency", 1) > 0:
            faults.append(f"target_latency: {given['target_latency']} given; it is a time in milliseconds, above 0")
        if faults:
            raise ConfigError.of("Budget", faults)

    @property
    def is_about_accuracy(self) -> bool:
        """Whether accuracy decides, rather than size."""
        return self.max_drop is not None or self.min_accuracy is not None

    def least_accuracy(self, reference: float) -> float:
        """The accuracy that is just good enough when the unpruned model has `reference`."""
        return reference - self.max_drop if self.max_drop is not None else self.min_accuracy or 0.0


@dataclass(frozen=True)
class SearchConfig:
    """What is pruned and how far the search goes.

    `framework` is what prunes: filters by l1, taylor or hrank, the basis, or both. The search first multiplies
    what is kept by `step` until a candidate fails, then narrows down: it ends when the share of basis vectors
    or filters that failed is within `tolerance` of the one that passed, or at `smallest`. A candidate below the
    wanted accuracy by `give_up_margin` after a pass is given up. With `warm_start` a candidate is pruned from
    the last one that passed, else in one go from the unpruned network, as the paper does; with `tune_fully`
    all candidates are tuned for all epochs, as there. `polish` tunes the chosen network once more, for all epochs.
    """

    framework: Framework = "basis+taylor"
    step: float = 0.5
    tolerance: float = 0.2
    smallest: float = 0.02
    give_up_margin: float = 0.1
    warm_start: bool = True
    tune_fully: bool = False
    polish: bool = True

    def __post_init__(self) -> None:
        faults = []
        allowed = [name for name in get_args(Framework) if name != "baseline"]
        if self.framework not in allowed:
            faults.append(f"framework: {self.framework!r} given; allowed are {', '.join(allowed)}")
        faults += [
            f"{name}: {getattr(self, name)} given; allowed is 0 < {name} < 1"
            for name in ("step", "tolerance", "smallest", "give_up_margin")
            if not 0 < getattr(self, name) < 1
        ]
        if faults:
            raise ConfigError.of("SearchConfig", faults)


@dataclass(frozen=True)
class Candidate:
    """A network that was tried, judged on the validation images; its size is that of the form that is deployed.

    The ratios are the fractions of basis vectors and filters removed, which blocks of `round_to` make smaller
    than what was tried. `drop` is the accuracy lost against the unpruned network, with a 95 % interval that takes
    into account that both saw the same images. It is `undecided` when that interval holds the limit: then the
    images are too few to tell whether it keeps to the budget. `latency`, in milliseconds, is measured only where
    the budget asks for it.
    """

    name: str
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
    latency: float | None = None

    @classmethod
    def of(
        cls,
        state: State,
        reference: State,
        kept: Mapping[Axis, float],
        *,
        parameters: int,
        macs: int,
        latency: float | None = None,
    ) -> Candidate:
        """What is known of a state, taken to keep to the budget until that is judged; `kept` are the shares left."""
        drop, drop_interval = paired_drop(reference.hits, state.hits)
        return cls(
            name=state.key,
            basis_ratio=1 - kept["basis"],
            filter_ratio=1 - kept["filters"],
            accuracy=float(state.hits.mean()),
            interval=wilson_interval(int(state.hits.sum()), len(state.hits)),
            drop=drop,
            drop_interval=drop_interval,
            passed=True,
            undecided=False,
            parameters=parameters,
            macs=macs,
            history=state.stages[-1].history,
            latency=latency,
        )


@dataclass(frozen=True)
class Found:
    """What the search ended with: all candidates, the first being the unpruned network, and the chosen state.

    `interrupted` says that Ctrl-C ended it early, with the best so far.
    """

    candidates: tuple[Candidate, ...]
    chosen: int
    state: State
    reference: State
    interrupted: bool = False


_EQUAL = 1e-6  # accuracies are counted in float32 while training
_MORE_STEPS = 3  # towards a size that tuning between the steps moved a little away


@dataclass(frozen=True)
class Move:
    """One way to make a network smaller: what it counts, and how to remove a fraction of that and tune."""

    axis: Axis
    prune: Callable[[State, float, Enough | None], State]


def moves_of(pipeline: Pipeline, framework: Framework) -> list[Move]:
    """What a framework of the paper does to a network, in order."""
    method = framework.removeprefix("basis").removeprefix("+")
    moves = []
    if framework.startswith("basis"):
        moves.append(Move("basis", lambda state, ratio, enough: pipeline.prune_basis(state, ratio, enough=enough)))
    if method:
        moves.append(
            Move("filters", lambda state, ratio, enough: pipeline.prune_filters(state, method, ratio, enough=enough))
        )
    return moves


class Search:
    """Looks for the smallest network within the budget, first by the basis ratio, then by the filter ratio.

    Tuning ends as soon as a candidate is good enough, or hopeless. All training goes through the pipeline's
    checkpoints, so that a search that was killed repeats its steps from them and ends with the same answer.
    `moves` and `start` replace what the framework says; `reference` is the network that the accuracy is
    compared with, by default the start; `watch` gets each candidate as it is judged.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        budget: Budget,
        config: SearchConfig | None = None,
        *,
        moves: Sequence[Move] | None = None,
        start: Callable[[], State] | None = None,
        reference: State | None = None,
        watch: Callable[[Candidate], None] = lambda _: None,
    ) -> None:
        self.pipeline, self.budget, self.config = pipeline, budget, config or SearchConfig()
        framework = self.config.framework
        self.moves = moves_of(pipeline, framework) if moves is None else list(moves)
        self.start = start or (pipeline.decomposed if framework.startswith("basis") else pipeline.dense)
        self.reference, self.watch = reference, watch
        self.candidates: list[Candidate] = []
        self.states: list[State] = []

    def run(self) -> Found:
        """The smallest network that keeps to the budget; the unpruned one where none does.

        Ctrl-C ends the search with the best so far, once there is something to compare with.
        """
        self.pipeline.claim_folder()
        start = self.start()
        reference = self.reference or start
        self._judge(reference, {"basis": 1.0, "filters": 1.0})
        interrupted = False
        try:
            if self.budget.is_about_accuracy:
                self._shrink(start)
            else:
                self._reach_size(start)
        except KeyboardInterrupt:
            interrupted = True
        chosen = self._best()
        return Found(tuple(self.candidates), chosen, self.states[chosen], reference, interrupted)

    def _shrink(self, start: State) -> None:
        kept: dict[Axis, float] = {"basis": 1.0, "filters": 1.0}
        state = start
        for move in self.moves:
            state, kept = self._gallop(state, kept, move)
        chosen = self._best()
        if self.config.polish and chosen:
            candidate = self.candidates[chosen]
            kept = {"basis": 1 - candidate.basis_ratio, "filters": 1 - candidate.filter_ratio}
            self._judge(self.pipeline.polish(self.states[chosen]), kept)

    def _gallop(self, start: State, kept: dict[Axis, float], move: Move) -> tuple[State, dict[Axis, float]]:
        """The state of the smallest share that passes, and what it keeps; `start` where none does."""
        state, passed, failed = start, 1.0, 0.0
        while failed < passed * (1 - self.config.tolerance) and passed > self.config.smallest:
            share = math.sqrt(passed * failed) if failed else max(passed * self.config.step, self.config.smallest)
            source, done = (state, passed) if self.config.warm_start else (start, 1.0)
            try:
                tried = move.prune(source, round(1 - share / done, 4), self._enough)
            except TooMuchError:
                self.pipeline.say(f"{1 - share / done:.0%} cannot be removed; trying less")
                failed = share
                continue
            if _removes_nothing(tried):
                failed = share
                continue
            index = self._judge(tried, kept | {move.axis: kept[move.axis] * share})
            if self.candidates[index].passed:
                state, passed = tried, share
            else:
                failed = share
        return state, kept | {move.axis: kept[move.axis] * passed}

    def _enough(self, passes: int, accuracy: float) -> bool:
        """Whether tuning may end: the accuracy is good enough, or so far below after a pass that it is hopeless."""
        if self.config.tune_fully:
            return False
        limit = self.budget.least_accuracy(self.candidates[0].accuracy)
        return accuracy >= limit - _EQUAL or (passes > 0 and accuracy < limit - self.config.give_up_margin)

    def _reach_size(self, start: State) -> None:
        """Candidates that become small enough with as little pruning as possible; only the last one is tuned."""
        if self.candidates[0].passed:
            return
        kept: dict[Axis, float] = {"basis": 1.0, "filters": 1.0}
        state = start
        for move in self.moves:
            share, more = self._share_for_size(state, move), _MORE_STEPS
            while share < 1.0:
                step = max(share, self.config.step)  # no step removes more than the search would
                try:
                    tried = move.prune(state, round(1 - step, 4), None)
                except TooMuchError:
                    break
                if _removes_nothing(tried):
                    break
                state, share, kept = tried, share / step, kept | {move.axis: kept[move.axis] * step}
                if share >= 1.0 and more and not self._is_small_enough(state):
                    share, more = 1 - self.config.tolerance / 4, more - 1
            index = self._judge(state, kept)
            if self.candidates[index].passed:
                break

    def _share_for_size(self, start: State, move: Move) -> float:
        """The largest share to keep that is small enough, found without tuning; the smallest where none is."""
        large, small, impossible = 1.0, 0.0, 0.0
        while (lower := small or impossible) < large * (1 - self.config.tolerance / 4) and large > self.config.smallest:
            share = math.sqrt(large * lower) if lower else max(large * self.config.step, self.config.smallest)
            try:
                tried = move.prune(start, round(1 - share, 4), lambda *_: True)
            except TooMuchError:
                impossible = share
                continue
            if self._is_small_enough(tried):
                small = share
            else:
                large = share
        return small or large

    def _is_small_enough(self, state: State) -> bool:
        return self._keeps_to_size(*self._size(state))

    def _keeps_to_size(self, parameters: int, macs: int, latency: float | None) -> bool:
        budget = self.budget
        if budget.target_latency is not None:
            return latency is not None and latency <= budget.target_latency
        return parameters <= (budget.target_params or parameters) and macs <= (budget.target_macs or macs)

    def _size(self, state: State) -> tuple[int, int, float | None]:
        """Parameters, multiply-adds and, where the budget asks for it, milliseconds of the form that is deployed."""
        shape = self.pipeline.spec.shape
        folded = deploy(state.model, self.pipeline.spec, self.pipeline.splits.classes)
        report = measure(folded, shape)
        latency = None
        if self.budget.target_latency is not None:
            latency = self.pipeline.folder.number(f"{state.key}, latency", lambda: self._milliseconds(folded))
        return report.parameters, report.macs, latency

    def _milliseconds(self, model: nn.Module) -> float:
        """For one image, in ONNX Runtime; in PyTorch where that is not installed or cannot take the network."""

        def on(backend: Backend) -> float:
            shape = self.pipeline.spec.shape
            report = measure_latency({"model": model}, shape, batch_sizes=(1,), backends=(backend,))
            return 1000 * report.rows[0].seconds

        if has_onnx():
            try:
                return on("onnxruntime")
            except Exception as error:  # torch's exporter raises anything for a network that it does not take
                self.pipeline.say(f"latency is measured in PyTorch, ONNX Runtime cannot take the network: {error}")
        return on("eager")

    def _judge(self, state: State, kept: dict[Axis, float]) -> int:
        parameters, macs, latency = self._size(state)
        kept = _really_kept(state, kept)
        reference = self.states[0] if self.states else state
        candidate = Candidate.of(state, reference, kept, parameters=parameters, macs=macs, latency=latency)
        if not self.budget.is_about_accuracy:
            candidate = replace(candidate, passed=self._keeps_to_size(parameters, macs, latency))
        elif self.states:
            before = float(reference.hits.mean())
            limit, (low, high) = self.budget.least_accuracy(before), candidate.drop_interval
            passed, undecided = candidate.accuracy >= limit - _EQUAL, low <= before - limit <= high
            candidate = replace(candidate, passed=passed, undecided=undecided)
        self.candidates.append(candidate)
        self.states.append(state)
        self.watch(candidate)
        return len(self.candidates) - 1

    def _best(self) -> int:
        """The smallest candidate that passed, of equals the most accurate; by size, the most accurate one."""

        def size(index: int) -> tuple[float, ...]:
            candidate = self.candidates[index]
            return candidate.parameters, candidate.macs, -candidate.accuracy

        passing = [index for index, candidate in enumerate(self.candidates) if candidate.passed]
        if self.budget.is_about_accuracy:
            return min(passing, key=size)
        if passing:
            return max(passing, key=lambda index: (self.candidates[index].accuracy, *size(index)))
        return min(range(len(self.candidates)), key=size)


def _really_kept(state: State, asked: dict[Axis, float]) -> dict[Axis, float]:
    """The shares that the state's plans left, which with blocks may be more than was asked for."""
    if not state.plans:
        return asked
    kept: dict[Axis, float] = {"basis": 1.0, "filters": 1.0}
    for plan in state.plans:
        kept["basis" if isinstance(plan, BasisPlan) else "filters"] *= 1 - plan.removed / max(plan.total, 1)
    return kept


def _removes_nothing(state: State) -> bool:
    """Whether the last plan found nothing to remove, as blocks of `round_to` may be larger than what is asked for."""
    return bool(state.plans) and state.plans[-1].removed == 0
