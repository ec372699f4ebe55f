"""What ten times the training gains: the recipe `best` against `quick`, with other rates, labels and no teacher.

    python benchmarks/best.py --assets DIR [--models efficientnet_lite0] [--datasets cifar10] [--seeds 0] [--ways quick]

2,000 training and 1,000 validation images at 32x32, 5,000 test images, one thread: trained, two thirds of the filters
and then of the basis vectors removed, and tuned. Ways with the same training start from the same network. DIR is
described in benchmarks/backbones.py. Goes on where it was stopped; writes results/best.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product, starmap
from pathlib import Path
from typing import Any

import torch
from backbones import build, data
from common import Cells

from basisprune import RECIPES, Augment, Recipe, Splits, evaluate, measure
from basisprune.budget import Ratios
from basisprune.data import LabelledImages, take
from basisprune.deploy.fold import deploy
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import State
from basisprune.recipes import find_framework
from basisprune.training.config import TrainConfig
from basisprune.transfer.model import TransferModel

IMAGES, VAL_IMAGES, TEST_IMAGES, SIDE, REMOVED = 2000, 1000, 5000, 32, 0.65


@dataclass(frozen=True)
class Place:
    """Where ways are compared."""

    model: str
    dataset: str
    seed: int


QUICK, BEST = RECIPES["quick"], RECIPES["best"]


def changed(recipe: Recipe, **changes: Any) -> Recipe:
    """The recipe with other settings of both trainings."""
    return replace(recipe, train=replace(recipe.train, **changes), finetune=replace(recipe.finetune, **changes))


AT_ONCE = {"warmup": 0.0}
GENTLY = {"weight_lr": 0.3, "clip_norm": None, **AT_ONCE}
WAYS = {
    "quick": QUICK,
    "quick, no warm-up": changed(QUICK, **AT_ONCE),
    "quick, smoothed tuning": replace(QUICK, finetune=replace(QUICK.finetune, label_smoothing=0.1)),
    "quick, smoothed labels": changed(QUICK, label_smoothing=0.1),
    "quick, rate 0.3": changed(QUICK, **GENTLY),
    "quick, rate 0.3, smoothed labels": changed(QUICK, **GENTLY, label_smoothing=0.1),
    "best": BEST,
    "best, no warm-up": changed(BEST, **AT_ONCE),
    "best, rate 0.3": changed(BEST, **GENTLY),
    "best, rate 0.3, no teacher": changed(BEST, **GENTLY, distill=0.0),
    "best, rate 0.3, no teacher, smoothed labels": changed(BEST, **GENTLY, distill=0.0, label_smoothing=0.1),
}
"""The recipes, both as they were before their rates warmed up, and before the weights learnt at rate 1, with gradients
clipped."""


def tuned(recipe: Recipe, place: Place, assets: Path) -> dict[str, float]:
    splits, test = images(place, assets)
    recipe = changed(recipe, seed=place.seed, augmentation=own(recipe.train.augmentation, place))
    start = trained(recipe.train, place, assets)
    pipeline = Pipeline(network(place, assets), splits, recipe, progress=False)
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
def trained(config: TrainConfig, place: Place, assets: Path) -> State:
    """The unpruned network, trained with these settings."""
    splits, _ = images(place, assets)
    return Pipeline(network(place, assets), splits, replace(QUICK, train=config), progress=False).dense()


def network(place: Place, assets: Path) -> TransferModel:
    """The network as it comes, with a new classifier."""
    torch.manual_seed(place.seed)
    return build(place.model, assets, num_classes=10, input_size=SIDE)


def images(place: Place, assets: Path) -> tuple[Splits, LabelledImages]:
    """Images to train and to follow the training with, and to test."""
    splits, test = data(place.dataset, assets, images=IMAGES, test_images=TEST_IMAGES, seed=place.seed)
    assert splits.val is not None
    return replace(splits, val=take(splits.val, range(VAL_IMAGES))), test


def own(augmentation: Augment, place: Place) -> Augment:
    """The augmentation with images mirrored where that makes sense."""
    return replace(augmentation, flip=place.dataset != "mnist")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["efficientnet_lite0"])
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
    for place in starmap(Place, product(options.models, options.datasets, options.seeds)):
        for way in options.ways:
            name = f"{place.model}, {place.dataset}, {way}, seed {place.seed}"
            cells.run(name, partial(tuned, WAYS[way], place, options.assets))


if __name__ == "__main__":
    main()
