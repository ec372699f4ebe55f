"""Down to the smallest network that passes, by short tunings: only what promises to pass is tuned for all epochs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from basisprune.callback import Row
from basisprune.errors import TooMuchError
from basisprune.method.states import UNSEEN, State
from basisprune.recipes import Move
from basisprune.search.candidates import Shares, share_of
from basisprune.search.stepping import SAFE, Attempt, Recovery, Stepping
from basisprune.torchkit.processes import Processes

if TYPE_CHECKING:
    from basisprune.search.search import Search

_LOOKS = 3
"""So many short tunings for each full one."""


@dataclass
class Look:
    """A share that was tried: its network, what that lost after a short tuning, and after a full one if it had one."""

    share: float
    state: State
    briefly: float
    fully: float | None = None
    passed: bool = False
    size: float | None = None

    def attempt(self, recovery: Recovery, allowed: float) -> Attempt:
        """Return what is known of it, or expected."""
        if self.fully is not None:
            return Attempt(self.share, self.fully, self.passed, self.size)
        expected = recovery.expected(self.briefly)
        return Attempt(self.share, expected, passed=expected <= allowed)


class Descent:
    """One move of a search, whose scores foresee the loss.

    Ever smaller networks are tuned briefly, each from the last that promises to pass. When none smaller promises to,
    the smallest that does is tuned for all epochs, and what that gains corrects what is expected of the others.
    """

    def __init__(self, search: Search, move: Move, start: State, kept: Shares, stepping: Stepping) -> None:
        self.search, self.move, self.start, self.kept, self.stepping = search, move, start, kept, stepping
        self.looks: list[Look] = []
        self.impossible: list[Attempt] = []  # from the state that is pruned now; a smaller one may well lose as much
        self.recovery, self.tunings = Recovery(), 0
        self.most = search.config.tunings or math.inf

    def run(self) -> tuple[State, Shares]:
        """Return the state with the smallest share that passes, and what it keeps; the start if none does."""
        while not (self.tunings >= self.most and self._smallest(passed=True)):
            best = self._smallest()
            enough = best is not None and len(self.looks) >= _LOOKS * self.most
            share = None if enough else agreed(self.stepping.next_share(self._attempts))
            if share is not None:
                self._look(share)
            elif best is not None and best.fully is None:
                self._tune(best)
            else:
                break
        passed = self._smallest(passed=True)
        if passed is None:
            return self.start, self.kept
        return passed.state, multiplied(self.kept, self.move, passed.share)

    @property
    def _attempts(self) -> list[Attempt]:
        return [*(look.attempt(self.recovery, self.stepping.allowed) for look in self.looks), *self.impossible]

    def _smallest(self, *, passed: bool = False) -> Look | None:
        """Return the smallest network that passed, or promises to pass."""
        found = [
            look
            for look in self.looks
            if (look.passed if passed else look.attempt(self.recovery, self.stepping.allowed).passed)
        ]
        return min(found, key=lambda look: look.share, default=None)

    def _look(self, share: float) -> None:
        """Prune to the share, from the smallest larger network that promises to pass, and tune it briefly."""
        search, done = self.search, 1.0
        source, best = self.start, self._smallest()
        if best is not None and search.config.warm_start:
            source, done = best.state, best.share
        try:
            pruned = search.pipeline.prune(source, self.move, round(1 - share / done, 4), UNSEEN)
        except TooMuchError:
            search.pipeline.notify.log(f"{1 - share / done:.0%} cannot be removed; trying less")
            self.impossible.append(Attempt(share, math.inf, passed=False))
            return
        if removes_nothing(pruned, source):  # so that more must go at once
            self.impossible.append(Attempt(share, 0.0, passed=True))
            return
        self._show(share, "tuning briefly")
        state = search.pipeline.look(pruned)
        look = Look(share, state, search.value(search.trials[0].state) - search.value(state))
        self.looks.append(look)
        found = look.attempt(self.recovery, self.stepping.allowed)
        if found.passed:
            self.impossible.clear()
        self._show(share, "promising" if found.passed else "too small", state)

    def _show(self, share: float, status: str, state: State | None = None) -> None:
        """Report the network that keeps the share in the live table, and the outcome of a short tuning as a line."""
        task, notify = self.search.pipeline.task, self.search.pipeline.notify
        value = "" if state is None else task.format(self.search.value(state))
        parameters = None if state is None else state.stages[-1].parameters
        name = self._name(share)
        notify.shown(Row(name, status, parameters, value=value))
        if state is not None:
            notify.log(f"without {name}: {task.metric_name} {value} after a short tuning, {status}")

    def _name(self, share: float) -> str:
        kept = multiplied(self.kept, self.move, share)
        return ", ".join(f"{share_of(1 - kept[axis])} of the {axis}" for axis in ("basis", "filters") if kept[axis] < 1)

    def _tune(self, look: Look) -> None:
        """Tune the network for all epochs, and judge it."""
        asked = multiplied(self.kept, self.move, look.share)
        self._show(look.share, "tuning")
        look.state = self.search.pipeline.tune_fully(look.state)
        candidate = self.search.judge(look.state, asked)
        self.tunings += 1
        look.fully, look.passed = candidate.drop, candidate.passed
        look.size = candidate.order(self.search.optimize)[0]
        self.recovery.note(look.briefly, candidate.drop)
        if self.move is self.search.framework.moves[0] and (candidate.chance or 0.0) < SAFE:
            self.search.unsure.append(asked[self.move.axes[0]])


def agreed(share: float | None) -> float | None:
    """Return the share that the main process tries next, so that all processes of a distributed run prune the same."""
    processes = Processes.here()
    if processes.count == 1:
        return share
    agreed: float | None = json.loads(processes.from_main(lambda: json.dumps(share).encode()))
    return agreed


def multiplied(kept: Shares, move: Move, share: float) -> Shares:
    """Return the shares, with those of the move's axes reduced further."""
    return {**kept, **{axis: kept[axis] * share for axis in move.axes}}


def removes_nothing(state: State, source: State) -> bool:
    """Whether the plans since `source` remove nothing, because a block of `round_to` is more than was requested."""
    plans = state.plans[len(source.plans) :]
    return bool(plans) and all(plan.removed == 0 for plan in plans)
