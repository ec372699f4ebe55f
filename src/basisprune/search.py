"""The smallest model within an accuracy budget: the paper's search for the largest ratios, done for the user."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from basisprune.errors import ConfigError
from basisprune.measure import measure
from basisprune.pipeline import Pipeline, State
from basisprune.training import EpochRecord

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Budget:
    """What the pruned model must keep to: one of these.

    `max_drop` is the accuracy that may be lost against the unpruned model, `min_accuracy` the least that is
    wanted, both as fractions; `target_params` and `target_macs` are the most that it may have.
    """

    max_drop: float | None = None
    min_accuracy: float | None = None
    target_params: int | None = None
    target_macs: int | None = None

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
    """How far the search goes: which filter method comes on top, and how narrow the last bracket is."""

    filter_method: str = "taylor"
    tolerance: float = 0.05
    max_ratio: float = 0.95
    give_up_margin: float = 0.15

    def __post_init__(self) -> None:
        faults = []
        if self.filter_method not in ("l1", "taylor", "hrank", "none"):
            faults.append(f"filter_method: {self.filter_method!r} given; allowed are l1, taylor, hrank and none")
        if not 0 < self.tolerance < 1:
            faults.append(f"tolerance: {self.tolerance} given; allowed is 0 < tolerance < 1")
        if not 0 < self.max_ratio < 1:
            faults.append(f"max_ratio: {self.max_ratio} given; allowed is 0 < max_ratio < 1")
        if not 0 < self.give_up_margin <= 1:
            faults.append(f"give_up_margin: {self.give_up_margin} given; allowed is 0 < give_up_margin <= 1")
        if faults:
            raise ConfigError.of("SearchConfig", faults)


@dataclass(frozen=True)
class Candidate:
    """A network that was tried, judged on the validation images.

    `drop` is the accuracy lost against the unpruned network, with a 95 % interval that takes into account that
    both saw the same images. It is `undecided` when that interval holds the limit: then the images are too few
    to tell whether it keeps to the budget.
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


@dataclass(frozen=True)
class Found:
    """What the search ended with: all candidates, the first being the unpruned network, and the chosen state."""

    candidates: tuple[Candidate, ...]
    chosen: int
    state: State
    reference: State


