"""Examples that belong together, as copies of an image or images of one patient do, count as one unit.

All metrics are those of a unit drawn at random, and then an example of it: each unit counts the same, however many
examples it has.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from basisprune.errors import DataError

Units: TypeAlias = npt.NDArray[np.int64]
"""The number of each example's unit."""
Numbers: TypeAlias = npt.NDArray[np.float64]
_MOST_DRAWS = 16


def units_in(data: object, count: int) -> Units | None:
    """The units of all `count` examples of the data, if it knows any; None where each is one of its own."""
    units: Units | None = getattr(data, "units", None)
    if units is not None and len(units) != count:
        raise DataError(f"{count:,} examples seen where {len(units):,} are known; the data gives others than before")
    return units


def sums(values: npt.NDArray[np.generic], units: Units) -> Numbers:
    """The sum of the values of each unit.

    >>> sums(np.array([1.0, 2.0, 4.0]), np.array([7, 3, 7]))
    array([2., 5.])
    """
    _, places = np.unique(units, return_inverse=True)
    return np.bincount(places.ravel(), values).astype(np.float64)


def weights_of(units: Units) -> Numbers:
    """The weight of each example, which are 1 in total for each unit."""
    _, places, counts = np.unique(units, return_inverse=True, return_counts=True)
    found: Numbers = 1 / counts[places.ravel()]
    return found


def draws_of(units: Units) -> list[npt.NDArray[np.int64]]:
    """Indices of one example for each unit, in the order of the units: several draws, in which all have their turn."""
    order = np.argsort(units, kind="stable")
    _, starts, counts = np.unique(units[order], return_index=True, return_counts=True)
    return [order[starts + turn % counts] for turn in range(min(int(counts.max()), _MOST_DRAWS))]
