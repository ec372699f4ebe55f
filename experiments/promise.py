"""Ladders of pruned networks, and what each answers for many images never used to train them.

    python experiments/promise.py --assets DIR [--datasets cifar10 ...] [--seeds 0 1 ...]

For each dataset and seed: the network is trained, then pruned and tuned again and again, each time from the last, as a
search with a warm start does it. Nothing is chosen here, so that `promise_summary.py` can draw the images of many
searches from those that no network has seen, and let the rest judge. Each ladder is written to <results>/promise/ as
soon as it is done, and skipped when it is there. DIR is described in benchmarks/backbones.py.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import studies
import torch
from promise_ladder import Ladder, Rung
from torch.utils.data import ConcatDataset

from basisprune import Pipeline, Recipe, Splits, load_data, measure, predict
from basisprune.data import take
from basisprune.deploy.fold import deploy
from basisprune.errors import TooMuchError
from basisprune.method.states import State
from basisprune.recipes import RECIPES

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from backbones import build  # the benchmarks use them too

RESULTS = Path(__file__).parent / "results" / "promise.jsonl"
DATASETS = ("fashion_mnist", "mnist", "cifar10")
PACKAGES = ("basisprune", "torch", "timm", "numpy")


@dataclass(frozen=True)
class Config:
    """How a ladder is made: of so many networks, each of which keeps `step` of the basis vectors of the last."""

    model: str = "efficientnet_lite0"
    side: int = 32
    images: int = 1000
    pool: int = 12000
    epochs: int = 4
    tune_epochs: int = 2
    tune_lr: float = 1.5e-3
    basis_images: int = 96
    networks: int = 6
    step: float = 0.75


FIRST = {"fashion_mnist": 0.4, "mnist": 0.25, "cifar10": 0.3}
"""The share of basis vectors that the first pruned network keeps: where the loss begins to show."""


def climb(dataset: str, seed: int, assets: Path, config: Config) -> Ladder:
    """The ladder of a dataset and a seed."""
    began = time.perf_counter()
    splits, pool = images(dataset, seed, assets, config)
    torch.manual_seed(seed)
    model = build(config.model, assets, num_classes=splits.num_classes, input_size=config.side)
    pipeline = Pipeline(model, splits, recipe(seed, flip=dataset != "mnist", config=config), progress=False)
    rungs, answers = [], []
    for share, state in networks(pipeline, FIRST[dataset], config):
        small = deploy(state.model, pipeline.spec, splits.classes).to(memory_format=torch.channels_last)
        report = measure(small)
        rungs.append(Rung(share, report.parameters, report.macs))
        found = predict(small, pool)
        answers.append(found.classes.astype(np.uint8))
        log(f"{dataset} {seed}: {share:.3f} kept, {report.parameters:,} parameters, {found.hits.mean():.4f}")
    return Ladder(
        dataset=dataset,
        seed=seed,
        rungs=tuple(rungs),
        labels=found.labels.astype(np.uint8),
        answers=np.stack(answers),
        config=asdict(config),
        versions={"python": platform.python_version()} | {name: version(name) for name in PACKAGES},
        device=f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads: 1",
        seconds=round(time.perf_counter() - began, 1),
    )


def images(dataset: str, seed: int, assets: Path, config: Config) -> tuple[Splits, ConcatDataset[object]]:
    """Images to train on, with a few that only show how training goes, and the pool that no network has seen."""
    drawn = load_data(assets / "data" / f"{dataset}.npz", limit=config.images, val_fraction=0.25, seed=seed)
    assert drawn.val is not None
    assert drawn.test is not None
    few, rest = take(drawn.val, range(32)), take(drawn.val, range(32, 32 + config.pool - len(drawn.test)))
    return replace(drawn, val=few, test=None), ConcatDataset([rest, drawn.test])


def recipe(seed: int, *, flip: bool, config: Config) -> Recipe:
    """The recipe `quick` with shorter training; images are mirrored where that makes sense."""
    quick = RECIPES["quick"]
    augmentation = replace(quick.train.augmentation, flip=flip)
    train = replace(quick.train, seed=seed, augmentation=augmentation, epochs=config.epochs)
    tuning = replace(train, epochs=config.tune_epochs, lr=config.tune_lr)
    return replace(quick, train=train, finetune=tuning, basis_images=config.basis_images)


def networks(pipeline: Pipeline, first: float, config: Config) -> Iterator[tuple[float, State]]:
    """The unpruned network, then each smaller one, with the share of basis vectors asked of it."""
    yield 1.0, pipeline.dense()
    state = pipeline.decomposed()
    for number in range(config.networks):
        try:
            state = pipeline.prune_basis(state, round(1 - (config.step if number else first), 4))
        except TooMuchError:  # it is as small as it gets
            return
        yield round(first * config.step**number, 4), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(10)))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for seed in options.seeds:
        for dataset in options.datasets:
            if f"{dataset}-{seed}" not in studies.read(options.results):
                ladder = climb(dataset, seed, options.assets, Config())
                ladder.write(options.results)
                log(f"{dataset}-{seed}: {ladder.seconds:.0f} s")


def log(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    main()
