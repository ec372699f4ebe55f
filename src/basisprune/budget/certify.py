"""The budget as a guarantee: which test suits which metric, in which order candidates are tested, and the outcome."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from basisprune.budget import Budget
from basisprune.budget.evidence import NORMAL, Evidence
from basisprune.budget.means import BoundedMean, mean_loss
from basisprune.budget.metrics import Metric, check_metric, format_loss, format_value, in_words, metric_name, value_of
from basisprune.budget.proportions import Hits, Paired, WorstLoss, wilson_interval
from basisprune.budget.resampling import clustered, resample
from basisprune.errors import ConfigError
from basisprune.tasks import CLASSIFICATION, Outcomes, Predictions, Task
from basisprune.tasks.classification import Classes
from basisprune.tasks.outcomes import Units

Status: TypeAlias = Literal["certified", "estimated"]
T = TypeVar("T")

EQUAL = 1e-6  # accuracies are counted in float32 while training
LIKELY = 0.5  # the least chance to be certified with which a candidate passes on the validation images
SURE = 0.9  # the chance from which on a search needs no larger network to fall back on
TYPICAL = 0.05  # the share of images on which only one of two networks is right, where it is not known yet


def evidence_of(metric: Metric, before: Outcomes | None, after: Outcomes) -> Evidence:
    """Choose the test of a loss in the metric, of two networks on the same images.

    Without `before`, the loss is the metric itself, negated.
    """
    if isinstance(metric, Task) or not isinstance(after, Predictions):
        return mean_loss(before, after)
    assert before is None or isinstance(before, Predictions)
    if after.units is not None:
        return clustered(metric, before, after)
    if before is None and metric in ("accuracy", "worst-class"):
        return Hits.of(after, by_class=metric == "worst-class")
    if before is not None and metric == "accuracy":
        return Paired.of(before.hits, after.hits)
    if before is not None and metric == "worst-class":
        return WorstLoss.of(before, after)
    return resample(metric, before, after)


def loss_of(before: Outcomes, after: Outcomes) -> Evidence:
    """Describe the loss in the metric of the task; of an accuracy, each image counts as one, whatever its unit."""
    if isinstance(before, Predictions) and isinstance(after, Predictions):
        return Paired.of(before.hits, after.hits)
    return mean_loss(before, after)


def interval_of(outcomes: Outcomes) -> tuple[float, float]:
    """Return the 95% interval of the task's metric; of an accuracy, each image counts as one, whatever its unit."""
    if isinstance(outcomes, Predictions):
        return wilson_interval(int(outcomes.hits.sum()), len(outcomes.hits))
    low, high = mean_loss(None, outcomes).interval()
    return -high, -low


@dataclass(frozen=True)
class Test:
    """A candidate on the confirming images, against the hypothesis that it loses more than the budget.

    `before` and `after` are the metric of the unpruned network and of this one. `bound` is the most that the true loss
    may be, with the one-sided confidence of the promise; for a budget of a least value, the least that it may be.
    `lost` and `won` count the images that only the unpruned network or only this one gets right; of tasks with a number
    for each example, those that get worse or better.
    """

    index: int
    name: str
    before: float
    after: float
    bound: float
    p_value: float
    lost: int
    won: int
    passed: bool

    __test__ = False  # not for pytest


@dataclass(frozen=True)
class Certificate:
    """What is known of the budget at the end: "certified" by a test on held-out images, or "estimated".

    `tests` are in the order in which they were made, from the largest or slowest candidate on: the first that fails
    ends them, so that all together err with at most 1 - `confidence`. `images` were tested; `units` of them are
    independent, if some are copies of others or of one group. `reason` says why nothing is certified, and `computed_by`
    which program ran the networks. Of images that have no labels, `labelled` were labelled because networks differ on
    them; the values before and after are then that of the unpruned network on the validation images, and what is lost.
    """

    status: Status
    confidence: float
    metric: str
    images: int
    reason: str = ""
    computed_by: str = ""
    tests: tuple[Test, ...] = ()
    units: int | None = None
    labelled: int | None = None

    @property
    def independent(self) -> int:
        return self.images if self.units is None else self.units

    def tested_on(self, what: str) -> str:
        """The number of images, or of `what` else, and of independent units among them.

        >>> Certificate("certified", 0.95, "accuracy", 720, units=12).tested_on("images")
        '12 independent units (720 images; copies and groups count as one)'
        """
        every = f"{self.images:,} {what}"
        if self.labelled is not None:
            return f"{every} without labels, of which {self.labelled:,}, where answers differ, were labelled"
        if self.independent == self.images:
            return every
        return f"{self.independent:,} independent units ({every}; copies and groups count as one)"

    @property
    def certified(self) -> bool:
        """Whether the delivered network is certified to keep to the budget."""
        return self.status == "certified"

    @property
    def delivered(self) -> Test | None:
        """The last test that passed: that of the delivered network."""
        return next((test for test in reversed(self.tests) if test.passed), None)


