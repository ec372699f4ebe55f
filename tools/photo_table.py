"""The table of the README on how many photos a certificate takes: `python tools/photo_table.py` writes it.

A test compares the two.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import NormalDist

from basisprune.budget.certify import TYPICAL, certifiable, images_needed
from basisprune.budget.looks import SequentialTest

PAGE = Path(__file__).parents[1] / "README.md"
PHOTOS = (300, 1000, 3000, 10_000)
_PLACE = re.compile(r"(<!-- photos:begin -->\n).*?(<!-- photos:end -->)", re.DOTALL)


def unlabelled(photos: int) -> float:
    """Return the loss that photos without labels certify, all labels given, of a network that loses none.

    >>> round(unlabelled(1000), 3)
    0.013
    """
    (_, score) = SequentialTest(photos, margin=0.01).looks[-1]
    return certifiable(photos, confidence=NormalDist().cdf(-score))


def table() -> str:
    """Return the table, and how many photos a point needs."""
    rows = [
        f"| {photos:,} | {100 * certifiable(photos):.1f} points | {photos:,} "
        f"| {100 * unlabelled(photos):.1f} points | {round(TYPICAL * photos):,} |"
        for photos in PHOTOS
    ]
    header = [
        "| photos held out | all labelled: certified loss at most | labels "
        "| unlabelled: certified loss at most | labels |",
        "| ---: | ---: | ---: | ---: | ---: |",
    ]
    needs = [f"{images_needed(points / 100):,} for {points} points" for points in (3, 2, 1, 0.5)]
    needed = ", ".join(needs).replace("1 points", "1 point")
    said = f"To pass in four of five cases with all photos labelled, you need {needed}."
    return "\n".join([*header, *rows, "", said]) + "\n"


def with_table(text: str) -> str:
    """Return the text with the table between its marks."""
    return _PLACE.sub(lambda found: f"{found[1]}{table()}{found[2]}", text)


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