class Search:
    """Looks for the smallest network within the budget, first by the basis ratio, then by the filter ratio.

    Each candidate starts from the weights of the nearest one that passed. One that is hopeless after its first
    epoch is given up. All training goes through the pipeline's checkpoints, so that a search that was killed
    repeats its steps from them and ends with the same answer.
    """

    def __init__(self, pipeline: Pipeline, budget: Budget, config: SearchConfig | None = None) -> None:
        self.pipeline, self.budget, self.config = pipeline, budget, config or SearchConfig()
        self.candidates: list[Candidate] = []
        self.states: list[State] = []

    def run(self) -> Found:
        """The smallest network that keeps to the budget; the unpruned one where none does."""
        reference = self.pipeline.decomposed()
        self.reference_hits = self.pipeline.hits(reference.model)
        self._judge(reference, 0.0, 0.0)
        if self.budget.is_about_accuracy:
            basis = self._bisect(reference, self._try_basis)
            if self.config.filter_method != "none":
                self._bisect(basis, self._try_filters)
        else:
            self._reach_size(reference)
        chosen = self._smallest()
        return Found(tuple(self.candidates), chosen, self.states[chosen], reference)

    def _bisect(self, start: State, attempt: Callable[[State, float, float], int]) -> State:
        """The network of the largest ratio that passes, to within the tolerance; `start` where none does."""
        best, low, high = start, 0.0, self.config.max_ratio
        while high - low > self.config.tolerance:
            ratio = (low + high) / 2
            found = attempt(best, low, ratio)
            if self.candidates[found].passed:
                best, low = self.states[found], ratio
            else:
                high = ratio
        return best

    def _try_basis(self, start: State, done: float, ratio: float) -> int:
        step = (ratio - done) / (1 - done)
        state = self.pipeline.prune_basis(start, step, stop=self._hopeless)
        return self._judge(state, ratio, 0.0)

    def _try_filters(self, start: State, done: float, ratio: float) -> int:
        step = (ratio - done) / (1 - done)
        state = self.pipeline.prune_filters(start, self.config.filter_method, step, stop=self._hopeless)
        basis_ratio = self.candidates[self.states.index(start)].basis_ratio
        return self._judge(state, basis_ratio, ratio)

    def _hopeless(self, history: Sequence[EpochRecord]) -> bool:
        """Whether a training need not go on: far below the limit, and not rising fast enough to reach it."""
        if not self.budget.is_about_accuracy or history[-1].val_accuracy is None:
            return False
        limit = self.budget.least_accuracy(self.candidates[0].accuracy)
        return history[-1].val_accuracy < limit - self.config.give_up_margin

    def _judge(self, state: State, basis_ratio: float, filter_ratio: float) -> int:
        hits = self.pipeline.hits(state.model)
        stage = state.stages[-1]
        # What is saved is saved against the network as it was, not against its decomposed form, which is larger.
        size = stage if self.candidates else measure(self.pipeline.model)
        accuracy = float(hits.mean())
        reference = float(self.reference_hits.mean())
        drop, drop_interval = paired_drop(self.reference_hits, hits)
        passed, undecided = True, False
        if self.candidates and self.budget.is_about_accuracy:
            limit = self.budget.least_accuracy(reference)
            passed = accuracy >= limit - 1e-9
            allowed = reference - limit
            undecided = drop_interval[0] <= allowed <= drop_interval[1]
        elif self.budget.target_params is not None:
            passed = size.parameters <= self.budget.target_params
        elif self.budget.target_macs is not None:
            passed = size.macs <= self.budget.target_macs
        self.candidates.append(
            Candidate(
                state.key,
                basis_ratio,
                filter_ratio,
                accuracy,
                wilson_interval(int(hits.sum()), len(hits)),
                drop,
                drop_interval,
                passed,
                undecided,
                size.parameters,
                size.macs,
                stage.history,
            )
        )
        self.states.append(state)
        return len(self.candidates) - 1

    def _reach_size(self, reference: State) -> None:
        """Candidates that become smaller until one is small enough, with the smallest ratio that does it."""
        low, high = 0.0, self.config.max_ratio
        while high - low > self.config.tolerance:
            ratio = (low + high) / 2
            found = self._try_basis(reference, 0.0, ratio)
            low, high = (low, ratio) if self.candidates[found].passed else (ratio, high)
        if not any(candidate.passed for candidate in self.candidates):
            self._try_basis(reference, 0.0, self.config.max_ratio)

    def _smallest(self) -> int:
        passing = [index for index, candidate in enumerate(self.candidates) if candidate.passed]
        if not self.budget.is_about_accuracy:
            if not passing:
                return min(range(len(self.candidates)), key=lambda index: self.candidates[index].parameters)
            return max(passing, key=lambda index: (self.candidates[index].accuracy, self.candidates[index].parameters))
        return min(passing, key=lambda index: (self.candidates[index].parameters, self.candidates[index].macs))


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy by Wilson's score.

    >>> [round(bound, 3) for bound in wilson_interval(90, 100)]
    [0.826, 0.945]
    """
    z = 1.959964
    share = hits / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_drop(before: Bools, after: Bools) -> tuple[float, tuple[float, float]]:
    """The accuracy lost on the same images, and its 95 % interval (normal, for paired proportions).

    >>> before, after = np.array([True] * 9 + [False]), np.array([True] * 8 + [False] * 2)
    >>> paired_drop(before, after)[0]
    0.1
    """
    lost, won, count = int((before & ~after).sum()), int((~before & after).sum()), len(before)
    drop = (lost - won) / count
    # One is added to both kinds of change (Agresti and Min), so that no change at all is not taken for certainty.
    spread = math.sqrt(lost + won + 2 - (lost - won) ** 2 / (count + 2)) / (count + 2)
    return drop, (drop - 1.959964 * spread, drop + 1.959964 * spread)
