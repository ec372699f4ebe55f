"""Results of the field -> points, frontiers, and what one method needs to be as good as another."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any, Literal

import studies

Cost = Literal["parameters", "macs", "ms"]
Record = dict[str, Any]


@dataclass(frozen=True)
class Mean:
    """One method at one size, in the mean over `seeds`.

    `interval` is where the mean of the accuracy lies for other test images and other seeds, 95 %; with one seed, for
    other images alone. `ms` is relative to the network of
    the clock, which took turns with it, times what that took in the median of all cells. `pruning` are the
    seconds that scores, bases and plans took, the most of any cell: the second rate of a sweep finds them done.
    """

    model: str
    dataset: str
    method: str
    kind: str
    size: tuple[float, ...]
    seeds: tuple[int, ...]
    accuracy: float
    interval: tuple[float, float]
    parameters: float
    macs: float
    ms: float
    passes: float
    untuned: float | None
    pruning: float = 0.0

    def cost(self, axis: Cost) -> float:
        """What it costs on that axis."""
        return float(getattr(self, axis))


def read_records(study: Path) -> list[Record]:
    """All results of the study; exits with a hint where there are none."""
    found = list(studies.read(study).values())
    if not found:
        raise SystemExit(f"{study}: no results there; make some with `python experiments/field.py --assets DIR`")
    return found


def swept_rates(records: Iterable[Record]) -> dict[tuple[str, str], dict[float | None, float]]:
    """The accuracy on validation images of each network's method at each of its rates, with seed 0.

    It is the mean over the datasets and sizes that were swept, for the rates that all of these have.
    """
    found: dict[tuple[str, str], dict[tuple[str, str], dict[float | None, float]]] = {}
    for record in records:
        if record["seed"] == 0:
            places = found.setdefault((record["model"], record["method"]), {})
            place = places.setdefault((record["dataset"], str(record["size"])), {})
            place[record["rate"]] = float(record["point"]["val_accuracy"])
    chosen = {}
    for key, places in found.items():
        swept = [place for place in places.values() if len(place) > 1] or list(places.values())[:1]
        common = [rate for rate in swept[0] if all(rate in place for place in swept)]
        chosen[key] = {rate: mean(place[rate] for place in swept) for rate in common}
    return chosen


def best_rates(records: Iterable[Record]) -> dict[tuple[str, str], float | None]:
    """The rate of each network's method that did best on the validation images."""
    return {key: max(rates, key=rates.__getitem__) for key, rates in swept_rates(records).items() if rates}


def mean_points(records: Sequence[Record], seeds: Collection[int] | None = None) -> list[Mean]:
    """A point for each network, dataset, method and size, at the rate that the sweep chose.

    It is the mean over the seeds that there are or, if `seeds` are given, over those, where all of them are there.
    """
    rates = best_rates(records)
    clock = median(record["point"]["clock_ms"] for record in records)
    cells: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        chosen = record["rate"] == rates.get((record["model"], record["method"]), record["rate"])
        if chosen and (seeds is None or record["seed"] in seeds):
            key = (record["model"], record["dataset"], record["method"], record["kind"], tuple(record["size"]))
            cells.setdefault(key, []).append(record)
    points = [_mean(key, group, clock, _pruning(key, records)) for key, group in cells.items()]
    return [point for point in points if seeds is None or len(point.seeds) == len(seeds)]


def _pruning(key: tuple[Any, ...], records: Sequence[Record]) -> float:
    names = ("model", "dataset", "method", "kind")
    same = (each for each in records if (*(each[name] for name in names), tuple(each["size"])) == key)
    return max(float(each["pruning_seconds"]) for each in same)


def _mean(key: tuple[Any, ...], records: Sequence[Record], clock: float, pruning: float) -> Mean:
    points = [record["point"] for record in records]
    accuracies = [point["test_accuracy"] for point in points]
    accuracy = mean(accuracies)
    images = mean((point["interval"][1] - point["interval"][0]) / 2 for point in points)  # the same for all seeds
    seeds = 1.96 * stdev(accuracies) / math.sqrt(len(points)) if len(points) > 1 else 0.0
    half = math.hypot(images, seeds)
    untuned = [record["untuned_val_accuracy"] for record in records]
    model, dataset, method, kind, size = key
    return Mean(
        model,
        dataset,
        method,
        kind,
        size,
        seeds=tuple(sorted(record["seed"] for record in records)),
        accuracy=accuracy,
        interval=(accuracy - half, accuracy + half),
        parameters=mean(point["parameters"] for point in points),
        macs=mean(point["macs"] for point in points),
        ms=clock * mean(point["ms"] / point["clock_ms"] for point in points),
        passes=mean(record["passes"] for record in records),
        untuned=None if None in untuned else mean(untuned),
        pruning=pruning,
    )


def frontier(points: Iterable[Mean], axis: Cost) -> list[Mean]:
    """The points that no other beats in both, from cheap to dear, so that accuracy rises with the cost."""
    kept: list[Mean] = []
    for point in sorted(points, key=lambda point: (point.cost(axis), -point.accuracy)):
        if not kept or point.accuracy > kept[-1].accuracy:
            kept.append(point)
    return kept


def cost_at(points: Iterable[Mean], accuracy: float, axis: Cost) -> float | None:
    """What the points need for that accuracy, by the cheapest backbone; None where none of them reaches it.

    Between neighbours on the frontier of a backbone the logarithm of the cost is linear in the accuracy. Below the
    cheapest point nothing is made up: it costs what that costs.
    """
    by_model: dict[str, list[Mean]] = {}
    for point in points:
        by_model.setdefault(point.model, []).append(point)
    costs = [_cost_along(frontier(own, axis), accuracy, axis) for own in by_model.values()]
    return min((cost for cost in costs if cost is not None), default=None)


def _cost_along(front: Iterable[Mean], accuracy: float, axis: Cost) -> float | None:
    low: Mean | None = None
    for high in front:
        if high.accuracy >= accuracy:
            if low is None:
                return high.cost(axis)
            share = (accuracy - low.accuracy) / (high.accuracy - low.accuracy)
            return float(math.exp((1 - share) * math.log(low.cost(axis)) + share * math.log(high.cost(axis))))
        low = high
    return None
