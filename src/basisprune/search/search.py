"""The smallest model within a budget: the paper's search for the largest ratios (Section 3.5), automated."""

from __future__ import annotations

import math
from dataclasses import replace

from basisprune.budget import Budget, Goal, Optimize, Ratios
from basisprune.budget.certify import EQUAL, AcceptanceRule, Entry, Guarantee, few_in_order, in_order
from basisprune.budget.metrics import value_of
from basisprune.errors import TooMuchError
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import NOT_AT_ALL, UNSEEN, State, Tuning
from basisprune.recipes import DECOMPOSED, Framework, Move, find_framework
from basisprune.search.candidates import ALL, Candidate, Evaluated, Scale, SearchResult, Shares
from basisprune.search.descent import Descent, agreed, multiplied, removes_nothing
from basisprune.search.stepping import SAFE, Attempt, SearchConfig, Stepping, axes_of
from basisprune.tasks import Task
from basisprune.torchkit.processes import Processes

SAFER = 3
"""The most networks that are tried to have one to fall back on."""
_LARGER = 0.7
"""The power of the share kept that gives the next larger one to fall back on: 0.2 is followed by 0.32, then 0.45."""
_GRACE, _LEAST_GRACE = 5, 2  # a candidate can be hopeless after a fifth of its epochs, and never after its first
_MORE_STEPS = 3  # extra steps if tuning between steps shifted the size slightly


