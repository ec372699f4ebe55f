"""A network that is given as trained: whether its classes are those of the data, in their order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import nn

from basisprune.callback import Callback
from basisprune.data import LabelledImages, LoaderPart, Splits, take
from basisprune.errors import ModelError
from basisprune.tasks import Predictions
from basisprune.training.evaluation import predict
from basisprune.training.trainable import classes_of

MOST_IMAGES = 512
_DEVIATIONS = 3.0  # how far above guessing an accuracy must be
_MUCH = 0.2
_LUCK = 1e-3  # how seldom an order that suits the answers may be one by chance
_LISTED = 10
_PREPARED = (
    "its images were prepared in another way: pass the mean, std, size and interpolation that it was trained with"
)


def check_classes(network: nn.Module, splits: Splits, names: Sequence[str] | None, callback: Callback) -> None:
    """Raises ModelError unless a network that keeps its head has the classes of the data.

    `names` are what the network calls them, if it is known. Where they are others, the callback is told what was made
    of them; where they are those of the data in another order, that is refused.
    """
    found, wanted = classes_of(network), splits.num_classes
    if found != wanted:
        raise ModelError(
            f"keep_head: the network distinguishes {found} classes, and the data has {wanted} "
            f"({_listed(splits.classes)}); pass the data that it was trained for, or omit keep_head for a new head"
        )
    if names is None or tuple(names) == tuple(splits.classes):
        return
    if sorted(names) == sorted(splits.classes):
        raise ModelError(
            f"keep_head: the network has its classes in the order {_listed(names)}, and the data in the order "
            f"{_listed(splits.classes)}, which is that of sorted folder names; reorder the rows of its last layer, or "
            "name the folders so that they sort as the network has them"
        )
    callback.log(f"the network's classes {_listed(names)} are taken for {_listed(splits.classes)}, in this order")


def refuse_guessing(network: nn.Module, splits: Splits, *, callback: Callback) -> None:
    """Raises ModelError if a network that is given as trained knows nothing of the validation images.

    It then most likely has its classes in another order, or wants its images prepared in another way. If another order
    would suit its answers much better, but it is above guessing, the callback is told.
    """
    images = _some(splits.val or splits.train)
    outcome = Outcome.of(predict(network, images), splits.num_classes)
    if outcome.is_guessing:
        raise ModelError(
            f"keep_head: the network gets {outcome.accuracy:.1%} of {len(images)} validation images right, and "
            f"guessing gets {outcome.chance:.1%}; {_why(outcome, splits.classes)}, or pass tune_first (--tune-first) "
            "to train it on your images before it is pruned"
        )
    if outcome.fits_another_order:
        callback.log(
            f"warning: the network gets {outcome.accuracy:.1%} of the validation images right, and would get "
            f"{outcome.reordered:.1%} with its classes in another order; check that it has them as the data: "
            f"{_listed(splits.classes)}"
        )


@dataclass(frozen=True)
class Outcome:
    """How many answers are right, how many would be by guessing as often, and if each class were called differently.

    `chance` is the accuracy of answers as frequent as these that know nothing of the images; `reordered` that with the
    classes called what they most often are, None where two would be called the same, or where luck may have found that
    order: among few images, some order suits any answers.
    """

    images: int
    accuracy: float
    chance: float
    reordered: float | None = None

    @classmethod
    def of(cls, said: Predictions, classes: int) -> Outcome:
        """What became of these predictions.

        >>> said = Predictions(np.array([1, 2, 0] * 9), np.ones(27), np.array([0, 1, 2] * 9))
        >>> outcome = Outcome.of(said, 3)
        >>> outcome.accuracy, round(outcome.chance, 3), outcome.reordered, outcome.is_guessing
        (0.0, 0.333, 1.0, True)
        """
        counts: npt.NDArray[np.int64] = np.zeros((classes, classes), dtype=np.int64)  # answers x labels
        np.add.at(counts, (np.asarray(said.classes), np.asarray(said.labels)), 1)
        total = int(counts.sum())
        shares = counts / max(total, 1)
        meant = counts.argmax(axis=1)
        given = counts.sum(axis=1) > 0
        is_order = len(set(meant[given].tolist())) == int(given.sum())
        right = float(shares[np.arange(classes), meant].sum())
        chance = float(shares.sum(axis=1) @ shares.sum(axis=0))
        is_known = is_order and not _may_be_luck(right, counts)
        return cls(total, float(np.trace(shares)), chance, right if is_known else None)

    @property
    def is_guessing(self) -> bool:
        """Whether the accuracy is not clearly above that of guessing."""
        deviation = math.sqrt(self.chance * (1 - self.chance) / max(self.images, 1))
        # So few images that even all of them right would be no more than luck decide nothing.
        if self.chance + _DEVIATIONS * deviation >= 1:
            return self.accuracy < self.chance
        return self.accuracy <= self.chance + min(_DEVIATIONS * deviation, (1 - self.chance) / 2)

    @property
    def fits_another_order(self) -> bool:
        """Whether the answers would be much better with the classes in another order."""
        return self.reordered is not None and self.reordered > self.accuracy + _MUCH


def _may_be_luck(right: float, counts: npt.NDArray[np.int64]) -> bool:
    """Whether some order may make this share of answers right although they know nothing of the images.

    One order does with a chance of at most exp(-n KL(right, p)) for n images, p of which have the most frequent label
    (Chernoff); any order with that times the number of orders of the answers that there are.
    """
    classes, images = len(counts), int(counts.sum())
    if images == 0:
        return True
    said, most = int((counts.sum(axis=1) > 0).sum()), float(counts.sum(axis=0).max()) / images
    if right <= most or most == 1:
        return True
    divergence = right * math.log(right / most)
    if right < 1:
        divergence += (1 - right) * math.log((1 - right) / (1 - most))
    orders = math.lgamma(classes + 1) - math.lgamma(classes - said + 1)
    return images * divergence < orders - math.log(_LUCK)


def _some(images: LabelledImages) -> LabelledImages:
    """As many images as tell whether a network knows anything, from everywhere; all of somebody's own loader."""
    step = max(1, math.ceil(len(images) / MOST_IMAGES))
    return images if step == 1 or isinstance(images, LoaderPart) else take(images, range(0, len(images), step))


def _why(outcome: Outcome, classes: Sequence[str]) -> str:
    if outcome.fits_another_order:
        return (
            f"with its classes in another order it would get {outcome.reordered:.1%}: it must have them as the data, "
            f"which has them sorted by name: {_listed(classes)}. Reorder the rows of its last layer; if the order is "
            f"right, {_PREPARED}"
        )
    return f"either its classes are not in the order of the data ({_listed(classes)}, sorted by name), or {_PREPARED}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_LISTED]) + (", ..." if len(names) > _LISTED else "")