@dataclass(frozen=True)
class Guarantee:
    """What is promised: to keep to the budget, counted in the metric, with this confidence.

    >>> Guarantee(Budget(max_drop=0.01), confidence=95)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    basisprune.errors.ConfigError: Guarantee: confidence: 95 given; ...
    """

    budget: Budget
    confidence: float = 0.95
    metric: Metric = "accuracy"

    def __post_init__(self) -> None:
        faults = check_metric(self.metric) + check_confidence(self.confidence)
        if faults:
            raise ConfigError.of("Guarantee", faults)

    @property
    def is_a_drop(self) -> bool:
        """Whether the budget is a loss in relation to the unpruned network."""
        return self.budget.max_drop is not None

    @property
    def margin(self) -> float:
        """The loss that is allowed; for a budget of a least value, that value negated."""
        return self.budget.value if self.is_a_drop else -self.budget.value

    @property
    def examples(self) -> str:
        return (self.metric if isinstance(self.metric, Task) else CLASSIFICATION).examples

    def evidence(self, before: Outcomes, after: Outcomes) -> Evidence:
        return evidence_of(self.metric, before if self.is_a_drop else None, after)

    def keeps(self, evidence: Evidence) -> bool:
        """Whether the budget is kept beyond doubt, as far as the confidence goes."""
        return evidence.p_value(self.margin) <= 1 - self.confidence + 1e-12

    def chance(self, evidence: Evidence, seen: int, images: int) -> float:
        """The chance that a test on that many other images passes, as far as `seen` images can tell."""
        expected = evidence.expected_score(self.margin, images / seen)
        return NORMAL.cdf((NORMAL.inv_cdf(1 - self.confidence) - expected) / math.sqrt(1 + images / seen))

    def reachable(self, labels: Classes, units: Units | None = None) -> bool:
        """Whether a network that gets all images of these labels right is certified on them; `units` belong together.

        If not, there are too few of them for any network. A metric of any task needs limits.
        """
        perfect = Predictions(labels, np.ones(len(labels)), labels, units)
        if isinstance(self.metric, Task):
            limits, count = self.metric.range, len(perfect)
            if limits is None or count < 2:
                return self.metric.is_bounded and count > 1
            low, high = limits
            best, ends = (0.0, (high - low, low - high)) if self.is_a_drop else (-high, (-low, -high))
            return self.keeps(BoundedMean(np.full(count, best), *ends))
        try:
            return self.keeps(self.evidence(perfect, perfect))
        except ConfigError:  # a function that cannot be computed for perfect answers
            return True

    def test(self, index: int, name: str, before: Outcomes, after: Outcomes) -> Test:
        """Test a candidate on the confirming images."""
        evidence = self.evidence(before, after)
        bound, (lost, won) = evidence.upper(self.confidence), before.lost_and_won(after)
        passed = self.keeps(evidence)
        # Bounds are found in steps, which must not contradict the test.
        bound = min(bound, self.margin) if passed else max(bound, self.margin)
        return Test(
            index,
            name,
            value_of(self.metric, before),
            value_of(self.metric, after),
            bound if self.is_a_drop else -bound,
            evidence.p_value(self.margin),
            lost,
            won,
            passed,
        )


def check_confidence(confidence: float) -> list[str]:
    """List the faults of a confidence."""
    if 0.5 <= confidence < 1:
        return []
    return [f"confidence: {confidence} given; it is a fraction, 0.5 <= confidence < 1 (95% is 0.95)"]


