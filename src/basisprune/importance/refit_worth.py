"""What each unit of a group of filters is worth if the others make up for it as well as they can (not in the paper)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_DENSE = 0.9  # the share of units not yet chosen below which the others are left out


@dataclass(frozen=True)
class Reading:
    """What one layer reads of the units of a group: (units, units) their covariance, (units) what variance is worth."""

    covariance: Array
    metric: Array


def refit_worth(readings: Sequence[Reading], alone: Array) -> Array:
    """The worth of each unit (units): what is lost in addition when it goes after all that are worth less.

    Units are chosen one after the other, each the one without which the least can be predicted by least squares from
    those already chosen, in all layers that read them; a unit's worth is what choosing it saves. `alone` (units) is
    worth that nothing makes up for. All worths together are the worth of all variances, so that only the order in which
    channels share what they have in common counts: of two equal ones, the second is worth nothing.

    >>> twins = np.array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    >>> refit_worth([Reading(twins, np.ones(3))], np.zeros(3)).tolist()
    [2.0, 0.0, 1.0]
    """
    rest = [_weighted(reading) for reading in readings]
    least = [1e-10 * float(np.diagonal(each).max(initial=0.0)) for each in rest]
    worth, order = np.zeros(len(alone)), np.zeros(len(alone), dtype=np.int64)
    units, left = np.arange(len(alone)), np.ones(len(alone), dtype=bool)
    for place in range(len(alone)):
        if left.sum() < _DENSE * len(left):  # what was chosen is all zero by now
            rest = [each[np.ix_(left, left)] for each in rest]
            units, left = units[left], np.ones(int(left.sum()), dtype=bool)
        saved = alone[units] + sum((_saved(each, floor) for each, floor in zip(rest, least, strict=True)), 0.0)
        best = int(np.argmax(np.where(left, saved, -1.0)))
        order[place], worth[place], left[best] = units[best], saved[best], False
        for each, floor in zip(rest, least, strict=True):
            if each[best, best] > floor:
                column = each[:, best] / np.sqrt(each[best, best])
                each -= np.outer(column, column)
    result = np.empty_like(worth)
    # A unit that is chosen later is not worth more: the two save it together.
    result[order] = np.maximum.accumulate(worth[::-1])[::-1]
    return result


def _saved(rest: Array, floor: float) -> Array:
    """What each unit tells of all: the squares of its column, by its own variance."""
    pivots = np.diagonal(rest)
    sums = np.einsum("ij,ij->j", rest, rest)
    found: Array = np.divide(sums, pivots, out=np.zeros_like(sums), where=pivots > floor)
    return found


def _weighted(reading: Reading) -> Array:
    root = np.sqrt(np.maximum(reading.metric, 0))
    return root[:, None] * reading.covariance * root[None]
