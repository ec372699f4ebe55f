"""How labelled images are divided by default, so that a budget that they can certify is certified."""

from __future__ import annotations

import math
from dataclasses import dataclass

from basisprune.budget.certify import TYPICAL, Guarantee, images_needed
from basisprune.budget.evidence import NORMAL
from basisprune.budget.metrics import in_points, in_words

LEAST, MOST = 0.1, 0.4  # more would leave too few to train on; fewer only networks that lose nothing can pass
_SPARE = 1.02  # classes are divided to the nearest image
_LEAST_SEARCH = 30
_OTHER = 4  # metrics that weigh classes are tested on fewer images of each: this many times more, where there are more


@dataclass(frozen=True)
class Shares:
    """How many independent images search, confirm and test, and why; all others train.

    `search` and `confirm` are drawn from `images`, unless the data has `validation` images, which they divide.
    """

    images: int
    search: int
    confirm: int
    test: int
    reason: str
    validation: int | None = None

    @property
    def train(self) -> int:
        return self.images - self.test - (self.search + self.confirm if self.validation is None else 0)

    @property
    def fractions(self) -> tuple[float, float, float]:
        """The fractions that `load_data` takes: to validate and to test, and of the validation images to confirm."""
        judging = self.search + self.confirm
        return judging / self.images, self.test / self.images, self.confirm / judging if judging else 0.0

    @property
    def sentence(self) -> str:
        """What was chosen, why, and what it makes possible."""
        if self.validation is None:
            counts = {"train": self.train, "search": self.search, "confirm": self.confirm, "test": self.test}
            said = f"{self.images:,} labelled images", self.images
        else:
            counts = {"search": self.search, "confirm": self.confirm}
            said = f"the data's {self.validation:,} validation images", self.validation
        what, total = said
        parts = [f"{count / total:.0%} {name}" for name, count in counts.items() if count]
        if self.validation is not None and self.test:
            parts.append(f"{self.test / self.images:.0%} of the training images test")
        return f"{what}: {', '.join(parts)}; {self.reason}"


def shares(
    images: int,
    guarantee: Guarantee | None,
    *,
    unlabelled: bool = False,
    validation: int | None = None,
    has_test: bool = False,
) -> Shares:
    """Divide this many independent images; with `unlabelled` ones, or without a guarantee, none of these confirm.

    As many confirm as certify the budget in most cases, and at least 10%; if these are more than 40%, then 40%; and if
    these could not certify it, none, because they train a better network.

    >>> from basisprune.budget import Budget
    >>> shares(1000, Guarantee(Budget(max_drop=0.02))).sentence.partition(";")[0]
    '1,000 labelled images: 40% train, 15% search, 40% confirm, 5% test'
    >>> shares(1000, Guarantee(Budget(max_drop=0.01))).sentence.partition(";")[0]
    '1,000 labelled images: 80% train, 15% search, 5% test'
    """
    if validation is None:
        search = min(_searching(images), images - 1)
        least, most = math.floor(LEAST * images), math.floor(MOST * images)
    else:
        search, least = 0, validation // 2
        most = max(validation - max(_LEAST_SEARCH, math.ceil(0.2 * validation)), 0)
    confirm = 0 if unlabelled or guarantee is None else _confirming(guarantee, least, most)
    if validation is not None:
        search = validation - confirm
    drawn = search + confirm if validation is None else 0
    test = 0 if has_test else min(_testing(images), max(images - 1 - drawn, 0))
    if guarantee is None:
        reason = "no accuracy is to be certified"
    elif unlabelled:
        reason = "the images without labels confirm the budget"
    else:
        reason = _possible(guarantee, confirm) if confirm else _impossible(guarantee, most, validation)
    return Shares(images, search, confirm, test, reason, validation)


def _searching(images: int) -> int:
    """15% of few images, 10% of many, and some tens where there are."""
    return max(
        math.floor(0.1 * images),
        min(math.floor(0.15 * images), 300),
        min(_LEAST_SEARCH, round(0.2 * images)),
        1,
    )


def _testing(images: int) -> int:
    """5% of few images, 10% of many."""
    return min(math.ceil(0.1 * images), max(math.ceil(0.05 * images), math.ceil(0.2 * images) - 300))


def _confirming(guarantee: Guarantee, least: int, most: int) -> int:
    """How many images confirm, of the numbers that may; 0 if the most cannot certify the budget."""
    few, enough = (_needed(guarantee, power) for power in (0.5, 0.8))
    if few is None or enough is None or math.ceil(_SPARE * few) > most:
        return 0
    times = 1 if guarantee.metric == "accuracy" else _OTHER
    return min(max(math.ceil(_SPARE * times * enough), least), most)


def _needed(guarantee: Guarantee, power: float) -> int | None:
    """How many images certify in that share of cases; None if no number does, and as of accuracy for other metrics.

    The network loses none of its accuracy, or makes half of the errors that it may.
    """
    budget, confidence = guarantee.budget, guarantee.confidence
    if budget.max_drop is not None:
        drop = min(budget.max_drop, 1.0)
        return images_needed(drop, TYPICAL, confidence, power) if drop > 0 else None
    least = budget.value
    if not 0 < least < 1:
        return 1 if least <= 0 else None
    deviations = NORMAL.inv_cdf(confidence) + NORMAL.inv_cdf(power)
    perfect = math.log(1 - confidence) / math.log(least)
    return math.ceil(max(deviations**2 * (1 + least) / (1 - least), perfect))


def _possible(guarantee: Guarantee, confirm: int) -> str:
    """Say what this many images make possible."""
    wanted, enough = _wanted(guarantee), _needed(guarantee, 0.8)
    if not _is_plain_loss(guarantee):
        return f"{confirm:,} images may certify {wanted}"
    if enough is not None and confirm >= enough:
        return f"{confirm:,} images certify {wanted} in four of five cases, if the network loses none"
    return (
        f"{confirm:,} images, the most that are set aside, certify {wanted} in some cases, if the network loses none; "
        f"{enough:,} do in four of five"
    )


def _impossible(guarantee: Guarantee, most: int, validation: int | None) -> str:
    """Say why no images confirm, and what would have the budget certified."""
    wanted, enough = _wanted(guarantee), _needed(guarantee, 0.8)
    said = f"none confirm, because {most:,} could not certify {wanted}: the result will be an estimate"
    if enough is None:
        return f"{said}, as with any number of images"
    if not _is_plain_loss(guarantee):
        return f"{said}. What helps: more images, a looser budget"
    total = enough * _SPARE / (MOST if validation is None else 0.8)
    which = "labelled images" if validation is None else "validation images"
    return f"{said}. About {_rounded(total):,} {which}, or {enough:,} without labels (--unlabelled), would certify it"


def _rounded(number: float) -> int:
    """Round to two digits."""
    return int(float(f"{number:.1e}"))


def _is_plain_loss(guarantee: Guarantee) -> bool:
    return guarantee.metric == "accuracy" and guarantee.is_a_drop


def _wanted(guarantee: Guarantee) -> str:
    what, budget = in_words(guarantee.metric), guarantee.budget
    if budget.max_drop is not None:
        return f"a loss of {in_points(budget.max_drop)} of {what}"
    return f"{what} of at least {100 * budget.value:g}%"
