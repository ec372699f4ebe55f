"""How far the loss in any metric can be trusted: a bootstrap of the images that both networks saw."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from basisprune.training.metrics import Classes, Counts, Metric, of_counts, value_of
from basisprune.training.predict import Predictions

_DRAWS, _CALLS = 2000, 500  # for the named metrics, and for a function, which is called twice for each
_BLOCK = 100  # draws at a time, which bounds the memory
_PSEUDO = 0.5


@dataclass(frozen=True)
class Resampled:
    """A loss, and the losses that other images of the same kind might have shown, sorted."""

    drop: float
    draws: Counts

    @property
    def spread(self) -> float:
        """The standard deviation of the loss."""
        return float(self.draws.std())

    def p_value(self, margin: float) -> float:
        """The chance of a loss as small as this if the true one is `margin`: the larger by two approximations.

        One takes the loss for normal, the other takes the draws as they are.
        """
        beyond = (1 + float((self.draws >= margin).sum())) / (1 + len(self.draws))
        spread = self.spread
        normal = NormalDist().cdf((self.drop - margin) / spread) if spread > 0 else float(self.drop >= margin)
        return max(beyond, normal)

    def upper(self, confidence: float) -> float:
        """The loss that the true one does not exceed, with this one-sided confidence."""
        normal = self.drop + NormalDist().inv_cdf(confidence) * self.spread
        return max(normal, float(np.quantile(self.draws, confidence, method="higher")))

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """The two-sided interval of the loss."""
        one_sided = (1 + confidence) / 2
        return -Resampled(-self.drop, -self.draws[::-1]).upper(one_sided), self.upper(one_sided)


def resample(metric: Metric, before: Predictions | None, after: Predictions, *, seed: int = 0) -> Resampled:
    """The loss in the metric from one network to the other; without `before`, the metric itself, negated.

    Images are drawn within each class, both networks' answers together. To each class, half an image that only the
    first gets right is added, and half a one that only the second does, as to Agresti and Min's interval: few images
    without a change do not prove that there is none.
    """
    cells, weights = _cells(before, after)
    random, draws = np.random.default_rng(seed), []
    for _ in range((_DRAWS if isinstance(metric, str) else _CALLS) // _BLOCK):
        counts = _draw(cells[:, 0], weights, after.labels, random)
        mine = _measured(metric, cells[:, 0], cells[:, 2], counts)
        draws.append(-mine if before is None else _measured(metric, cells[:, 0], cells[:, 1], counts) - mine)
    drop = -value_of(metric, after) + (0.0 if before is None else value_of(metric, before))
    return Resampled(drop, np.sort(np.concatenate(draws)))


def _cells(before: Predictions | None, after: Predictions) -> tuple[Classes, Counts]:
    """All (label, answer before, answer after) that there are, with how often; pseudo-images included."""
    first = after.classes if before is None else before.classes
    triples = np.stack([after.labels, first, after.classes], axis=1)
    added = []
    for label in np.unique(after.labels):
        other = _mistaken_for(int(label), after, first)
        added += [(label, label, other), (label, other, label)]
    cells, places = np.unique(np.concatenate([triples, np.array(added, dtype=np.int64)]), axis=0, return_inverse=True)
    weights = np.concatenate([np.ones(len(triples)), np.full(len(added), _PSEUDO)])
    counts: Counts = np.bincount(places.ravel(), weights, minlength=len(cells)).astype(np.float64)
    return cells.astype(np.int64), counts


def _mistaken_for(label: int, after: Predictions, first: Classes) -> int:
    """The class that images of this one are most often taken for; any other where they never are."""
    answers = np.concatenate([part[after.labels == label] for part in (first, after.classes)])
    wrong = answers[answers != label]
    if len(wrong):
        return int(np.bincount(wrong).argmax())
    return next((int(other) for other in np.unique(after.labels) if other != label), label + 1)


def _draw(of: Classes, weights: Counts, labels: Classes, random: np.random.Generator) -> Counts:
    """How often each cell is drawn (draws x cells): of each class as many images as there are."""
    counts = np.zeros((_BLOCK, len(of)))
    for label in np.unique(labels):
        mine = np.flatnonzero(of == label)
        counts[:, mine] = random.multinomial((labels == label).sum(), weights[mine] / weights[mine].sum(), size=_BLOCK)
    return counts


def _measured(metric: Metric, labels: Classes, answers: Classes, counts: Counts) -> Counts:
    """The metric of each draw."""
    if isinstance(metric, str):
        return of_counts(metric, labels, answers, counts)
    found = []
    for drawn in counts.astype(np.int64):
        said = np.repeat(answers, drawn)
        found.append(value_of(metric, Predictions(said, np.ones(len(said)), np.repeat(labels, drawn))))
    return np.array(found)
