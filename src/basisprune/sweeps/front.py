"""Networks -> which of them are on the Pareto front of accuracy, parameters and milliseconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from basisprune.results import FrontPoint


def with_front(points: Sequence[FrontPoint]) -> tuple[FrontPoint, ...]:
    """The points, each with whether it is on the front.

    Where the milliseconds of any are not known, they do not count. Of equal ones, the first is on the front.

    >>> points = [FrontPoint("", name, accuracy, (0, 1), size, 0) for name, accuracy, size in
    ...           [("large", 0.9, 100), ("small", 0.8, 10), ("bad", 0.8, 50)]]
    >>> [point.name for point in with_front(points) if point.front]
    ['large', 'small']
    """
    timed = all(point.latency_ms is not None for point in points)
    costs = [_costs(point, timed=timed) for point in points]
    return tuple(
        replace(point, front=not any(_beats(other, own, first=there < here) for there, other in enumerate(costs)))
        for here, (point, own) in enumerate(zip(points, costs, strict=True))
    )


def _costs(point: FrontPoint, *, timed: bool) -> tuple[float, ...]:
    return (-point.accuracy, float(point.parameters), *([point.latency_ms or 0.0] if timed else []))


def _beats(other: tuple[float, ...], own: tuple[float, ...], *, first: bool) -> bool:
    return _dominates(other, own) or (first and other == own)


def _dominates(other: Iterable[float], own: Sequence[float]) -> bool:
    pairs = list(zip(other, own, strict=True))
    return all(one <= two for one, two in pairs) and any(one < two for one, two in pairs)
