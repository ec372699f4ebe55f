"""What ten times the training is worth: the recipe `best` against `quick`, unpruned and with half of both removed.

    python benchmarks/best.py --assets DIR [--datasets cifar10 mnist] [--seeds 0]

EfficientNet-Lite0, 2,000 training, 1,000 validation and 5,000 test images at 32x32, one thread; half of the filters and
then of the basis vectors go. DIR is described in benchmarks/backbones.py. Goes on where it was stopped; writes
results/best.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from backbones import build, data
from common import Cells

from basisprune import RECIPES, evaluate
from basisprune.costs import measure
from basisprune.data import take
from basisprune.deploy.fold import deploy
from basisprune.pipeline import Pipeline

IMAGES, VAL_IMAGES, TEST_IMAGES, SIDE, RATIO = 2000, 1000, 5000, 32, 0.5


def compared(name: str, dataset: str, seed: int, assets: Path) -> dict[str, float]:
    torch.manual_seed(seed)
    splits, test = data(dataset, assets, images=IMAGES, test_images=TEST_IMAGES, seed=seed)
    assert splits.val is not None
    splits = replace(splits, val=take(splits.val, range(VAL_IMAGES)), test=test)
    recipe = RECIPES[name]
    recipe = replace(recipe, train=replace(recipe.train, seed=seed), finetune=replace(recipe.finetune, seed=seed))
    model = build("efficientnet_lite0", assets, num_classes=10, input_size=SIDE)
    pipeline = Pipeline(model, splits, recipe, progress=False)
    before = time.process_time()
    pruned = pipeline.run("loss+basis", basis_ratio=RATIO, filter_ratio=RATIO)
    seconds = time.process_time() - before
    assert pruned.test_accuracy is not None
    return {
        "unpruned accuracy": evaluate(pipeline.dense().model, test).accuracy,
        "pruned accuracy": pruned.test_accuracy,
        "parameters": measure(deploy(pruned.model, pipeline.spec, splits.classes)).parameters,
        "passes": sum(len(stage.history) for stage in pruned.stages),
        "seconds": round(seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--datasets", nargs="+", default=["cifar10", "mnist"])
    parser.add_argument("--recipes", nargs="+", default=["quick", "best"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = {"images": IMAGES, "val images": VAL_IMAGES, "test images": TEST_IMAGES, "size": SIDE, "ratio": RATIO}
    cells = Cells("best", config)
    for seed in options.seeds:
        for dataset in options.datasets:
            for name in options.recipes:
                cells.run(f"{dataset}, {name}, seed {seed}", partial(compared, name, dataset, seed, options.assets))


if __name__ == "__main__":
    main()
