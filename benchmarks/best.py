"""What ten times the training gains: the recipe `best` against `quick`, and what the teacher has to do with it.

    python benchmarks/best.py --assets DIR [--datasets cifar10 fashion_mnist] [--seeds 0] [--ways ...]

EfficientNet-Lite0, 2,000 training and 1,000 validation images at 32x32, 5,000 test images, one thread: trained, two
thirds of the filters and then of the basis vectors removed, and tuned. Ways with the same training start from the
same network. DIR is described in benchmarks/backbones.py. Goes on where it was stopped; writes results/best.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from backbones import build, data
from common import Cells

from basisprune import RECIPES, Recipe, Splits, TransferModel, evaluate, measure
from basisprune.budget import Ratios
from basisprune.data import LabelledImages, take
from basisprune.deploy.fold import deploy
from basisprune.frameworks import find_framework
from basisprune.pipeline import Pipeline
from basisprune.states import State
from basisprune.training.config import TrainConfig

IMAGES, VAL_IMAGES, TEST_IMAGES, SIDE, REMOVED = 2000, 1000, 5000, 32, 0.65

QUICK, BEST = RECIPES["quick"], RECIPES["best"]
WAYS = {
    "quick": QUICK,
    "best": BEST,
    "best, no teacher": replace(BEST, finetune=replace(BEST.finetune, distill=0.0)),
}


def tuned(recipe: Recipe, dataset: str, seed: int, assets: Path) -> dict[str, float]:
    splits, test = images(dataset, seed, assets)
    recipe = replace(recipe, train=own(recipe.train, dataset, seed), finetune=own(recipe.finetune, dataset, seed))
    start = trained(recipe.train, dataset, seed, assets)
    pipeline = Pipeline(network(seed, assets), splits, recipe, progress=False)
    pipeline.adopt(start)
    before = time.process_time()
    pruned = pipeline.remove(start, find_framework(recipe.framework).moves[0], Ratios(REMOVED, REMOVED))
    seconds = time.process_time() - before
    return {
        "unpruned": evaluate(start.model, test).accuracy,
        "pruned": evaluate(pruned.model, test).accuracy,
        "parameters": measure(deploy(pruned.model, pipeline.spec, splits.classes)).parameters,
        "passes of the unpruned": len(start.stages[-1].history),
        "passes of the pruned": len(pruned.stages[-1].history),
        "seconds": round(seconds),
    }


@lru_cache(maxsize=1)
def trained(config: TrainConfig, dataset: str, seed: int, assets: Path) -> State:
    """The unpruned network, trained with these settings."""
    splits, _ = images(dataset, seed, assets)
    return Pipeline(network(seed, assets), splits, replace(QUICK, train=config), progress=False).dense()


def network(seed: int, assets: Path) -> TransferModel:
    """The network as it comes, with a new classifier."""
    torch.manual_seed(seed)
    return build("efficientnet_lite0", assets, num_classes=10, input_size=SIDE)


def images(dataset: str, seed: int, assets: Path) -> tuple[Splits, LabelledImages]:
    """Images to train and to follow the training with, and to test."""
    splits, test = data(dataset, assets, images=IMAGES, test_images=TEST_IMAGES, seed=seed)
    assert splits.val is not None
    return replace(splits, val=take(splits.val, range(VAL_IMAGES))), test


def own(config: TrainConfig, dataset: str, seed: int) -> TrainConfig:
    """The settings with this seed, and images mirrored where that makes sense."""
    return replace(config, seed=seed, augmentation=replace(config.augmentation, flip=dataset != "mnist"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--datasets", nargs="+", default=["cifar10", "fashion_mnist"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = {
        "images": IMAGES,
        "val images": VAL_IMAGES,
        "test images": TEST_IMAGES,
        "size": SIDE,
        "removed": REMOVED,
    }
    cells = Cells("best", config)
    for seed in options.seeds:
        for dataset in options.datasets:
            for name in options.ways:
                cells.run(f"{dataset}, {name}, seed {seed}", partial(tuned, WAYS[name], dataset, seed, options.assets))


if __name__ == "__main__":
    main()
