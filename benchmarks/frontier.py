"""Accuracy against milliseconds, untuned: networks planned by parameters, and by the measured times of their layers.

    python benchmarks/frontier.py --assets DIR --scratch DIR [--models efficientnet_lite0 densenet121]

EfficientNet-Lite0 has its ImageNet weights and is trained briefly on CIFAR-10 at 128x128. No weights of DenseNet-121
come with the assets: it is trained from scratch on MNIST at 64x64, where its accuracy is measured, then planned and
timed at 128x128. "taylor" is how plans were made before scores were in units of the loss: the basis of the outputs,
Taylor scores, one threshold for all vectors. "shares" removes the same share of filters and then of basis vectors, in
blocks of 8, and folds by parameters, which is what `compress` does by itself; "params" plans all ranks and widths
together by parameters; "latency" by time, in the blocks of the runtime, and folds by time. Both may drop whole residual
branches. Scores and compensation of these are by the loss, from the training images that the recipe takes. Nothing is
tuned after pruning. All networks of a model take turns in ONNX Runtime, one image at a time, on one thread. `gain`, of
each network not planned by time, is the speed-up that "latency" has at its accuracy, interpolated between its networks,
over its own; there is none for networks that only guess. `bar` is what it is to be over "taylor". DIR is described in
benchmarks/backbones.py; the scratch folder keeps the networks. Writes results/frontier.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from backbones import build, data
from common import Cells
from torch import nn

from basisprune import RECIPES, evaluate, measure, transfer_model
from basisprune.budget import Optimize, Ratios
from basisprune.budget.planning import CostPlanner, Scored
from basisprune.deploy.export.onnx import open_session, to_proto
from basisprune.deploy.fold import fold
from basisprune.deploy.latency import interleaved, speedup
from basisprune.deploy.timing import measured_table, wanted_shapes
from basisprune.errors import TooMuchError
from basisprune.joint_plan import PlanFrontier
from basisprune.layer_times import TimeTable
from basisprune.method.pipeline import Pipeline
from basisprune.method.scoring import Statistics
from basisprune.method.states import NOT_AT_ALL
from basisprune.planning import PlanConfig, plan_basis
from basisprune.pruning import prune_basis
from basisprune.recipes import find_framework
from basisprune.types import InputSpec, Scores

SIDE, REPEATS, TEST_IMAGES, BAR = 128, 31, 3000, 1.25
SLOWEST, GUESSING, SCORE_IMAGES = 0.98, 0.2, 1000
TAYLOR = (0.3, 0.5, 0.7, 0.9)
SHARES = (0.2, 0.35, 0.45, 0.65)
SAVED: dict[Optimize, tuple[float, ...]] = {"latency": (0.2, 0.25, 0.35, 0.5, 0.65, 0.75), "params": (0.55, 0.7, 0.9)}
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
    recipe = replace(quick, train=train)
    state = Pipeline(model, replace(splits, test=None), recipe, scratch / name, progress=False).dense()
    stages = Pipeline(model, replace(splits, test=test), recipe, progress=False)
    stages.adopt(state)
    return stages


def networks(stages: Pipeline, table: TimeTable) -> dict[str, Callable[[], nn.Module]]:
    """What makes each network, by its name."""
    start = stages.dense()

    def planned(kind: Optimize, ratio: float) -> nn.Module:
        stages.planner = Planner(kind, table if kind == "latency" else None)
        return stages.prune(start, MOVE, ratio, NOT_AT_ALL).model

    def shared(ratio: float) -> nn.Module:
        return stages.remove(start, MOVE, Ratios(ratio, ratio), NOT_AT_ALL).model

    @cache
    def taylor() -> tuple[nn.Module, Scores, Statistics]:
        before = replace(stages.settings, basis="outputs", scores="taylor", score_images=SCORE_IMAGES)
        return Pipeline(stages.model, stages.splits, before, progress=False).scoring.basis(start.model)

    def by_taylor(ratio: float) -> nn.Module:
        model, scores, statistics = taylor()
        plan = plan_basis(scores, ratio, stages.settings.plan)
        return prune_basis(model, plan, compensate="refit", statistics=statistics)

    made: dict[str, Callable[[], nn.Module]] = {"dense": lambda: start.model}
    made |= {f"taylor {ratio}": partial(by_taylor, ratio) for ratio in TAYLOR}
    made |= {f"shares {ratio}": partial(shared, ratio) for ratio in SHARES}
    made |= {f"{kind} {ratio}": partial(planned, kind, ratio) for kind, ratios in SAVED.items() for ratio in ratios}
    return made


def frontier_of(name: str, assets: Path, scratch: Path) -> dict[str, Any]:
    """All networks of a model; those that are in the scratch folder already are not made again."""
    stages = trained(name, assets, scratch)
    table = measured_table(wanted_shapes(stages.model, (3, SIDE, SIDE)))
    assert stages.splits.test is not None
    rows: dict[str, Any] = {}
    files: dict[str, Path] = {}
    for key, make in networks(stages, table).items():
        files[key] = scratch / name / f"{key.replace(' ', '-')}.onnx"
        facts = files[key].with_suffix(".json")
        if not facts.exists():
            try:
                model = make()
            except TooMuchError:
                continue
            times = table if key.startswith("latency") else None
            folded = fold(model, torch.zeros(1, 3, SIDE, SIDE), "params" if times is None else "latency", times=times)
            cost = measure(folded, (3, SIDE, SIDE))
            accuracy = round(evaluate(model, stages.splits.test).accuracy, 4)
            row = {"accuracy": accuracy, "parameters": cost.parameters, "multiply-adds": cost.macs}
            files[key].write_bytes(to_proto(folded, torch.zeros(2, 3, SIDE, SIDE)).SerializeToString())
            facts.write_text(json.dumps(row))
            print(name, key, row, flush=True)
        rows[key] = json.loads(facts.read_text())
    timed(rows, files)
    by_time = [row for key, row in rows.items() if key.startswith(("dense", "latency"))]
    for key, row in rows.items():
        if not key.startswith(("dense", "latency")):
            row["gain"] = gain(row, by_time)
    return rows


def timed(rows: dict[str, Any], files: dict[str, Path]) -> None:
    """Adds the milliseconds and the speed-up of each network; all take turns."""
    image = np.full((1, 3, SIDE, SIDE), 0.1, dtype=np.float32)
    runs = {}
    for key in rows:
        session = open_session(files[key], threads=1)
        runs[key] = partial(session.run, None, {session.get_inputs()[0].name: image})
    seconds = interleaved(runs, repeats=REPEATS)
    for key, row in rows.items():
        row["milliseconds"] = round(1000 * statistics.median(seconds[key]), 3)
        row["speedup"] = round(speedup(seconds, "dense", key), 3)


def gain(row: dict[str, float], others: list[dict[str, float]]) -> float | None:
    """The speed-up of the others at the same accuracy over the row's own.

    None for a row that only guesses, and where all of the others are more accurate, or all less.
    """
    # A network that is slower than a more accurate one is not worth anything.
    front = [each for each in others if not any(_beats(other, each) for other in others)]
    front = sorted(front, key=lambda each: each["accuracy"])
    accuracy = row["accuracy"]
    if not max(GUESSING, front[0]["accuracy"]) <= accuracy <= front[-1]["accuracy"]:
        return None
    known = np.interp(accuracy, [each["accuracy"] for each in front], [each["speedup"] for each in front])
    return round(float(known) / row["speedup"], 3)


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
    config = {"size": SIDE, "repeats": REPEATS, "test images": TEST_IMAGES, "bar": BAR, "guessing": GUESSING}
    config["images of Taylor scores"] = SCORE_IMAGES
    cells = Cells("frontier", {**config, "settings": settings})
    for name in options.models:
        cells.run(name, partial(frontier_of, name, options.assets, options.scratch))
    rows = [(name, key, row) for name, networks in cells.results.items() for key, row in networks.items()]
    missed = [f"{name}, {key}: slower than dense" for name, key, row in rows if row["speedup"] < SLOWEST]
    barred = [each for each in rows if each[1].startswith("taylor") and each[2]["gain"] is not None]
    missed += [f"{name}, {key}: gain {row['gain']}" for name, key, row in barred if row["gain"] < BAR]
    print(f"{len(missed)} bars missed; {len(barred)} gains compared with {BAR}", *missed, sep="\n  ")


if __name__ == "__main__":
    main()
