"""What is left of the accuracy, untuned, after filters and basis vectors go: in either order, in several shares.

    python benchmarks/shares.py --assets DIR [--datasets cifar10 mnist] [--seeds 0]

EfficientNet-Lite0, 2,000 training images at 32x32, four passes with all weights, 2,000 test images, one thread. Scores
and compensation by the loss, in blocks of eight, as in the recipe `quick`. DIR is described in benchmarks/backbones.py.
Goes on where it was stopped; writes results/shares.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from backbones import build, data
from common import Cells

from basisprune import RECIPES, evaluate, measure
from basisprune.budget import Ratios
from basisprune.deploy.fold import deploy
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import NOT_AT_ALL, State
from basisprune.recipes import find_framework
from basisprune.transfer.model import spec_of

IMAGES, TEST_IMAGES, SIDE, PASSES = 2000, 2000, 32, 4
SHARES = ((0.5, 0.5), (0.65, 0.65), (0.5, 0.75), (0.75, 0.5))
"""The fractions of filters and of basis vectors that go."""

ORDERS = {"filters first": "loss+basis", "basis first": "basis+loss"}


@cache
def pipeline(dataset: str, seed: int, assets: Path) -> Pipeline:
    torch.manual_seed(seed)
    splits, test = data(dataset, assets, images=IMAGES, test_images=TEST_IMAGES, seed=seed)
    quick = RECIPES["quick"]
    recipe = replace(quick, train=replace(quick.train, epochs=PASSES, seed=seed))
    model = build("efficientnet_lite0", assets, num_classes=10, input_size=SIDE)
    return Pipeline(model, replace(splits, test=test), recipe, progress=False)


def pruned(dataset: str, seed: int, order: str, ratios: Ratios, assets: Path) -> dict[str, float]:
    stages = pipeline(dataset, seed, assets)
    framework = find_framework(ORDERS[order])
    state: State = stages.start(framework)
    for move in framework.moves:
        state = stages.remove(state, move, ratios, NOT_AT_ALL)
    deployed = deploy(state.model, spec_of(state.model), stages.splits.classes)
    assert stages.splits.test is not None
    before, report = stages.dense().model, measure(deployed)
    return {
        "accuracy before": round(evaluate(before, stages.splits.test).accuracy, 4),
        "accuracy": round(evaluate(deployed, stages.splits.test).accuracy, 4),
        "parameters": report.parameters,
        "multiply-adds": report.macs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--datasets", nargs="+", default=["cifar10", "mnist"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = Cells("shares", {"images": IMAGES, "test images": TEST_IMAGES, "size": SIDE, "passes": PASSES})
    for seed in options.seeds:
        for dataset in options.datasets:
            for filters, basis in SHARES:
                for order in ORDERS:
                    name = f"{dataset}, {filters:g} of the filters, {basis:g} of the basis, {order}, seed {seed}"
                    cells.run(name, partial(pruned, dataset, seed, order, Ratios(basis, filters), options.assets))


if __name__ == "__main__":
    main()
