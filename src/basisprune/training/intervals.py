"""How far an accuracy, or a drop of it, can be trusted: 95 % intervals."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Bools: TypeAlias = npt.NDArray[np.bool_]


def wilson_interval(hits: int, count: int) -> tuple[float, float]:
    """The 95 % interval of an accuracy by Wilson's score.

    >>> [round(bound, 3) for bound in wilson_interval(90, 100)]
    [0.826, 0.945]
    """
    z = 1.959964
    share = hits / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def paired_drop(before: Bools, after: Bools) -> tuple[float, tuple[float, float]]:
    """The accuracy lost on the same images, and its 95 % interval (normal, for paired proportions).

    >>> before, after = np.array([True] * 9 + [False]), np.array([True] * 8 + [False] * 2)
    >>> paired_drop(before, after)[0]
    0.1
    """
    lost, won, count = int((before & ~after).sum()), int((~before & after).sum()), len(before)
    drop = (lost - won) / count
    # One is added to both kinds of change (Agresti and Min), so that no change at all is not taken for certainty.
    spread = math.sqrt(lost + won + 2 - (lost - won) ** 2 / (count + 2)) / (count + 2)
    return drop, (drop - 1.959964 * spread, drop + 1.959964 * spread)
