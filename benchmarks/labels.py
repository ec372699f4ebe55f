"""How many labels certify a budget on unlabelled images, and how often a network exactly at the limit passes.

    python benchmarks/labels.py [--draws 1000]

Pairs of networks are simulated, of which the true loss is known. Only images on which the answers differ are labelled,
in random order, until the test is decided. Compared: all differing images labelled before one test (Tango's), the
group-sequential test of `basisprune.budget.looks`, and a betting martingale (Waudby-Smith and Ramdas, 2024), which may
be looked at after each image. Writes results/labels.json, which experiments/promise_summary.py shows in
docs/proof.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from common import Cells

from basisprune.budget.looks import LOST, NEITHER, UNLABELLED, WON, Differences, SequentialTest
from basisprune.budget.proportions import Paired

ERROR = 0.05
STAKES = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.4)
"""What the bets are a mixture of, as parts of the best stake for a network without a loss."""


@dataclass(frozen=True)
class Case:
    """Unlabelled images; the answers differ on the share `differing`, and both are wrong in `neither` of these."""

    images: int
    margin: float
    differing: float
    neither: float


CASES = (
    Case(3200, 0.01, 0.05, 0.1),
    Case(3200, 0.01, 0.08, 0.25),
    Case(1600, 0.02, 0.08, 0.25),
    Case(800, 0.02, 0.03, 0.1),
    Case(800, 0.03, 0.1, 0.2),
)
LOSSES = {"at the limit": 1.0, "half the limit": 0.5, "no loss": 0.0, "a gain of half the limit": -0.5}


def drawn(case: Case, loss: float, random: np.random.Generator) -> tuple[Differences, npt.NDArray[np.bool_]]:
    """Return what became of each image, and whether the answers differ on it."""
    decided = case.differing * (1 - case.neither)
    shares = [(decided + loss) / 2, (decided - loss) / 2, case.differing * case.neither, 1 - case.differing]
    kinds = random.choice(4, case.images, p=shares)
    return np.array([LOST, WON, NEITHER, NEITHER], dtype=np.int8)[kinds], kinds < 3


def at_once(case: Case, found: Differences, differing: npt.NDArray[np.bool_]) -> tuple[bool, int]:
    """Label every image on which the answers differ, then test once."""
    pair = Paired(int((found == LOST).sum()), int((found == WON).sum()), case.images)
    return pair.p_value(case.margin) <= ERROR, int(differing.sum())


def in_looks(case: Case, found: Differences, differing: npt.NDArray[np.bool_]) -> tuple[bool, int]:
    """Label until the group-sequential test is decided."""
    test, places = SequentialTest(case.images, case.margin, 1 - ERROR), np.flatnonzero(differing)

    def decided(labels: int) -> bool | None:
        known = found.copy()
        known[places[labels:]] = UNLABELLED
        return test.decide(known).passed

    low, high = 0, len(places)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if decided(middle) is not None else (middle + 1, high)
    return decided(low) is True, low


def by_betting(case: Case, found: Differences, differing: npt.NDArray[np.bool_]) -> tuple[bool, int]:
    """Label until a mixture of bets against the limit has grown twentyfold."""
    variance = case.differing * (1 - case.neither)
    stakes = np.minimum(np.array(STAKES) * case.margin / variance, 0.9 / (1 - case.margin))
    logs = np.log1p(stakes[:, None] * (case.margin - found[None].astype(float))).cumsum(1)
    wealth = np.logaddexp.reduce(logs, axis=0) - math.log(len(stakes))
    passed = wealth >= -math.log(ERROR)
    end = int(passed.argmax()) + 1 if passed.any() else case.images
    return bool(passed.any()), int(differing[:end].sum())


TESTS: dict[str, Callable[[Case, Differences, npt.NDArray[np.bool_]], tuple[bool, int]]] = {
    "all at once": at_once,
    "looks": in_looks,
    "betting": by_betting,
}


def simulate(case: Case, factor: float, draws: int) -> dict[str, dict[str, float]]:
    """Return how often each test passes, and how many labels it takes."""
    random = np.random.default_rng(0)
    pairs = [drawn(case, factor * case.margin, random) for _ in range(draws)]
    results = {}
    for name, test in TESTS.items():
        passed, labels = zip(*(test(case, *pair) for pair in pairs), strict=True)
        results[name] = {
            "passed": round(float(np.mean(passed)), 4),
            "labels": float(np.median(labels)),
            "most": float(np.quantile(labels, 0.9)),
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    options = parser.parse_args()
    cells = Cells(
        "labels", {"draws": options.draws, "confidence": 1 - ERROR, "cases": [asdict(case) for case in CASES]}
    )
    for case in CASES:
        for name, factor in LOSSES.items():
            where = f"{case.images:,} images, {100 * case.margin:g} points, {case.differing:.0%} differ, {name}"
            cells.run(where, lambda case=case, factor=factor: simulate(case, factor, options.draws))  # type: ignore[misc]


if __name__ == "__main__":
    main()