class Search:
    """Searches for the smallest network within the budget, one move of the framework after the other.

    Each move tries shares to keep (`Stepping` says which) from the smallest network that passed so far. All training
    goes through the pipeline's checkpoints, so a search that was killed repeats its steps from them and gives the same
    result. Given `Ratios` instead of a budget, each move is made once.

    Args:
        pipeline: What trains, prunes and tunes.
        goal: A budget of accuracy, size or time, or fixed ratios.
        config: How far the search goes.
        framework: What is pruned; by default the framework of the config, or else of the recipe.
        reference: The network that accuracy is compared with; by default the one that would be deployed unpruned.
        promise: What is to be certified. With confirming images, candidates pass if they are likely to be certified on
            those, and a few larger ones are tried for one that is all but sure to be; where none is likely to be, or
            without a promise, they pass by the estimate.
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
        self.unsure: list[float] = []  # shares of the first move whose networks may well not be certified
        timed = isinstance(goal, Budget) and goal.target_latency is not None
        self.scale = Scale(pipeline, timed=timed, foreign=reference)

    def run(self) -> SearchResult:
        """Return the smallest network within the budget; the unpruned one if there is none.

        Ctrl-C ends the search with the best result so far, once the unpruned network is trained; in a distributed run,
        it ends the run.
        """
        self.pipeline.claim_folder()
        start = self.pipeline.start(self.framework)
        self.judge(self.reference or self._unpruned(start), ALL)
        interrupted = False
        try:
            self._try_candidates(start)
        except KeyboardInterrupt:
            if Processes.here().count > 1:
                raise  # each was somewhere else, so that they have no common result
            interrupted = True
        return self._result(interrupted=interrupted)

    def _result(self, *, interrupted: bool = False) -> SearchResult:
        trials, timed_in = tuple(self.trials), self.scale.timed_in
        return SearchResult(trials, self._best(), interrupted, self._to_test(), timed_in=timed_in)

    def _try_candidates(self, start: State) -> None:
        if isinstance(self.goal, Ratios):
            self._remove(start, self.goal)
        elif self.goal.is_about_accuracy:
            self._shrink(start, self.goal)
        else:
            self._reach_size(start, self.goal)

    def _remove(self, state: State, ratios: Ratios) -> None:
        kept = dict(ALL)
        for move in self.framework.moves:
            if any(ratios.of(axis) > 0 for axis in move.axes):
                state = self.pipeline.remove(state, move, ratios)
                kept |= {axis: 1 - ratios.of(axis) for axis in move.axes}
        self.judge(state, kept)

    # Budgets of accuracy

    def _shrink(self, start: State, budget: Budget) -> None:
        """Descend to the smallest network that passes, polish it, and find one to fall back on."""
        asked = self._descend(start, budget)
        if self._best() == 0 and self._lower_standard():
            asked = self._descend(start, budget)
        chosen = self._best()
        foreseen = all(map(self.pipeline.settings.foresees, self.framework.moves))
        if chosen and (self.config.polish or (self.config.polish is None and not foreseen)):
            best = self.trials[chosen]
            kept: Shares = {"basis": 1 - best.candidate.basis_ratio, "filters": 1 - best.candidate.filter_ratio}
            self.judge(self.pipeline.polish(best.state), kept)
        if chosen and self.confirming is not None:
            self._fall_back(start, asked, budget)

    def _descend(self, start: State, budget: Budget) -> Shares:
        """Make the network as small as passes, one move after the other; return the shares that it came to."""
        state, kept = start, ALL
        for move in self.framework.moves:
            state, kept = self._descend_by(move, state, kept, budget)
        return kept

    def _descend_by(self, move: Move, start: State, kept: Shares, budget: Budget) -> tuple[State, Shares]:
        """Return the state with the smallest share that passes, and what it keeps; `start` if none does."""
        stepping = self._stepping(start, move, budget)
        if stepping.outlook is not None and not self.config.tune_fully:
            descent = Descent(self, move, start, kept, stepping)
            return descent.run()
        tuning = self._tuning(budget)
        state, best = start, Attempt(1.0, 0.0, passed=True)
        attempts: list[Attempt] = []
        impossible: list[Attempt] = []  # from this state; a smaller one may well lose as much
        while (share := agreed(stepping.next_share([*attempts, *impossible]))) is not None:
            source, done = (state, best.share) if self.config.warm_start else (start, 1.0)
            try:
                tried = self.pipeline.prune(source, move, round(1 - share / done, 4), tuning)
            except TooMuchError:
                self.pipeline.notify.log(f"{1 - share / done:.0%} cannot be removed; trying less")
                impossible.append(Attempt(share, math.inf, passed=False))
                continue
            if removes_nothing(tried, source):  # so that more must go at once
                attempts.append(replace(best, share=share))
                continue
            asked = multiplied(kept, move, share)
            candidate = self.judge(tried, asked)
            attempts.append(Attempt(share, candidate.drop, candidate.passed, candidate.order(self.optimize)[0]))
            if move is self.framework.moves[0] and (candidate.chance or 0.0) < SAFE:
                self.unsure.append(asked[move.axes[0]])
            if candidate.passed:
                state, best = tried, attempts[-1]
                if self.config.warm_start:
                    impossible.clear()
        return state, multiplied(kept, move, best.share)

    def _stepping(self, start: State, move: Move, budget: Budget) -> Stepping:
        """Return the rule for the next share; aim at half of the budget where there must be room for certification."""
        config, reference = self.config, self.value(self.trials[0].state)
        allowed = reference - budget.least_accuracy(reference)
        return Stepping(
            allowed=allowed if self.confirming is None else allowed / 2,
            step=config.step,
            tolerance=config.tolerance,
            smallest=config.smallest,
            axes=axes_of(move, by_cost=self.pipeline.planner is not None),
            outlook=self.pipeline.outlook(start, move, config.smallest),
        )

    def _tuning(self, budget: Budget) -> Tuning:
        """Return how long candidates are tuned: until they are good enough or hopeless.

        If they are to be certified, none is good enough: one that passes on a few images in the middle of its tuning,
        at a high learning rate, was often lucky, and fails on the confirming images. Other metrics of classes than
        accuracy are not followed while training: all epochs are trained.
        """
        metric = None if self.standard is None else self.standard.promise.metric
        if self.config.tune_fully or not (metric == "accuracy" or isinstance(metric, Task)):
            return Tuning()
        limit = budget.least_accuracy(self.trials[0].candidate.accuracy)
        enough = None if self.confirming is not None else limit - EQUAL
        if isinstance(metric, Task) and not metric.is_share:
            return Tuning(enough=enough)  # how far is hopeless, nobody knows
        grace = max(math.ceil(self.pipeline.settings.finetune.epochs / _GRACE), _LEAST_GRACE)
        return Tuning(enough=enough, hopeless=limit - self.config.give_up_margin, grace=grace)

    def _fall_back(self, start: State, asked: Shares, budget: Budget) -> None:
        """Try a few larger networks for one that is all but sure to be certified, if the smaller ones fail.

        They are larger than all that were tried and are not.
        """
        move = self.framework.moves[0]
        foreseen = self.pipeline.settings.foresees(move)
        share = max((asked[move.axes[0]], *self.unsure))
        for _ in range(min(SAFER, self.config.tunings or SAFER)):
            if any((trial.candidate.chance or 0.0) >= SAFE for trial in self.trials[1:]):
                return
            share = (1 + share) / 2 if foreseen else share**_LARGER
            self.pipeline.notify.log("trying a larger network, to fall back on if the smaller ones are not certified")
            tuning = UNSEEN if foreseen else self._tuning(budget)
            tried = self.pipeline.prune(start, move, round(1 - share, 4), tuning)
            if removes_nothing(tried, start):
                return
            if foreseen:
                tried = self.pipeline.look(tried)
            self.judge(tried, multiplied(ALL, move, share))

    # Budgets of size or time

    def _reach_size(self, start: State, budget: Budget) -> None:
        """Prune as little as possible to become small enough; only the last candidate of each move is judged."""
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
                if removes_nothing(tried, state):
                    break
                state, share, kept = tried, share / step, multiplied(kept, move, step)
                if share >= 1.0 and more and not self._is_small_enough(state, budget):
                    share, more = 1 - self.config.tolerance / 4, more - 1
            if state is not before and self.judge(state, kept).passed:
                break

    def _share_for_size(self, start: State, move: Move, budget: Budget) -> float:
        """Return the largest share to keep that is small enough, found without tuning; the smallest if none is."""
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

    # How candidates are judged

    def _standard(self, promise: Guarantee | None) -> AcceptanceRule | None:
        """Return how candidates are judged; None for goals that are not about accuracy."""
        if not isinstance(self.goal, Budget) or not self.goal.is_about_accuracy:
            return None
        if promise is None:
            return AcceptanceRule(Guarantee(self.goal, metric=self.pipeline.task.budget_metric))
        confirm = self.pipeline.splits.confirm
        if confirm is None or not promise.reachable(confirm.labels, confirm.units):
            return AcceptanceRule(promise)
        return AcceptanceRule(promise, confirm.independent)

    @property
    def confirming(self) -> int | None:
        """On how many images candidates are to be certified; None if they pass by the estimate."""
        return None if self.standard is None else self.standard.confirming

    def _lower_standard(self) -> bool:
        """Judge by the estimate from now on, because none is likely to be certified; False if that is so already."""
        if self.standard is None or self.confirming is None:
            return False
        images = f"{self.confirming:,} images"
        self.pipeline.notify.log(f"no candidate is likely to be certified on {images}; searching by the estimate")
        self.standard = standard = replace(self.standard, confirming=None)
        reference = self.trials[0].state
        self.trials[1:] = [
            replace(trial, candidate=trial.candidate.judged_by(standard, trial.state, reference))
            for trial in self.trials[1:]
        ]
        return True

    def _unpruned(self, start: State) -> State:
        """Return the network that would be deployed unpruned: plainly trained, or as it was given if that is better.

        A split by the loss does not change it.
        """
        split_first = self.framework.start == DECOMPOSED.name and self.pipeline.settings.basis != "loss"
        plain, given = self.pipeline.dense() if split_first else start, self.pipeline.given()
        return given if self.value(given) > self.value(plain) else plain

    def value(self, state: State) -> float:
        metric = self.pipeline.task.budget_metric if self.standard is None else self.standard.promise.metric
        return value_of(metric, state.outcomes)

    def judge(self, state: State, kept: Shares) -> Candidate:
        """Add one more candidate to the trials, with the verdict on it; the first one is the reference."""
        reference = self.trials[0].state if self.trials else state
        candidate = Candidate.of(state, reference, self.scale.size(state), kept)
        if self.standard is not None:
            judged = candidate.judged_by(self.standard, state, reference)
            candidate = judged if self.trials else replace(judged, passed=True, undecided=False, chance=None)
        elif isinstance(self.goal, Budget):
            candidate = candidate.judged(self.goal)
        self.trials.append(Evaluated(candidate, state, self.scale.deployed(state)))
        self.pipeline.notify.shown(candidate.row)
        self.pipeline.notify.judged(candidate)
        return candidate

    def _to_test(self) -> tuple[int, ...]:
        """Return the places of the candidates to test on the confirming images, in order; those within the estimate."""
        if self.standard is None or self.confirming is None:
            return ()
        before = self.trials[0].state.outcomes
        entries = [
            Entry(index, trial.candidate.order(self.optimize)[0], trial.candidate.chance or 0.0)
            for index, trial in enumerate(self.trials)
            if index and self.standard.within(before, trial.state.outcomes)
        ]
        confirm = self.pipeline.splits.confirm
        return tuple(in_order(entries) if confirm is None or confirm.labelled else few_in_order(entries))

    @property
    def optimize(self) -> Optimize:
        return "params" if self.pipeline.planner is None else self.pipeline.planner.optimize

    def _best(self) -> int:
        """Return the place of the smallest candidate that passed (by latency, of the fastest), then the most accurate.

        For budgets of size, it is the most accurate that passed, or the smallest of all.
        """
        candidates = [trial.candidate for trial in self.trials]
        if isinstance(self.goal, Ratios):
            return len(candidates) - 1

        def size(index: int) -> tuple[float, ...]:
            candidate = candidates[index]
            accuracy = candidate.accuracy if candidate.score is None else candidate.score
            return (*candidate.order(self.optimize), -accuracy)

        passing = [index for index, candidate in enumerate(candidates) if candidate.passed]
        if self.goal.is_about_accuracy:
            return min(passing, key=size)
        if passing:
            return min(passing, key=lambda index: (-candidates[index].accuracy, *size(index)))
        return min(range(len(candidates)), key=size)
