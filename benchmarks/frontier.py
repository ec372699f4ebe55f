"""Accuracy against milliseconds, untuned: networks planned by parameters, and by the measured times of their layers.

    python benchmarks/frontier.py --assets DIR --scratch DIR [--models efficientnet_lite0 densenet121]

EfficientNet-Lite0 has its ImageNet weights and is trained briefly on CIFAR-10 at 128x128. No weights of DenseNet-121
come with the assets: it is trained from scratch on MNIST at 64x64, where its accuracy is measured, then planned and
timed at 128x128. "shares" removes the same share of filters and then of basis vectors, in blocks of 8, and folds by
parameters, which is what `compress` does by itself; "params" plans all ranks and widths together by parameters;
"latency" by time, in the blocks of the runtime, may drop whole residual branches, and folds by time. Scores and
compensation are by the loss, from 256 images, and nothing is tuned after pruning. All networks of a model take turns in
ONNX Runtime, one image at a time, on one thread. `gain` is the speed-up of "latency" over the one that "shares" has at
the same accuracy, interpolated between its networks; `bar` is what it is to be. DIR is described in
benchmarks/backbones.py; the scratch folder keeps the trained networks. Writes results/frontier.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbones import build, data
from common import Cells
from torch import nn

from basisprune import RECIPES, evaluate, measure, transfer_model
from basisprune.budget import Ratios
from basisprune.budget.planning import CostPlanner, Scored
from basisprune.deploy.fold import fold
from basisprune.deploy.latency import measure_latency
from basisprune.deploy.timing import measured_table, wanted_shapes
from basisprune.errors import TooMuchError
from basisprune.frameworks import find_framework
from basisprune.joint_plan import PlanFrontier
from basisprune.joint_plan.times import TimeTable
from basisprune.pipeline import Pipeline
from basisprune.plan import PlanConfig
from basisprune.states import NOT_AT_ALL, State
from basisprune.types import InputSpec

SIDE, REPEATS, TEST_IMAGES, BASIS_IMAGES, BAR = 128, 31, 1000, 256, 1.25
SLOWEST = 0.98
SHARES = (0.2, 0.35, 0.5, 0.65)
SAVED = {"latency": (0.2, 0.35, 0.5, 0.65), "params": (0.55, 0.75)}
MOVE = find_framework("loss+basis").moves[0]


@dataclass(frozen=True)
class Setting:
    """What one of the networks is trained on, at which size, and with which statistics of its norms."""

    dataset: str
    size: int
    images: int
    passes: int
    statistics: str


SETTINGS = {
    "efficientnet_lite0": Setting("cifar10", 128, 1500, 2, "fixed"),
    "densenet121": Setting("mnist", 64, 2000, 4, "batch"),
}


class Planner(CostPlanner):
    """Plans for the size at which networks are timed, whatever the size at which they are trained."""

    def frontier(self, scored: Scored, config: PlanConfig, spec: InputSpec, say: Callable[[str], None]) -> PlanFrontier:
        return super().frontier(scored, config, replace(spec, size=(SIDE, SIDE)), say)


def trained(name: str, assets: Path, scratch: Path) -> Pipeline:
    """A pipeline whose unpruned network is kept in the scratch folder."""
    setting, quick = SETTINGS[name], RECIPES["quick"]
    torch.manual_seed(0)
    splits, test = data(setting.dataset, assets, images=setting.images, test_images=TEST_IMAGES, seed=0)
    train = replace(quick.train, epochs=setting.passes, norm_statistics=setting.statistics)  # type: ignore[arg-type]
    if name == "densenet121":
        model = transfer_model(name, 10, input_size=setting.size)
    else:
        model = build(name, assets, num_classes=10, input_size=setting.size)
    first = Pipeline(model, replace(splits, test=None), replace(quick, train=train), scratch / name, progress=False)
    state, recipe = first.dense(), replace(quick, train=train, basis_images=BASIS_IMAGES)
    stages = Pipeline(model, replace(splits, test=test), recipe, progress=False)
    stages.adopt(state)
    return stages


def networks(stages: Pipeline, table: TimeTable) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Each network by name, as it was pruned and as it is deployed."""
    start = stages.dense()
    example = torch.zeros(1, 3, SIDE, SIDE)
    yield "dense", start.model, fold(start.model, example, "params")
    for kind, ratio, model in pruned(stages, start, table):
        folded = fold(model, example, "latency", times=table) if kind == "latency" else fold(model, example, "params")
        print(kind, ratio, flush=True)
        yield f"{kind} {ratio}", model, folded


