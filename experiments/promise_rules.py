"""Ladders -> how often each rule breaks the budget, and what it costs: many searches on images drawn anew each time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from promise_ladder import Ladder

from basisprune.budget import Budget
from basisprune.budget.certify import AcceptanceRule, Entry, Guarantee, Test, certify, few_in_order, in_order
from basisprune.budget.looks import UNLABELLED as NO_LABEL
from basisprune.budget.looks import Differences, SequentialTest
from basisprune.budget.proportions import Paired
from basisprune.tasks import Predictions

Bools = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]
OLD, BOUND, CERTIFIED, UNLABELLED = "old rule", "bound alone", "certified", "unlabelled"
RULES = (OLD, BOUND, CERTIFIED, UNLABELLED)
_RESAMPLED = 2000


@dataclass(frozen=True)
class Setting:
    """So many validation images, and the loss that is allowed; half of the images confirm where a rule wants that.

    For the rule "unlabelled", the half that confirms has no labels but those that are asked for.
    """

    images: int
    max_drop: float


SETTINGS = tuple(Setting(images, drop) for drop in (0.01, 0.02) for images in (2000, 4000))


@dataclass(frozen=True)
class Outcome:
    """What a rule delivered in one search: a rung, 0 for the unpruned one, and its loss on all images never used.

    `labels` of images that confirm were used.
    """

    rung: int
    drop: float
    parameters: int
    labels: int = 0


@dataclass(frozen=True)
class Rate:
    """A share of all runs, with its 95 % interval over the ladders they come from."""

    share: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Result:
    """A rule in a setting: in how many of all runs it delivered a pruned network, and how often that broke the budget.

    `cost` are its parameters in relation to those of the old rule in the same run, as the geometric mean of the runs
    in which it delivered a pruned network. `size` is the median of its parameters in relation to those of the rule
    "certified", where both deliver one. `labels` are the median and the 90th percentile of those used to confirm.
    Without a setting, it is about all of them.
    """

    rule: str
    setting: Setting | None
    delivered: float
    broken: Rate | None
    cost: float | None
    labels: tuple[float, float] = (0.0, 0.0)
    size: float | None = None


@dataclass(frozen=True)
class Choice:
    """The rung that a rule delivers, 0 for the unpruned network, and the labels that it took to confirm it."""

    rung: int
    labels: int = 0


def answers(hits: Bools) -> Predictions:
    """Hits as predictions of one class."""
    ones = np.ones(len(hits), dtype=np.int64)
    return Predictions(hits.astype(np.int64), np.ones(len(hits)), ones)


def old_rule(ladder: Ladder, images: Numbers, setting: Setting) -> Choice:
    """The smallest network that is within the budget by the estimate of all validation images."""
    rule = AcceptanceRule(Guarantee(Budget(max_drop=setting.max_drop)))
    return _smallest(ladder, lambda hits: rule.passes(answers(ladder.hits[0, images]), answers(hits[images])))


def bound_alone(ladder: Ladder, images: Numbers, setting: Setting) -> Choice:
    """The smallest network whose bound on all validation images is within the budget, as if it were the only one."""
    guarantee = Guarantee(Budget(max_drop=setting.max_drop))
    return _smallest(ladder, lambda hits: guarantee.keeps(Paired.of(ladder.hits[0, images], hits[images])))


def candidates(ladder: Ladder, search: Numbers, confirming: int, guarantee: Guarantee) -> list[Entry]:
    """The rungs that may be tested, after a search on these images."""
    rule, before = AcceptanceRule(guarantee, confirming), answers(ladder.hits[0, search])
    entries = []
    for rung, hits in list(enumerate(ladder.hits))[1:]:
        after = answers(hits[search])
        if rule.within(before, after):
            entries.append(Entry(rung, ladder.rungs[rung].parameters, rule.chance(before, after) or 0.0))
    return entries


def certified(ladder: Ladder, images: Numbers, setting: Setting) -> Choice:
    """The network that is certified on half of the images, after a search on the others; 0 if none is."""
    search, confirm = np.split(images, 2)
    guarantee = Guarantee(Budget(max_drop=setting.max_drop))
    reference = answers(ladder.hits[0, confirm])

    def test(rung: int) -> Test:
        return guarantee.test(rung, str(ladder.rungs[rung].share), reference, answers(ladder.hits[rung, confirm]))

    order = in_order(candidates(ladder, search, len(confirm), guarantee))
    delivered = certify(guarantee, len(confirm), order, test).delivered
    return Choice(delivered.index if delivered else 0, len(confirm))


def unlabelled(ladder: Ladder, images: Numbers, setting: Setting) -> Choice:
    """The same, where labels are given in random order only to images on which answers differ, until all is decided."""
    search, confirm = np.split(images, 2)
    test, guarantee = SequentialTest(len(confirm), setting.max_drop), Guarantee(Budget(max_drop=setting.max_drop))
    said, hits = ladder.answers[:, confirm], ladder.hits[:, confirm].astype(np.int8)
    known, delivered = np.zeros(len(confirm), dtype=np.bool_), 0
    for rung in few_in_order(candidates(ladder, search, len(confirm), guarantee)):
        if not _passes_with_labels(test, hits[0] - hits[rung], said[rung] != said[0], known):
            break
        delivered = rung
    return Choice(delivered, int(known.sum()))


def _passes_with_labels(test: SequentialTest, differences: Differences, differs: Bools, known: Bools) -> bool:
    """Label until the test is decided, which is noted in `known`; whether it passes."""
    asked = np.flatnonzero(differs & ~known)

    def decide(labels: int) -> bool | None:
        hidden = differs & ~known
        hidden[asked[:labels]] = False
        return test.decide(np.where(hidden, NO_LABEL, differences).astype(np.int8)).passed

    count = bisect_left(range(len(asked)), True, key=lambda labels: decide(labels) is not None)
    passed = decide(count) is True
    known[asked[:count]] = True
    return passed


_CHOICES = {OLD: old_rule, BOUND: bound_alone, CERTIFIED: certified, UNLABELLED: unlabelled}


def _smallest(ladder: Ladder, passes: Callable[[Bools], bool]) -> Choice:
    rungs = range(len(ladder.rungs) - 1, 0, -1)
    return Choice(next((rung for rung in rungs if passes(ladder.hits[rung])), 0))


def searches(ladder: Ladder, setting: Setting, draws: int) -> Iterator[dict[str, Outcome]]:
    """What each rule delivers in so many searches, each with validation images of its own; all others judge."""
    random = np.random.default_rng((ladder.seed, setting.images))
    for _ in range(draws):
        order = random.permutation(ladder.hits.shape[1])
        images, rest = order[: setting.images], order[setting.images :]
        outcomes = {}
        for rule, choose in _CHOICES.items():
            chosen = choose(ladder, images, setting)
            drop = Paired.of(ladder.hits[0, rest], ladder.hits[chosen.rung, rest]).drop
            outcomes[rule] = Outcome(chosen.rung, drop, ladder.rungs[chosen.rung].parameters, chosen.labels)
        yield outcomes


def judge(ladders: Sequence[Ladder], draws: int) -> list[Result]:
    """All rules in each setting, and in all of them together, over all ladders."""
    results: list[Result] = []
    together: list[list[Run]] = [[] for _ in ladders]
    for setting in SETTINGS:
        runs = [[Run(setting, found) for found in searches(ladder, setting, draws)] for ladder in ladders]
        results += [_result(rule, setting, runs) for rule in RULES]
        for all_, some in zip(together, runs, strict=True):
            all_ += some
    return results + [_result(rule, None, together) for rule in RULES]


@dataclass(frozen=True)
class Run:
    """What each rule delivered in one search."""

    setting: Setting
    outcomes: dict[str, Outcome]

    def broken(self, rule: str) -> bool:
        """Whether the rule broke the budget."""
        return self.outcomes[rule].drop > self.setting.max_drop

    def cost(self, rule: str) -> float:
        """The rule's parameters in relation to the old rule's."""
        return self.outcomes[rule].parameters / self.outcomes[OLD].parameters


def _result(rule: str, setting: Setting | None, runs: Sequence[Sequence[Run]]) -> Result:
    mine = [[run for run in ladder if run.outcomes[rule].rung] for ladder in runs]
    count = sum(map(len, mine))
    if not count:
        return Result(rule, setting, 0.0, None, None)
    rate = clustered([sum(run.broken(rule) for run in ladder) for ladder in mine], [len(ladder) for ladder in mine])
    logs = [math.log(run.cost(rule)) for ladder in mine for run in ladder]
    median, most = np.quantile([run.outcomes[rule].labels for ladder in runs for run in ladder], (0.5, 0.9))
    labels = float(median), float(most)
    both = [run.outcomes for ladder in mine for run in ladder if run.outcomes[CERTIFIED].rung]
    sizes = [found[rule].parameters / found[CERTIFIED].parameters for found in both]
    cost, size = math.exp(sum(logs) / len(logs)), float(np.median(sizes)) if sizes else None
    return Result(rule, setting, count / sum(map(len, runs)), rate, cost, labels, size)


def clustered(hits: Sequence[int], counts: Sequence[int]) -> Rate:
    """The share of hits among all counts, with the interval of a bootstrap over the clusters.

    >>> clustered([1, 0], [10, 10]).share
    0.05
    """
    right, all_ = np.array(hits, dtype=np.float64), np.array(counts, dtype=np.float64)
    drawn = np.random.default_rng(0).integers(0, len(right), (_RESAMPLED, len(right)))
    totals = all_[drawn].sum(1)
    shares = right[drawn].sum(1)[totals > 0] / totals[totals > 0]
    low, high = np.quantile(shares, (0.025, 0.975))
    return Rate(float(right.sum() / all_.sum()), (float(low), float(high)))
