"""Laws of the knapsack over all ranks and widths."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from basisprune.joint_plan.planning import Lever, Point, explore
from basisprune.planning import Array, PlanConfig, Queue


@dataclass
class Apart:
    """Levers that do not touch each other; each has a cost for each of its levels."""

    tables: dict[int, Array]
    now: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = {key: float(table[-1]) for key, table in self.tables.items()}

    def costs(self, lever: Lever, level: int) -> Array:
        return self.tables[self.key(lever)]

    def move(self, lever: Lever, before: int, after: int) -> None:
        self.now[self.key(lever)] = float(self.tables[self.key(lever)][after])

    def total(self) -> float:
        return sum(self.now.values())

    @staticmethod
    def key(lever: Lever) -> int:
        return int(next(iter(lever.reach))[0])


@st.composite
def problems(draw):
    levers, tables = [], {}
    block = draw(st.sampled_from([1, 2, 4]))
    for number in range(draw(st.integers(1, 4))):
        scores = np.array(draw(st.lists(st.floats(0.01, 100), min_size=2, max_size=12)))
        config = PlanConfig(round_to=block, min_keep=draw(st.integers(1, 3)), min_share=0.0)
        queue = Queue.of(scores, np.arange(len(scores))[None], 1.0, config)
        levers.append(Lever.of(queue, {(str(number), 0): 1.0}))
        steps = draw(st.lists(st.floats(0.1, 10), min_size=len(queue.starts), max_size=len(queue.starts)))
        tables[number] = np.cumsum(steps)
    return levers, tables, block


def best(points: tuple[Point, ...], goal: float) -> Point:
    return min((point for point in points if point.cost <= goal), key=lambda point: (point.loss, point.cost))


@settings(max_examples=60)
@given(problems(), st.lists(st.floats(0, 1), min_size=2, max_size=6))
def test_a_larger_budget_never_loses_more_and_every_budget_is_kept(problem, shares):
    levers, tables, _ = problem
    points = explore(levers, Apart(tables))
    least = min(point.cost for point in points)
    assert least == sum(float(table.min()) for table in tables.values())
    whole = points[0].cost
    goals = sorted(least + share * (whole - least) for share in shares)
    losses = [best(points, goal).loss for goal in goals]
    assert losses == sorted(losses, reverse=True)
    assert best(points, whole).loss == 0.0


@settings(max_examples=60)
@given(problems())
def test_it_is_never_worse_than_a_single_threshold(problem):
    levers, tables, _ = problem
    points = explore(levers, Apart(tables))
    values = sorted({value for lever in levers for value in lever.queue.values})
    for threshold in values:
        levels = [sum(value > threshold for value in lever.queue.values) for lever in levers]
        cost = sum(float(tables[place][level]) for place, level in enumerate(levels))
        loss = sum(float(lever.losses[level]) for lever, level in zip(levers, levels, strict=True))
        assert best(points, cost * (1 + 1e-12)).loss <= loss * (1 + 1e-12)


@settings(max_examples=60)
@given(problems())
def test_what_is_kept_is_in_blocks_and_above_the_floor_and_the_costs_add_up(problem):
    levers, tables, block = problem
    sizes = Apart(tables)
    points = explore(levers, sizes)
    assert sizes.total() == points[0].cost  # it is left as it was
    for point in points:
        exact = sum(float(tables[place][level]) for place, level in enumerate(point.levels))
        assert abs(point.cost - exact) <= 1e-9 * exact
        for lever, level in zip(levers, point.levels, strict=True):
            kept = lever.queue.starts[level]
            width = lever.queue.order.shape[1]
            assert kept == width or (kept % block == 0 and kept >= lever.queue.starts[0])


@settings(max_examples=60)
@given(problems(), st.floats(0.01, 100))
def test_for_every_price_levers_apart_are_set_as_trying_all_settings_would(problem, price):
    levers, tables, _ = problem
    points = explore(levers, Apart(tables))
    least = sum(float(np.min(lever.losses + price * tables[place])) for place, lever in enumerate(levers))
    found = min(point.loss + price * point.cost for point in points)
    # Steps of the cost that are finer than a few thousandths are left out.
    assert found <= least + 0.01 * price * points[0].cost
