"""The smallest model within a budget: the paper's search for the largest ratios, automated."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from basisprune.budget import Budget, Goal, Optimize, Ratios
from basisprune.budget.certify import EQUAL, SURE, AcceptanceRule, Entry, Guarantee, in_order
from basisprune.budget.metrics import value_of
from basisprune.errors import TooMuchError
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import NOT_AT_ALL, State, Tuning
from basisprune.recipes import DECOMPOSED, Framework, Move, find_framework
from basisprune.search.candidates import ALL, Candidate, Evaluated, Scale, SearchResult, Shares
from basisprune.search.stepping import Attempt, SearchConfig, Stepping, axes_of
from basisprune.tasks import Task
from basisprune.torchkit.processes import Processes

SAFER = 3
"""The most networks that are tried to have one to fall back on."""

_LARGER = 0.7
"""The power of the share kept that gives the next larger one to fall back on: 0.2 is followed by 0.32, then 0.45."""

_GRACE, _LEAST_GRACE = 5, 2  # a candidate can be hopeless after a fifth of its epochs, and never after its first
_MORE_STEPS = 3  # extra steps if tuning between steps shifted the size slightly


class Search:
    """Searches for the smallest network within the budget, first by basis ratio, then by filter ratio.

    Tuning ends as soon as a candidate is hopeless, or good enough where it is neither to be certified nor to tell how
    far to go next. All training goes through the pipeline's checkpoints, so a search that was killed repeats its steps
    from them and gives the same result. Given `Ratios` instead of a budget, each of the framework's moves is made once.
    `framework` overrides the one in the config; `reference` is the network that accuracy is compared with, by default
    the one that would be deployed without pruning: the plainly trained one, or the given one if it was trained before
    and is better. With a `promise` and confirming images, candidates pass if they are likely to be certified on those,
    and a few larger ones are tried for one that is all but sure to be; where none is likely to be, or without a
    promise, they pass by the estimate.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        goal: Goal,
        config: SearchConfig | None = None,
        *,
        framework: Framework | None = None,
        reference: State | None = None,
        promise: Guarantee | None = None,
    ) -> None:
        self.pipeline, self.goal, self.config = pipeline, goal, config or SearchConfig()
        self.framework = framework or find_framework(self.config.framework or pipeline.settings.framework)
        self.reference = reference
        self.standard = self._standard(promise)
        self.trials: list[Evaluated] = []
        self._unsure: list[float] = []  # shares of the first move whose networks may well not be certified
        timed = isinstance(goal, Budget) and goal.target_latency is not None
        self.scale = Scale(pipeline, timed=timed, foreign=reference)

    def run(self) -> SearchResult:
        """The smallest network within the budget; the unpruned one if there is none.

        Ctrl-C ends the search with the best result so far, once the unpruned network is trained; in a distributed run,
        it ends the run.
        """
        self.pipeline.claim_folder()
        start = self.pipeline.start(self.framework)
        self._judge(self.reference or self._unpruned(start), ALL)
        interrupted = False
        try:
            self._try_candidates(start)
        except KeyboardInterrupt:
            if Processes.here().count > 1:
                raise  # each was somewhere else, so that they have no common result
            interrupted = True
        return SearchResult(
            tuple(self.trials), self._best(), interrupted, self._to_test(), timed_in=self.scale.timed_in
        )

    def _unpruned(self, start: State) -> State:
        """The network that would be deployed without pruning: plainly trained, or as it was given if that is better.

        A split by the loss does not change it.
        """
        split_first = self.framework.start == DECOMPOSED.name and self.pipeline.settings.basis != "loss"
        plain, given = self.pipeline.dense() if split_first else start, self.pipeline.given()
        return given if self._value(given) > self._value(plain) else plain

    def _value(self, state: State) -> float:
        """How good a network is, in what the budget is counted in."""
        if self.standard is None:
            return value_of(self.pipeline.task.budget_metric, state.outcomes)
        return value_of(self.standard.promise.metric, state.outcomes)

    def _standard(self, promise: Guarantee | None) -> AcceptanceRule | None:
        """How candidates are judged; None for goals that are not about accuracy."""
        if not isinstance(self.goal, Budget) or not self.goal.is_about_accuracy:
            return None
        if promise is None:
            return AcceptanceRule(Guarantee(self.goal, metric=self.pipeline.task.budget_metric))
        confirm = self.pipeline.splits.confirm
        if confirm is None or not promise.reachable(confirm.labels, confirm.units):
            return AcceptanceRule(promise)
        return AcceptanceRule(promise, confirm.independent)

    def _try_candidates(self, start: State) -> None:
        if isinstance(self.goal, Ratios):
            self._remove(start, self.goal)
        elif self.goal.is_about_accuracy:
            self._shrink(start, self.goal)
        else:
            self._reach_size(start, self.goal)

    def _remove(self, state: State, ratios: Ratios) -> None:
        """Tries the single candidate with the given ratios."""
        kept = dict(ALL)
        for move in self.framework.moves:
            if any(ratios.of(axis) > 0 for axis in move.axes):
                state = self.pipeline.remove(state, move, ratios)
                kept |= {axis: 1 - ratios.of(axis) for axis in move.axes}
        self._judge(state, kept)

    def _shrink(self, start: State, budget: Budget) -> None:
        asked = self._descend(start, budget)
        if self._best() == 0 and self._asks_for_less():
            asked = self._descend(start, budget)
        chosen = self._best()
        if self.config.polish and chosen:
            best = self.trials[chosen]
            kept: Shares = {"basis": 1 - best.candidate.basis_ratio, "filters": 1 - best.candidate.filter_ratio}
            self._judge(self.pipeline.polish(best.state), kept)
        if chosen and self.standard is not None and self.standard.confirming is not None:
            self._fall_back(start, asked, budget)

    def _fall_back(self, start: State, asked: Shares, budget: Budget) -> None:
        """Tries a few larger networks for one that is all but sure to be certified, if the smaller ones fail.

        They are larger than all that were tried and are not.
        """
        move = self.framework.moves[0]
        share = max((asked[move.axes[0]], *self._unsure))
        for _ in range(SAFER):
            if any((trial.candidate.chance or 0.0) >= SURE for trial in self.trials[1:]):
                return
            share = share**_LARGER
            self.pipeline.notify.log("trying a larger network, to fall back on if the smaller ones are not certified")
            tried = self.pipeline.prune(start, move, round(1 - share, 4), self._tuning(budget))
            if _removes_nothing(tried, start):
                return
            self._judge(tried, _multiplied(ALL, move, share))

    def _descend(self, start: State, budget: Budget) -> Shares:
        """Makes the network as small as its standard allows, one move after the other; the shares that it came to."""
        state, kept = start, ALL
        for move in self.framework.moves:
            state, kept = self._gallop(state, kept, move, budget)
        return kept

    def _asks_for_less(self) -> bool:
        """Whether candidates are judged by the estimate from now on, because none is likely to be certified."""
        if self.standard is None or self.standard.confirming is None:
            return False
        self.pipeline.notify.log(
            f"no candidate is likely to be certified on {self.standard.confirming:,} images; searching by the estimate"
        )
        self.standard = replace(self.standard, confirming=None)
        reference = self.trials[0].state
        self.trials[1:] = [
            replace(trial, candidate=trial.candidate.judged_by(self.standard, trial.state, reference))
            for trial in self.trials[1:]
        ]
        return True

    def _gallop(self, start: State, kept: Shares, move: Move, budget: Budget) -> tuple[State, Shares]:
        """The state with the smallest share that passes, and what it keeps; `start` if none does."""
        stepping = self._stepping(start, move, budget)
        tuning = self._tuning(budget, foreseen=stepping.outlook is not None)
        state, best = start, Attempt(1.0, 0.0, passed=True)
        attempts: list[Attempt] = []
        impossible: list[Attempt] = []  # from this state; a smaller one may well lose as much
        while (share := _agreed(stepping.next_share([*attempts, *impossible]))) is not None:
            source, done = (state, best.share) if self.config.warm_start else (start, 1.0)
            try:
                tried = self.pipeline.prune(source, move, round(1 - share / done, 4), tuning)
            except TooMuchError:
                self.pipeline.notify.log(f"{1 - share / done:.0%} cannot be removed; trying less")
                impossible.append(Attempt(share, math.inf, passed=False))
                continue
            if _removes_nothing(tried, source):  # so that more must go at once
                attempts.append(replace(best, share=share))
                continue
            asked = _multiplied(kept, move, share)
            candidate = self._judge(tried, asked)
            attempts.append(Attempt(share, candidate.drop, candidate.passed, candidate.order(self._optimize)[0]))
            if move is self.framework.moves[0] and (candidate.chance or 0.0) < SURE:
                self._unsure.append(asked[move.axes[0]])
            if candidate.passed:
                state, best = tried, attempts[-1]
                if self.config.warm_start:
                    impossible.clear()
        return state, _multiplied(kept, move, best.share)

    def _stepping(self, start: State, move: Move, budget: Budget) -> Stepping:
        """How the search for the smallest share of the move's axes goes."""
        config, reference = self.config, self._value(self.trials[0].state)
        return Stepping(
            allowed=self._allowed(budget, reference),
            step=config.step,
            tolerance=config.tolerance,
            smallest=config.smallest,
            axes=axes_of(move, by_cost=self.pipeline.planner is not None),
            outlook=self.pipeline.outlook(start, move, config.smallest),
        )

    def _allowed(self, budget: Budget, reference: float) -> float:
        """The loss that a candidate is aimed at; half of the budget where there must be room for certification."""
        allowed = reference - budget.least_accuracy(reference)
        return allowed if self.standard is None or self.standard.confirming is None else allowed / 2

    def _tuning(self, budget: Budget, *, foreseen: bool = False) -> Tuning:
        """Candidates are tuned until they are good enough or hopeless.

        If they are to be certified, none is good enough: one that passes on a few images in the middle of its tuning,
        at a high learning rate, was often lucky, and fails on the confirming images. Nor is any where the loss is
        `foreseen`, because what a tuned network loses tells how far to go next. Other metrics of classes than accuracy
        are not followed while training: all epochs are trained.
        """
        metric = None if self.standard is None else self.standard.promise.metric
        if self.config.tune_fully or self.standard is None or not (metric == "accuracy" or isinstance(metric, Task)):
            return Tuning()
        limit = budget.least_accuracy(self.trials[0].candidate.accuracy)
        enough = None if foreseen or self.standard.confirming is not None else limit - EQUAL
        if isinstance(metric, Task) and not metric.is_share:
            return Tuning(enough=enough)  # how far is hopeless, nobody knows
        grace = max(math.ceil(self.pipeline.settings.finetune.epochs / _GRACE), _LEAST_GRACE)
        return Tuning(enough=enough, hopeless=limit - self.config.give_up_margin, grace=grace)

    def _reach_size(self, start: State, budget: Budget) -> None:
        """Prunes as little as possible to become small enough; only the last candidate of each move is judged."""
        if self.trials[0].candidate.passed:
            return
        state, kept = start, ALL
        for move in self.framework.moves:
            before = state
            share, more = self._share_for_size(state, move, budget), _MORE_STEPS
            while share < 1.0:
                step = max(share, self.config.step)  # no step removes more than a step of the search
                try:
                    tried = self.pipeline.prune(state, move, round(1 - step, 4), Tuning())
                except TooMuchError:
                    break
                if _removes_nothing(tried, state):
                    break
                state, share, kept = tried, share / step, _multiplied(kept, move, step)
                if share >= 1.0 and more and not self._is_small_enough(state, budget):
                    share, more = 1 - self.config.tolerance / 4, more - 1
            if state is not before and self._judge(state, kept).passed:
                break

    def _share_for_size(self, start: State, move: Move, budget: Budget) -> float:
        """The largest share to keep that is small enough, found without tuning; the smallest if none is."""
        large, small, impossible = 1.0, 0.0, 0.0
        while (lower := small or impossible) < large * (1 - self.config.tolerance / 4) and large > self.config.smallest:
            share = math.sqrt(large * lower) if lower else max(large * self.config.step, self.config.smallest)
            try:
                tried = self.pipeline.prune(start, move, round(1 - share, 4), NOT_AT_ALL)
            except TooMuchError:
                impossible = share
                continue
            if self._is_small_enough(tried, budget):
                small = share
            else:
                large = share
        return small or large

    def _is_small_enough(self, state: State, budget: Budget) -> bool:
        size = self.scale.size(state)
        return budget.allows(size.parameters, size.macs, size.latency_ms)

    def _judge(self, state: State, kept: Shares) -> Candidate:
        """The verdict on one more candidate, which is added to the trials."""
        reference = self.trials[0].state if self.trials else state
        candidate = Candidate.of(state, reference, self.scale.size(state), kept)
        if self.standard is not None:
            judged = candidate.judged_by(self.standard, state, reference)
            candidate = judged if self.trials else replace(judged, passed=True, undecided=False, chance=None)
        elif isinstance(self.goal, Budget):
            candidate = candidate.judged(self.goal)
        self.trials.append(Evaluated(candidate, state, self.scale.deployed(state)))
        self.pipeline.notify.judged(candidate)
        return candidate

    def _to_test(self) -> tuple[int, ...]:
        """The places of the candidates to test on the confirming images, in order; those within the estimate."""
        if self.standard is None or self.standard.confirming is None:
            return ()
        before = self.trials[0].state.outcomes
        entries = [
            Entry(index, trial.candidate.order(self._optimize)[0], trial.candidate.chance or 0.0)
            for index, trial in enumerate(self.trials)
            if index and self.standard.within(before, trial.state.outcomes)
        ]
        return tuple(in_order(entries))

    @property
    def _optimize(self) -> Optimize:
        return "params" if self.pipeline.planner is None else self.pipeline.planner.optimize

    def _best(self) -> int:
        """The smallest candidate that passed, the most accurate among equals; for size budgets, the most accurate.

        By latency, the fastest one.
        """
        candidates = [trial.candidate for trial in self.trials]
        if isinstance(self.goal, Ratios):
            return len(candidates) - 1

        def size(index: int) -> tuple[float, ...]:
            candidate = candidates[index]
            accuracy = candidate.accuracy if candidate.score is None else candidate.score
            return (*candidate.order(self._optimize), -accuracy)

        passing = [index for index, candidate in enumerate(candidates) if candidate.passed]
        if self.goal.is_about_accuracy:
            return min(passing, key=size)
        if passing:
            return min(passing, key=lambda index: (-candidates[index].accuracy, *size(index)))
        return min(range(len(candidates)), key=size)


def _agreed(share: float | None) -> float | None:
    """The share that the main process tries next, so that all processes of a distributed run prune the same."""
    processes = Processes.here()
    if processes.count == 1:
        return share
    told: float | None = json.loads(processes.from_main(lambda: json.dumps(share).encode()))
    return told


def _multiplied(kept: Shares, move: Move, share: float) -> Shares:
    """The shares, with those of the move's axes reduced further."""
    return {**kept, **{axis: kept[axis] * share for axis in move.axes}}


def _removes_nothing(state: State, source: State) -> bool:
    """Whether the plans since `source` remove nothing, because a block of `round_to` is more than was requested."""
    plans = state.plans[len(source.plans) :]
    return bool(plans) and all(plan.removed == 0 for plan in plans)
