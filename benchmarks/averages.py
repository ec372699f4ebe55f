"""Whether a moving average of the weights is better than the weights that a tuning ends with.

    python benchmarks/averages.py --assets DIR [--models efficientnet_lite0 ...] [--datasets cifar10 ...] [--seeds 0 1]

The recipe `quick` at 32x32, 2,000 training and 5,000 test images, one thread: trained, half of the filters and then of
the basis vectors removed, and tuned once. All averages are taken along that one tuning, so that nothing but the
average differs. DIR is described in benchmarks/backbones.py. Goes on where it was stopped; writes
results/averages.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from backbones import build, data
from common import Cells
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from basisprune import RECIPES, Session, evaluate, fit
from basisprune.budget import Ratios
from basisprune.callback import NullCallback, TrainingStep
from basisprune.deploy.fold import merge_full_rank
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import NOT_AT_ALL
from basisprune.recipes import find_framework
from basisprune.torchkit.watching import example_input

IMAGES, TEST_IMAGES, SIDE, REMOVED = 2000, 5000, 32, 0.5
DECAYS = (0.9, 0.98, 0.99, 0.995)


class Averages(NullCallback):
    """Moving averages of a network's weights while it is trained, one for each decay."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.by_decay = {decay: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) for decay in DECAYS}

    def trained(self, _step: TrainingStep) -> None:
        """One more step is done."""
        for average in self.by_decay.values():
            average.update_parameters(self.model)


def averaged(model: str, dataset: str, seed: int, assets: Path) -> dict[str, float]:
    torch.manual_seed(seed)
    splits, test = data(dataset, assets, images=IMAGES, test_images=TEST_IMAGES, seed=seed)
    network = build(model, assets, num_classes=10, input_size=SIDE)
    quick = RECIPES["quick"]
    augmentation = replace(quick.train.augmentation, flip=dataset != "mnist")
    training = replace(quick.train, seed=seed, augmentation=augmentation)
    recipe = replace(quick, train=training, finetune=training)
    pipeline = Pipeline(network, replace(splits, val=test), recipe, progress=False)
    move = find_framework(recipe.framework).moves[0]
    pruned = pipeline.remove(pipeline.dense(), move, Ratios(REMOVED, REMOVED), NOT_AT_ALL).model
    tuned = merge_full_rank(pruned, example_input(pruned, pipeline.spec.shape))
    averages = Averages(tuned)
    fit(tuned, splits.train, None, training, inplace=True, session=Session(callback=averages))
    found = {"last": evaluate(tuned, test).accuracy}
    return found | {str(decay): evaluate(average.module, test).accuracy for decay, average in averages.by_decay.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["efficientnet_lite0", "resnet50"])
    parser.add_argument("--datasets", nargs="+", default=["cifar10", "fashion_mnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = {"images": IMAGES, "test images": TEST_IMAGES, "size": SIDE, "removed": REMOVED}
    cells = Cells("averages", config)
    for seed in options.seeds:
        for model in options.models:
            for dataset in options.datasets:
                work = partial(averaged, model, dataset, seed, options.assets)
                cells.run(f"{model}, {dataset}, seed {seed}", work)


if __name__ == "__main__":
    main()
