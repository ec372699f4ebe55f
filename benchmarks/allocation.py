"""How basis vectors are shared out among layers by the loss: per vector, parameter or multiply-add; floors; blocks.

    python benchmarks/allocation.py --assets DIR [--models efficientnet_lite0 resnet50] [--datasets cifar10 mnist]

2,000 training images at 32x32, four passes of the recipe `quick`, split by the loss. Every way to plan removes basis
vectors until as many parameters are left as deployed, so that networks of the same size are compared: accuracy on 2,000
test images right after pruning and refit, one thread. DIR is described in benchmarks/backbones.py. Goes on where it
was stopped; writes results/allocation.json.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from backbones import build, data
from common import Cells
from torch import nn

from basisprune import RECIPES, PlanConfig, PreparedBatches, evaluate, fit, measure
from basisprune.data import LabelledImages
from basisprune.deploy.fold import deploy
from basisprune.errors import TooMuchError
from basisprune.importance.loss import BasisLoss, split_by_loss
from basisprune.planning import plan_basis
from basisprune.pruning import prune_basis
from basisprune.transfer.model import spec_of
from basisprune.types import BasisPlan

IMAGES, TEST_IMAGES, SIDE, PASSES = 2000, 2000, 32, 4
LEFT = (0.2, 0.15)
"""The shares of the parameters that are left."""

QUICK = RECIPES["quick"].plan
WAYS = {
    "quick": QUICK,
    "per parameter": replace(QUICK, per="parameter"),
    "per multiply-add": replace(QUICK, per="mac"),
    "no floor": replace(QUICK, min_share=0.0),
    "floor of 10 %": replace(QUICK, min_share=0.1),
    "single vectors": replace(QUICK, round_to=None),
    "blocks of 16": replace(QUICK, round_to=16),
}
"""The plan of `quick` (scores per vector, a floor of 5 % in each layer, blocks of eight), and others."""

STEPS = 9
"""How often the range of the ratio is halved: to a five-hundredth."""


@lru_cache(maxsize=1)
def split(name: str, dataset: str, assets: Path) -> tuple[nn.Module, BasisLoss, LabelledImages]:
    """The trained network, every conv split by the loss, what its vectors are worth, and the test images."""
    torch.manual_seed(0)
    splits, test = data(dataset, assets, images=IMAGES, test_images=TEST_IMAGES, seed=0)
    model = build(name, assets, num_classes=10, input_size=SIDE)
    training = replace(RECIPES["quick"].train, epochs=PASSES)
    trained = fit(model, splits.train, None, training, progress=False).model
    return *split_by_loss(trained, PreparedBatches(splits.train, spec_of(trained), batch_size=128)), test


def parameters(model: nn.Module) -> int:
    return measure(deploy(model, spec_of(model), tuple("0123456789"))).parameters


def planned(model: nn.Module, found: BasisLoss, config: PlanConfig, most: float) -> BasisPlan:
    """The plan that removes least of those that leave at most so many parameters."""
    low, high, best = 0.0, 1.0, None
    for _ in range(STEPS):
        ratio = (low + high) / 2
        try:
            plan = plan_basis(found.scores, ratio, config)
        except TooMuchError:
            high = ratio
            continue
        if parameters(prune_basis(model, plan)) <= most:
            high, best = ratio, plan
        else:
            low = ratio
    if best is None:
        raise TooMuchError(f"{most:,.0f} parameters cannot be reached")
    return best


def pruned(way: str, left: float, name: str, dataset: str, assets: Path) -> dict[str, Any]:
    model, found, test = split(name, dataset, assets)
    cell: dict[str, Any] = {"network": name, "dataset": dataset, "left": left, "way": way}
    cell["accuracy before"] = round(evaluate(model, test).accuracy, 4)
    try:
        plan = planned(model, found, WAYS[way], left * parameters(model))
    except TooMuchError:
        return cell | {"accuracy": None}
    small = prune_basis(model, plan, compensate="refit", statistics=found.statistics)
    report = measure(deploy(small, spec_of(small), tuple("0123456789")))
    accuracy = round(evaluate(small, test).accuracy, 4)
    return cell | {"accuracy": accuracy, "parameters": report.parameters, "multiply-adds": report.macs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["efficientnet_lite0", "resnet50"])
    parser.add_argument("--datasets", nargs="+", default=["cifar10", "mnist"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = {"images": IMAGES, "test images": TEST_IMAGES, "size": SIDE, "passes": PASSES}
    cells = Cells("allocation", config)
    for name, dataset, left, way in product(options.models, options.datasets, LEFT, WAYS):
        work = partial(pruned, way, left, name, dataset, options.assets)
        cells.run(f"{name}, {dataset}, {left:g} left, {way}", work)


if __name__ == "__main__":
    main()
