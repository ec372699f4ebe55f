"""What does a whole run cost, in trainings of the unpruned network, and what does each effort find?

    python benchmarks/search_cost.py --assets DIR [--cells demo "efficientnet_lite0, cifar10" ...] [--efforts quick]
                                     [--seeds 0]

`compress --max-drop 1%` with the recipe `quick`: the demo, and two networks on two datasets, with 2,000 training images
of 64 pixels, 4,000 to search and confirm with, 5,000 test images. A training is one at a fixed rate in plain PyTorch
with as many passes (`benchmarks/by_hand.py`): half a pass before the run and half a pass after it, in the same process.
CPU seconds of one thread. The rows "before" are of the search that tuned every candidate for all epochs, recorded when
it was replaced. Rows "at first" are of `quick` when it pruned a larger network to fall back on.

DIR is described in benchmarks/backbones.py. Resumes where it was stopped. Writes results/search_cost.json;
`python benchmarks/search_cost.py --table` shows it and checks the bars.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any, get_args

import torch
from by_hand import GRID, Cell, by_hand, prepared, start
from common import Cells, load, table
from fixed_rates import MAX_DROP, images, recipe_of

from basisprune import compress
from basisprune.callback import NullCallback
from basisprune.data import Splits
from basisprune.demo import TRAIN_EPOCHS, demo_job
from basisprune.results import RunSummary
from basisprune.runs.compress import run_job
from basisprune.search.stepping import with_effort
from basisprune.types import Effort

PASSES = 5
DEMO = "demo"
CELLS = (
    DEMO,
    *(f"{net}, {data}" for net in ("efficientnet_lite0", "resnet50") for data in ("cifar10", "fashion_mnist")),
)
COST_BAR, SIZE_BAR = 2.5, 1.05
BEFORE = "before"


def run(name: str, effort: Effort, seed: int, assets: Path) -> dict[str, Any]:
    """Run a cell with an effort; return what it cost and found."""
    network, _, dataset = name.partition(", ")
    cell = Cell(network, dataset or "mnist", PASSES if dataset else TRAIN_EPOCHS, seed)
    work, model, data = _work(cell, effort, assets)
    halves = zip(*(part.chunk(2) for part in prepared(data.train, model.input_spec)), strict=True)

    def half_a_pass() -> float:
        pixels, labels = next(halves)
        return _seconds(lambda: by_hand(model, pixels, labels, replace(cell, passes=1), GRID[0][0], "fixed"))[1]

    first = half_a_pass()
    summary, seconds = _seconds(work)
    training = cell.passes * (first + half_a_pass())
    assert summary.test is not None
    assert summary.certificate is not None
    return {
        "seconds": round(seconds),
        "training": round(training),
        "parameters": [summary.test.before.parameters, summary.test.after.parameters],
        "accuracy": [round(part.accuracy, 4) for part in (summary.test.before, summary.test.after)],
        "certified": summary.certificate.certified,
    }


def _work(cell: Cell, effort: Effort, assets: Path) -> tuple[Callable[[], RunSummary], Any, Splits]:
    if cell.network == DEMO:
        job = demo_job()
        job = replace(job, config=replace(job.config, search=with_effort(job.config.search, effort)))

        def demo() -> RunSummary:
            with tempfile.TemporaryDirectory() as folder:
                return run_job(job, output=Path(folder) / "demo", callback=NullCallback()).summary

        return demo, job.network, job.splits
    model, data = start(cell, assets, Path("runs/by_hand")), images(cell, assets)
    options: dict[str, Any] = {"recipe": recipe_of("quick", cell), "max_drop": MAX_DROP, "seed": cell.seed}
    return lambda: compress(model, data, effort=effort, **options).summary, model, data


def _seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    before = time.process_time()
    found = work()
    return found, time.process_time() - before


def cost_table() -> str:
    """The table of what each effort costs and finds."""
    found = load("search_cost")["results"]
    trainings = {name.rpartition(", ")[0]: row["training"] for name, row in found.items() if "training" in row}
    lines = []
    for name, row in found.items():
        cell, _, effort = name.rpartition(", ")
        cost = f"{row['seconds'] / trainings[cell]:.1f}" if cell in trainings else ""
        unpruned, pruned = (f"{value:.1%}" for value in row["accuracy"])
        size, certified = f"{row['parameters'][1]:,}", "yes" if row["certified"] else "no"
        lines.append([cell, effort, f"{row['seconds']:,}", cost, size, unpruned, pruned, certified])
    lines.sort(key=lambda line: line[0])
    return table(["run", "effort", "CPU seconds", "trainings", "parameters", "unpruned", "pruned", "certified"], lines)


def show() -> int:
    """Print what each effort costs and finds, and the bars; 1 if one does not hold."""
    found = load("search_cost")["results"]
    print(cost_table())
    pairs = [
        (row, found[f"{name.rpartition(', ')[0]}, {BEFORE}"])
        for name, row in found.items()
        if name.endswith("quick") and f"{name.rpartition(', ')[0]}, {BEFORE}" in found
    ]
    if not pairs:
        print("no run of quick is recorded yet")
        return 1
    cost = mean(row["seconds"] / row["training"] for name, row in found.items() if name.endswith("quick"))
    size = mean(row["parameters"][1] / old["parameters"][1] for row, old in pairs)
    bars = {
        f"quick costs {cost:.2f} trainings on average": cost <= COST_BAR,
        f"its networks are {size:.2f} times as large as before": size <= SIZE_BAR,
        "certified wherever it was before": all(row["certified"] >= old["certified"] for row, old in pairs),
    }
    print("\n".join(f"{'holds' if holds else 'BROKEN':8}{bar}" for bar, holds in bars.items()))
    return int(not all(bars.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--cells", nargs="+", default=CELLS, choices=CELLS)
    parser.add_argument("--efforts", nargs="+", default=["quick"], choices=get_args(Effort))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--table", action="store_true", help="only show the results and the bars")
    options = parser.parse_args()
    if options.table:
        sys.exit(show())
    torch.set_num_threads(1)
    cells = Cells("search_cost", {"passes": PASSES, "max drop": MAX_DROP})
    for seed, effort, name in product(options.seeds, options.efforts, options.cells):
        cells.run(f"{name}, seed {seed}, {effort}", partial(run, name, effort, seed, options.assets))


if __name__ == "__main__":
    main()