def pruned(stages: Pipeline, start: State, table: TimeTable) -> Iterator[tuple[str, float, nn.Module]]:
    for kind, planner in {"latency": Planner("latency", table), "params": Planner("params")}.items():
        stages.planner = planner
        for ratio in SAVED[kind]:
            try:
                yield kind, ratio, stages.prune(start, MOVE, ratio, NOT_AT_ALL).model
            except TooMuchError:
                break
    stages.planner = None
    for ratio in SHARES:
        try:
            yield "shares", ratio, stages.remove(start, MOVE, Ratios(ratio, ratio), NOT_AT_ALL).model
        except TooMuchError:
            break


def frontier_of(name: str, assets: Path, scratch: Path) -> dict[str, Any]:
    stages = trained(name, assets, scratch)
    table = measured_table(wanted_shapes(stages.model, (3, SIDE, SIDE)))
    rows: dict[str, Any] = {}
    deployed = {}
    assert stages.splits.test is not None
    for key, model, folded in networks(stages, table):
        cost = measure(folded, (3, SIDE, SIDE))
        accuracy = evaluate(model, stages.splits.test).accuracy
        rows[key] = {"accuracy": round(accuracy, 4), "parameters": cost.parameters, "multiply-adds": cost.macs}
        deployed[key] = folded
    report = measure_latency(
        deployed, (3, SIDE, SIDE), batch_sizes=(1,), backends=("onnxruntime",), threads=1, repeats=REPEATS
    )
    for key in rows:
        found = report.row(key, "onnxruntime", 1)
        rows[key] |= {"milliseconds": round(1000 * found.seconds, 3), "speedup": round(found.speedup, 3)}
    for key, row in rows.items():
        if key.startswith("latency"):
            row["gain"] = gain(row, [other for each, other in rows.items() if each.startswith(("dense", "shares"))])
    return rows


def gain(row: dict[str, float], others: list[dict[str, float]]) -> float | None:
    """The speed-up over that of the others at the same accuracy; None where none of them is that inaccurate."""
    # A network that is slower than a more accurate one is not worth anything.
    front = [each for each in others if not any(_beats(other, each) for other in others)]
    front = sorted(front, key=lambda each: each["accuracy"])
    if row["accuracy"] < front[0]["accuracy"]:
        return None
    known = np.interp(row["accuracy"], [each["accuracy"] for each in front], [each["speedup"] for each in front])
    return round(row["speedup"] / float(known), 3)


def _beats(one: dict[str, float], other: dict[str, float]) -> bool:
    return one["accuracy"] >= other["accuracy"] and one["speedup"] > other["speedup"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    settings = {name: vars(setting) for name, setting in SETTINGS.items()}
    config = {"size": SIDE, "repeats": REPEATS, "test images": TEST_IMAGES, "basis images": BASIS_IMAGES, "bar": BAR}
    cells = Cells("frontier", {**config, "settings": settings})
    for name in options.models:
        cells.run(name, partial(frontier_of, name, options.assets, options.scratch))
    rows = [(name, key, row) for name, networks in cells.results.items() for key, row in networks.items()]
    missed = [f"{name}, {key}: slower than dense" for name, key, row in rows if row["speedup"] < SLOWEST]
    missed += [f"{name}, {key}: gain {row['gain']}" for name, key, row in rows if (row.get("gain") or BAR) < BAR]
    print(f"{len(missed)} bars missed", *missed, sep="\n  ")


if __name__ == "__main__":
    main()
