"""Generates the tables and figures of docs/experiments.md from the JSON results; runs nothing.

    python experiments/summarise.py [--results experiments/results] [--preset mini] [--page docs/experiments.md]

The page keeps its text: only what is between its markers `<!-- NAME:begin -->` and `<!-- NAME:end -->` is replaced.
Figures go into a folder next to the page with the same name.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from page import write_page

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "experiments" / "results")
    parser.add_argument("--preset", default="mini", help="the folder in --results with the runs")
    parser.add_argument("--page", type=Path, help="the page to fill (default for mini: docs/experiments.md)")
    options = parser.parse_args()
    if options.page is None and options.preset != "mini":
        parser.error("--page is needed: the text of docs/experiments.md describes mini; pass a copy of it")
    write_page(options.results, options.preset, options.page or ROOT / "docs" / "experiments.md")


if __name__ == "__main__":
    main()
