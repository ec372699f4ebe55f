"""Accuracy against milliseconds, untuned: networks planned by parameters as today, and by measured time.

    python benchmarks/frontier.py --assets DIR [--models efficientnet_lite0 densenet121] [--plot FILE]

EfficientNet-Lite0 has its ImageNet weights and is trained briefly on CIFAR-10 at 128x128. No weights of DenseNet-121
come with the assets: it is trained from scratch on MNIST at 64x64, and planned and timed for 128x128.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from backbones import build, data

from basisprune import RECIPES, transfer_model
from basisprune.pipeline import Pipeline


@dataclass(frozen=True)
class Setting:
    """What one of the networks is trained on, at which size."""

    dataset: str
    size: int
    images: int
    passes: int


SETTINGS = {
    "efficientnet_lite0": Setting("cifar10", 128, 1500, 2),
    "densenet121": Setting("mnist", 64, 2000, 4),
}
TEST_IMAGES = 500


@cache
def pipeline(name: str, assets: Path, scratch: Path) -> Pipeline:
    """The network trained without pruning; kept in the scratch folder."""
    setting = SETTINGS[name]
    torch.manual_seed(0)
    splits, test = data(setting.dataset, assets, images=setting.images, test_images=TEST_IMAGES, seed=0)
    quick = RECIPES["quick"]
    recipe = replace(
        quick,
        train=replace(
            quick.train, epochs=setting.passes, norm_statistics="fixed" if name != "densenet121" else "batch"
        ),
    )
    if name == "densenet121":
        model = transfer_model(name, 10, input_size=setting.size)
    else:
        model = build(name, assets, num_classes=10, input_size=setting.size)
    return Pipeline(model, replace(splits, test=test), recipe, checkpoints=scratch / name, progress=False)