@dataclass(frozen=True)
class AcceptanceRule:
    """How the search judges candidates, on its own images.

    With this many `confirming` units to come, a candidate passes if it is likely to be certified on them: that
    asks for a margin, the bound and not the estimate. With None it passes by the estimate.
    """

    promise: Guarantee
    confirming: int | None = None

    def chance(self, before: Outcomes, after: Outcomes) -> float | None:
        """Return the chance to be certified; None where nothing will be."""
        if self.confirming is None:
            return None
        return self.promise.chance(self.promise.evidence(before, after), len(after), self.confirming)

    def passes(self, before: Outcomes, after: Outcomes) -> bool:
        chance = self.chance(before, after)
        return self.within(before, after) if chance is None else chance >= LIKELY

    def within(self, before: Outcomes, after: Outcomes) -> bool:
        """Whether the candidate is within the budget by the estimate."""
        value = value_of(self.promise.metric, after)
        return value >= self.promise.budget.least_accuracy(value_of(self.promise.metric, before)) - EQUAL


@dataclass(frozen=True)
class Entry:
    """A candidate that may be tested: its place among all, its size, and its chance to be certified."""

    index: int
    size: float
    chance: float


def in_order(entries: Sequence[Entry]) -> list[int]:
    """Return the places of the candidates in the order of their tests, from the largest or slowest to the smallest.

    One that is at least as large as another and not more likely to pass is left out: its failure would end the
    tests before a better one had its turn (the Pareto front, as in Pareto Testing; Laufer-Goldshtein et al., 2023).

    >>> in_order([Entry(1, 900, 0.9), Entry(2, 500, 0.99), Entry(3, 300, 0.7), Entry(4, 200, 0.4)])
    [2, 3, 4]
    """
    order: list[int] = []
    best = -1.0
    for entry in sorted(entries, key=lambda each: (each.size, -each.chance)):
        if entry.chance > best:
            order.append(entry.index)
            best = entry.chance
    return order[::-1]


def few_in_order(entries: Sequence[Entry]) -> list[int]:
    """Return at most two of them, because each test takes labels: the smallest that is sure to pass, and a likely one.

    >>> few_in_order([Entry(1, 900, 0.99), Entry(2, 500, 0.95), Entry(3, 300, 0.7), Entry(4, 200, 0.4)])
    [2, 3]
    """
    order, chances = in_order(entries), {entry.index: entry.chance for entry in entries}
    found = (next((index for index in order[::-1] if chances[index] >= least), order[0]) for least in (SURE, LIKELY))
    return list(dict.fromkeys(found)) if order else []


def certify(promise: Guarantee, images: int, candidates: Iterable[T], test: Callable[[T], Test]) -> Certificate:
    """Test the candidates in the given order, until one fails; the last that passed is certified.

    `test` is called for each that is tested, once, on this many `images`.
    """
    tests: list[Test] = []
    for candidate in candidates:
        tests.append(test(candidate))
        if not tests[-1].passed:
            break
    certificate = Certificate("certified", promise.confidence, metric_name(promise.metric), images, tests=tuple(tests))
    if certificate.delivered is not None:
        return certificate
    reason = "no candidate is likely enough to keep to the budget"
    if tests:
        reason = failure(promise, tests[0], images)
    return replace(certificate, status="estimated", reason=reason)


def failure(promise: Guarantee, test: Test, images: int) -> str:
    """Say why a test did not pass, in a clause."""
    what, sure = in_words(promise.metric), f"{100 * promise.confidence:.3g}% confidence"
    on = f"on the {images:,} confirming {promise.examples}"
    if promise.is_a_drop:
        lost, bound = (format_loss(promise.metric, loss) for loss in (test.before - test.after, test.bound))
        return f"{on} it loses {lost} of {what}, and the true loss may be up to {bound.split()[0]} with {sure}"
    value, bound = (format_value(promise.metric, each) for each in (test.after, test.bound))
    return f"{on} its {what} is {value}, and the true one may be as low as {bound} with {sure}"


def certifiable(images: int, differing: float = TYPICAL, confidence: float = 0.95) -> float:
    """The loss of accuracy that this many images certify for a network that loses none on them.

    `differing` is the share of images on which only one of the two networks is right.

    >>> round(certifiable(400), 4)
    0.0195
    """
    half = images * differing / 2
    return Paired(half, half, images).upper(confidence)


def images_needed(drop: float, differing: float = TYPICAL, confidence: float = 0.95, power: float = 0.8) -> int:
    """How many confirming images certify a loss of at most `drop`, in most cases, of a network that loses none.

    `power` is the share of cases in which they do.

    >>> images_needed(0.01)
    3199
    """
    wanted = NORMAL.inv_cdf(1 - confidence) - NORMAL.inv_cdf(power)

    def certainty(images: int) -> float:
        half = images * differing / 2
        return -Paired(half, half, images).score(drop)

    return 1 + bisect_left(range(1, 1 << 40), -wanted, key=certainty)
