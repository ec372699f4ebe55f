"""Does `compress --max-drop 1%` remove as much as the best of three fixed learning rates? The whole command, both ways.

    python benchmarks/fixed_rates.py --assets DIR [--networks mobilenetv2_050 ...] [--datasets cifar10 ...] [--seeds 0]

Ours is the recipe `quick`. By hand, all trainings of the same search have one rate, 1e-4, 3e-4 or 1e-3, fixed
statistics and mirroring except for digits; the result with the fewest parameters that is certified counts. 2,000
training images of 64 pixels (32 for VGG-16), 4,000 to search and confirm with, 5,000 test images, none of which trained
a network from scratch. The unpruned reference is compared with the best of `benchmarks/by_hand.py` at five passes.

DIR is described in benchmarks/backbones.py. Resumes where it was stopped. Writes results/fixed_rates.json;
`python benchmarks/fixed_rates.py --table` shows it and checks the bars.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbones import DATASETS
from by_hand import IMAGES, OTHERS, PRETRAINED, SCRATCH, TEST_IMAGES, Cell, start
from common import Cells, load, table

from basisprune import RECIPES, Recipe, compress, load_data
from basisprune.data import Splits
from basisprune.training.config import TrainConfig

PASSES, JUDGING_IMAGES, MAX_DROP = 5, 4000, 0.01
RATES = (1e-4, 3e-4, 1e-3)
WAYS = ("quick", *(f"{rate:g}" for rate in RATES))
REFERENCE_BAR = -0.01


def recipe_of(way: str, cell: Cell) -> Recipe:
    """Return `quick`, with one rate for all trainings if `way` is one."""
    quick = RECIPES["quick"]

    def changed(config: TrainConfig) -> TrainConfig:
        config = replace(config, epochs=cell.passes, seed=cell.seed)
        if way == "quick":
            return config
        moves = replace(config.augmentation, flip=cell.mirrors)
        return replace(config, choices=None, lr=float(way), augmentation=moves)

    return replace(quick, train=changed(quick.train), finetune=changed(quick.finetune))


def images(cell: Cell, assets: Path) -> Splits:
    """Return training images, images to search and confirm with, and test images."""
    arrays = np.load(assets / "data" / f"{cell.dataset}.npz")
    rows = np.random.default_rng(cell.seed).permutation(OTHERS.start)[: IMAGES[PASSES] + JUDGING_IMAGES]
    parts = [(arrays["x_train"][some], arrays["y_train"][some]) for some in np.split(rows, [IMAGES[PASSES]])]
    parts.append((arrays["x_test"][:TEST_IMAGES], arrays["y_test"][:TEST_IMAGES]))
    train, val, test = (torch.utils.data.TensorDataset(_nchw(x), torch.from_numpy(y.ravel()).long()) for x, y in parts)
    return load_data((train, val, test), confirm_fraction=0.5)


def _nchw(pixels: Any) -> torch.Tensor:
    return torch.from_numpy(pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2).copy())


def run(cell: Cell, way: str, assets: Path, runs: Path) -> dict[str, Any]:
    """Compress the network, and return what is left of it."""
    model, splits = start(cell, assets, runs), images(cell, assets)
    before = time.process_time()
    found = compress(model, splits, recipe=recipe_of(way, cell), max_drop=MAX_DROP, seed=cell.seed)
    seconds, summary = time.process_time() - before, found.summary
    assert summary.test is not None
    assert summary.certificate is not None
    unpruned, pruned = summary.test.before, summary.test.after
    return {
        "reference": round(unpruned.accuracy, 4),
        "accuracy": round(pruned.accuracy, 4),
        "parameters": [unpruned.parameters, pruned.parameters],
        "certified": summary.certificate.certified,
        "candidates": len(found.history) - 1,
        "seconds": round(seconds),
    }


def show() -> int:
    """Print what each way leaves, and the bars; 1 if one does not hold."""
    found, hand = load("fixed_rates")["results"], load("by_hand")["results"]
    lines, bars = [], {}
    for cell in dict.fromkeys(name.rpartition(", ")[0] for name in found):
        ways = {way: found[f"{cell}, {way}"] for way in WAYS if f"{cell}, {way}" in found}
        lines += [
            [
                *(cell, way, f"{row['reference']:.1%}", f"{row['accuracy']:.1%}"),
                *(f"{row['parameters'][1]:,}", "yes" if row["certified"] else "no", f"{row['seconds']:,}"),
            ]
            for way, row in ways.items()
        ]
        if len(ways) < len(WAYS):
            continue
        kept = [row["parameters"][1] for way, row in ways.items() if way != "quick" and row["certified"]]
        if kept:
            bars[f"{cell}: parameters against the best rate"] = ways["quick"]["parameters"][1] <= min(kept)
        grid = [row["accuracy"] for name, row in hand.items() if name.startswith(f"{cell}, ")]
        if grid:
            bars[f"{cell}: unpruned against by hand"] = ways["quick"]["reference"] - max(grid) >= REFERENCE_BAR
    print(table(["cell", "rate", "unpruned", "pruned", "parameters", "certified", "seconds"], lines))
    print("\n".join(f"{'holds' if holds else 'BROKEN':8}{bar}" for bar, holds in bars.items()))
    return int(not all(bars.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--networks", nargs="+", default=[*SCRATCH, *PRETRAINED], choices=[*SCRATCH, *PRETRAINED])
    parser.add_argument("--datasets", nargs="+", default=["cifar10", "fashion_mnist", "mnist"], choices=DATASETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--runs", type=Path, default=Path("runs/by_hand"), help="where networks from scratch go")
    parser.add_argument("--table", action="store_true", help="only show the results and the bars")
    options = parser.parse_args()
    if options.table:
        sys.exit(show())
    torch.set_num_threads(1)
    settings = {"passes": PASSES, "training images": IMAGES[PASSES], "judging images": JUDGING_IMAGES}
    cells = Cells("fixed_rates", settings)
    for seed, network, dataset, way in product(options.seeds, options.networks, options.datasets, options.ways):
        cell = Cell(network, dataset, PASSES, seed)
        cells.run(f"{cell}, {way}", lambda cell=cell, way=way: run(cell, way, options.assets, options.runs))  # type: ignore[misc]


if __name__ == "__main__":
    main()
