"""How many candidates a search needs and how small it gets: steps by the expected loss against halving.

    python benchmarks/search.py --assets DIR [--datasets cifar10 mnist] [--seeds 0 1] [--ways ...]

EfficientNet-Lite0, 2,000 training and 1,000 validation images at 32x32, a budget of one point, the recipe `quick` with
three passes, one thread. All ways start from the same trained network. DIR is described in benchmarks/backbones.py.
Goes on where it was stopped; writes results/search.json.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from backbones import build, data
from common import Cells

from basisprune import RECIPES, evaluate
from basisprune.budget import Budget
from basisprune.budget.planning import CostPlanner
from basisprune.data import take
from basisprune.method.pipeline import Pipeline
from basisprune.method.scoring import Outlook
from basisprune.method.states import State
from basisprune.recipes import Framework, Move, Recipe, find_framework
from basisprune.search import Search, SearchConfig
from basisprune.search.candidates import Evaluated
from basisprune.types import FrameworkName

IMAGES, VAL_IMAGES, TEST_IMAGES, SIDE, PASSES = 2000, 1000, 5000, 32, 3


class Blind(Pipeline):
    """A pipeline whose searches do not know what the scores expect."""

    def outlook(self, _state: State, _move: Move, _smallest: float) -> Outlook | None:
        """Nothing."""
        return None


@dataclass(frozen=True)
class Way:
    """How a search goes, whether the rate of its trainings warms up, the least share of a layer's vectors and filters
    that is kept (default: the recipe's), and what plans both together."""

    framework: FrameworkName
    pipeline: type[Pipeline] = Pipeline
    warm_start: bool = True
    warms_up: bool = True
    floor: float | None = None
    planner: CostPlanner | None = None

    @property
    def recipe(self) -> Recipe:
        """`quick`, as this way has it."""
        quick = RECIPES["quick"]
        floor = quick.plan.min_share if self.floor is None else self.floor
        return replace(
            quick,
            train=replace(quick.train, warmup=quick.train.warmup if self.warms_up else 0.0),
            plan=replace(quick.plan, min_share=floor),
            filter_plan=replace(quick.filter_plan, min_share=floor),
        )


WAYS = {
    "one share, by the expected loss, from the last": Way("loss+basis"),
    "one share, by the expected loss, from the last, no warm-up": Way("loss+basis", warms_up=False),
    "one share, by the expected loss, from the last, no floor": Way("loss+basis", floor=0.0),
    "planned together, by the expected loss, from the last": Way("loss+basis", planner=CostPlanner("params")),
    "one share, by the expected loss, anew": Way("loss+basis", warm_start=False),
    "one share, halving, from the last": Way("loss+basis", Blind),
    "basis then filters, halving, from the last": Way("basis+loss", Blind),
}


def searched(way: Way, dataset: str, seed: int, assets: Path) -> dict[str, Any]:
    torch.manual_seed(seed)
    splits, test = data(dataset, assets, images=IMAGES, test_images=TEST_IMAGES, seed=seed)
    assert splits.val is not None
    splits = replace(splits, val=take(splits.val, range(VAL_IMAGES)))
    training = replace(way.recipe.train, epochs=PASSES, seed=seed)
    recipe = replace(way.recipe, train=training, finetune=training)
    model = build("efficientnet_lite0", assets, num_classes=10, input_size=SIDE)
    pipeline = way.pipeline(model, splits, recipe, progress=False, planner=way.planner)
    start = _start(pipeline, find_framework(way.framework))
    before = time.process_time()
    found = Search(pipeline, Budget(max_drop=0.01), SearchConfig(way.framework, warm_start=way.warm_start)).run()
    seconds = time.process_time() - before
    chosen = found.candidates[found.chosen]
    return {
        "candidates": len(found.trials) - 1,
        "parameters": chosen.parameters,
        "multiply-adds": chosen.macs,
        "drop": round(chosen.drop, 4),
        "test drop": round(evaluate(start.model, test).accuracy - evaluate(found.state.model, test).accuracy, 4),
        "seconds": round(seconds),
        "tried": [_tried(trial) for trial in found.trials[1:]],
    }


def _tried(trial: Evaluated) -> dict[str, Any]:
    """What became of a candidate, and its accuracy before it was tuned and after each pass, if it was."""
    candidate, (*_, before, last) = trial.candidate, trial.state.stages
    untuned = before if last.history else last
    return {
        "removed": [round(ratio, 4) for ratio in (candidate.basis_ratio, candidate.filter_ratio)],
        "parameters": candidate.parameters,
        "drop": round(candidate.drop, 4),
        "passed": candidate.passed,
        "accuracies": [round(untuned.accuracy, 3), *(round(epoch.val_accuracy or 0, 3) for epoch in last.history)],
    }


def _start(pipeline: Pipeline, framework: Framework) -> State:
    """The network that the search starts from, trained before the clock runs."""
    pipeline.start(framework)
    return pipeline.dense()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--datasets", nargs="+", default=["cifar10", "mnist"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = {"images": IMAGES, "val images": VAL_IMAGES, "test images": TEST_IMAGES, "size": SIDE, "passes": PASSES}
    cells = Cells("search", config)
    for seed in options.seeds:
        for dataset in options.datasets:
            for name in options.ways:
                work = partial(searched, WAYS[name], dataset, seed, options.assets)
                cells.run(f"{dataset}, {name}, seed {seed}", work)


if __name__ == "__main__":
    main()
