"""The tables and figures of docs/experiments.md, from the JSON results; nothing is run here.

    python experiments/summarise.py [--results experiments/results] [--preset mini] [--page docs/experiments.md]

The page keeps its text: only what is between its markers `<!-- NAME:begin -->` and `<!-- NAME:end -->` is replaced.
Figures go into a folder beside the page that is called as the page is.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from page import write_page

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "experiments" / "results")
    parser.add_argument("--preset", default="mini", help="the folder in --results that holds the runs")
    parser.add_argument("--page", type=Path, help="the page to fill; docs/experiments.md tells of mini only")
    options = parser.parse_args()
    if options.page is None and options.preset != "mini":
        parser.error("--page is needed: the text of docs/experiments.md is about mini; name a copy of it")
    write_page(options.results, options.preset, options.page or ROOT / "docs" / "experiments.md")


if __name__ == "__main__":
    main()
