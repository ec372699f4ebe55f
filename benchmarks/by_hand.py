"""Is `quick` as good as a careful engineer who trains by hand? Accuracy and CPU seconds, network by network.

    python benchmarks/by_hand.py --assets DIR [--networks mobilenetv2_050 ...] [--datasets cifar10 ...] [--seeds 0 1]
                                 [--passes 5 20] [--ways hand quick]

By hand: AdamW on all weights, the classifier at ten times the rate, warm-up over a tenth of the steps, cosine to zero,
gradients clipped, small shifts, mirrored except for digits; three rates, batch-norm statistics fixed or of the batch.
The best of the six *by its test accuracy* counts, which favours it. `quick` is the recipe with as many epochs, and
chooses by itself. Five passes are over 2,000 images, twenty over 500, 64 pixels each way, 32 for VGG-16, which is slow;
5,000 test images.

At seeds after the first, settings that were more than three points behind on the first are left out: they are not the
best. The time of a training by hand is measured in the process of `quick`: half a pass before it, half a pass after.

DIR is described in benchmarks/backbones.py. Resumes where it was stopped. Writes results/by_hand.json and, for
`quick`, results/by_hand_quick.json; `python benchmarks/by_hand.py --table` shows both and checks the bars.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import timm
import torch
import torch.nn.functional as F
from backbones import DATASETS, build
from common import Cells, load, table
from torch import Tensor, nn

from basisprune import fit, load_data, transfer_model
from basisprune.data import Splits, prepare
from basisprune.recipes import RECIPES
from basisprune.training.config import TrainConfig
from basisprune.transfer.model import TransferModel
from basisprune.types import InputSpec

SIDE, TEST_IMAGES = 64, 5000
IMAGES = {5: 2000, 20: 500}
"""Training images for this many passes: as many steps either way."""
SPEC = InputSpec((SIDE, SIDE), (0.5,) * 3, (0.25,) * 3)
"""How networks that are trained here from scratch see their images."""
SMALL = ("vgg16",)
"""Networks that see their images at half the side."""
OTHERS = slice(30_000, 50_000)
"""Rows of CIFAR-10 that train networks from scratch, and nothing else."""
SCRATCH = ("mobilenetv2_050", "resnet10t")
PRETRAINED = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2", "resnet50", "vgg16")
GRID = tuple(product((1e-4, 3e-4, 1e-3), ("fixed", "batch")))
FAR_BEHIND, MEAN_BAR, CELL_BAR, TIME_BAR = 0.03, -0.003, -0.01, 1.3


@dataclass(frozen=True)
class Cell:
    """A network to adapt to a dataset."""

    network: str
    dataset: str
    passes: int
    seed: int

    def __str__(self) -> str:
        return f"{self.network}, {self.dataset}, {self.passes} passes, seed {self.seed}"

    @property
    def side(self) -> int:
        return SIDE // 2 if self.network in SMALL else SIDE

    @property
    def mirrors(self) -> bool:
        """Whether a careful engineer would mirror its images."""
        return self.dataset != "mnist"


def by_hand(model: nn.Module, images: Tensor, labels: Tensor, cell: Cell, rate: float, statistics: str) -> nn.Module:
    """Return a trained copy of the model; `images` are prepared."""
    net = copy.deepcopy(model).to(memory_format=torch.channels_last).requires_grad_(True)
    named = list(net.named_parameters())
    groups = [
        {"params": [weight for name, weight in named if "classifier" not in name], "peak": rate},
        {"params": [weight for name, weight in named if "classifier" in name], "peak": 10 * rate},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.01)
    draw, step = torch.Generator().manual_seed(cell.seed), 0
    steps = cell.passes * math.ceil(len(images) / 32)
    for _ in range(cell.passes):
        net.train(statistics == "batch")
        for chosen in torch.randperm(len(images), generator=draw).split(32):
            factor = min(1, (step + 1) / (0.1 * steps)) * 0.5 * (1 + math.cos(math.pi * step / steps))
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * factor
            batch = images[chosen]
            if cell.mirrors:
                flipped = torch.rand(len(batch), generator=draw) < 0.5
                batch = torch.where(flipped[:, None, None, None], batch.flip(3), batch)
            down, right = (int(v) for v in torch.randint(-3, 4, (2,), generator=draw))
            batch = torch.roll(batch, (down, right), (2, 3)).contiguous(memory_format=torch.channels_last)
            F.cross_entropy(net(batch), labels[chosen]).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    return net.eval()


def scratch(name: str, assets: Path, runs: Path) -> Any:
    """Return a backbone without ImageNet weights, trained here on 20,000 other images of CIFAR-10."""
    file = runs / f"{name}.pt"
    backbone = timm.create_model(name, num_classes=10)
    if not file.exists():
        torch.manual_seed(0)
        arrays = np.load(assets / "data" / "cifar10.npz")
        pixels, labels = (torch.from_numpy(arrays[key][OTHERS]) for key in ("x_train", "y_train"))
        images = prepare(pixels.permute(0, 3, 1, 2), SPEC)
        trained = by_hand(backbone, images, labels.flatten().long(), Cell(name, "cifar10", 6, 0), 1e-3, "batch")
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(trained.state_dict(), file)
    backbone.load_state_dict(torch.load(file, weights_only=True))
    return backbone


def start(cell: Cell, assets: Path, runs: Path) -> TransferModel:
    """Return the network with a new classifier."""
    torch.manual_seed(cell.seed)
    if cell.network in SCRATCH:
        return transfer_model(scratch(cell.network, assets, runs), 10, input_spec=SPEC)
    return build(cell.network, assets, num_classes=10, input_size=cell.side)


def images(cell: Cell, assets: Path) -> Splits:
    """Return training images, none of which trained a network from scratch, and test images."""
    arrays = np.load(assets / "data" / f"{cell.dataset}.npz")
    rows = np.random.default_rng(cell.seed).permutation(OTHERS.start)[: IMAGES[cell.passes]]
    parts = [(arrays["x_train"][rows], arrays["y_train"][rows].ravel())]
    parts.append((arrays["x_test"][:TEST_IMAGES], arrays["y_test"][:TEST_IMAGES].ravel()))
    train, test = (torch.utils.data.TensorDataset(_nchw(x), torch.from_numpy(y).long()) for x, y in parts)
    return load_data((train, None, test), val_fraction=0)


def _nchw(pixels: Any) -> Tensor:
    return torch.from_numpy(pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2).copy())


def prepared(part: Any, spec: InputSpec) -> tuple[Tensor, Tensor]:
    """Return the images as the network reads them, and their labels."""
    pixels, labels = zip(*(part[row] for row in range(len(part))), strict=True)
    return prepare(torch.stack(pixels), spec), torch.tensor(labels)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    right = [(model(x).argmax(1) == y).sum() for x, y in zip(images.split(250), labels.split(250), strict=True)]
    return round(float(sum(right)) / len(labels), 4)


def hand_settings(cell: Cell, done: dict[str, Any]) -> list[tuple[float, str]]:
    """Return what is worth trying: all settings at first, then those that were not far behind."""
    first = {setting: done.get(f"{replace(cell, seed=0)}, {_said(setting)}") for setting in GRID}
    if cell.seed == 0 or None in first.values():
        return list(GRID)
    best = max(found["accuracy"] for found in first.values() if found)
    return [setting for setting, found in first.items() if found and found["accuracy"] >= best - FAR_BEHIND]


def _said(setting: tuple[float, str]) -> str:
    return f"{setting[0]:g}, {setting[1]}"


def run_hand(cell: Cell, cells: Cells, assets: Path, runs: Path) -> None:
    model, splits = start(cell, assets, runs), images(cell, assets)
    train, test = (prepared(part, model.input_spec) for part in (splits.train, splits.test))
    for setting in hand_settings(cell, cells.results):

        def work(setting: tuple[float, str] = setting) -> dict[str, float]:
            trained, seconds = _seconds(lambda: by_hand(model, *train, cell, *setting))
            return {"seconds": round(seconds, 1), "accuracy": accuracy(trained, *test)}

        cells.run(f"{cell}, {_said(setting)}", work)


def run_quick(cell: Cell, cells: Cells, assets: Path, runs: Path) -> None:
    def work() -> dict[str, Any]:
        model, splits = start(cell, assets, runs), images(cell, assets)
        train, test = (prepared(part, model.input_spec) for part in (splits.train, splits.test))
        halves = zip(*(part.chunk(2) for part in train), strict=True)

        def half_a_pass() -> float:
            pixels, labels = next(halves)
            one = replace(cell, passes=1)
            return _seconds(lambda: by_hand(model, pixels, labels, one, GRID[0][0], "fixed"))[1]

        first = half_a_pass()
        result, seconds = _seconds(lambda: fit(model, splits.train, None, quick(cell), progress=False))
        by_hand_seconds = cell.passes * (first + half_a_pass())
        chosen = result.config
        return {
            "seconds": round(seconds, 1),
            "by hand": round(by_hand_seconds, 1),
            "accuracy": accuracy(result.model, *test),
            "rate": float(f"{chosen.lr:.3g}"),
            "statistics": chosen.norm_statistics,
            "precision": chosen.mixed_precision,
            "mirrored": chosen.augmentation.flip,
            "cropped": chosen.augmentation.crop,
        }

    cells.run(str(cell), work)


def _seconds(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return what the work returns, and how many seconds of the CPU it took."""
    before = time.process_time()
    found = work()
    return found, time.process_time() - before


def quick(cell: Cell) -> TrainConfig:
    """Return the settings of `quick` for the cell."""
    return replace(RECIPES["quick"].train, epochs=cell.passes, seed=cell.seed)


def wanted(options: argparse.Namespace) -> Iterator[Cell]:
    for seed, passes, network, dataset in product(options.seeds, options.passes, options.networks, options.datasets):
        yield Cell(network, dataset, passes, seed)


def compared() -> list[tuple[str, str, float, float, float, float]]:
    """Return each cell with both ways: its name, the best setting by hand, accuracies and seconds."""
    hand, ours = load("by_hand")["results"], load("by_hand_quick")["results"]
    rows = []
    for name, found in ours.items():
        grid = {key.removeprefix(f"{name}, "): value for key, value in hand.items() if key.startswith(f"{name}, ")}
        if grid:
            best = max(grid, key=lambda key: grid[key]["accuracy"])
            rows.append((name, best, grid[best]["accuracy"], found["accuracy"], found["by hand"], found["seconds"]))
    return rows


def show() -> int:
    """Print the comparison and the bars; 1 if one does not hold."""
    rows = compared()
    lines = [
        [name, best, f"{hand:.1%}", f"{ours:.1%}", f"{100 * (ours - hand):+.1f}", f"{our_time / time:.2f}"]
        for name, best, hand, ours, time, our_time in rows
    ]
    print(table(["cell", "best by hand", "by hand", "quick", "points", "time"], lines))
    differences = [ours - hand for _, _, hand, ours, _, _ in rows]
    times = [ours / hand for *_, hand, ours in rows]
    bars = {
        f"mean difference {100 * mean(differences):+.2f} points": mean(differences) >= MEAN_BAR,
        f"worst difference {100 * min(differences):+.1f} points": min(differences) >= CELL_BAR,
        f"mean time {mean(times):.2f}": mean(times) <= TIME_BAR,
    }
    print("\n".join(f"{'holds' if holds else 'BROKEN':8}{bar}" for bar, holds in bars.items()))
    return int(not all(bars.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path)
    parser.add_argument("--networks", nargs="+", default=[*SCRATCH, *PRETRAINED], choices=[*SCRATCH, *PRETRAINED])
    parser.add_argument("--datasets", nargs="+", default=["cifar10", "fashion_mnist", "mnist"], choices=DATASETS)
    parser.add_argument("--passes", nargs="+", type=int, default=list(IMAGES), choices=list(IMAGES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--ways", nargs="+", default=["hand", "quick"], choices=["hand", "quick"])
    parser.add_argument("--runs", type=Path, default=Path("runs/by_hand"), help="where networks from scratch go")
    parser.add_argument("--table", action="store_true", help="only show the results and the bars")
    options = parser.parse_args()
    if options.table:
        sys.exit(show())
    torch.set_num_threads(1)
    settings = {"side": SIDE, "images": {str(key): value for key, value in IMAGES.items()}, "test images": TEST_IMAGES}
    hand = Cells("by_hand", settings)
    ours = Cells("by_hand_quick", settings | {"training": _as_json(RECIPES["quick"].train)})
    for cell in wanted(options):
        if "hand" in options.ways:
            run_hand(cell, hand, options.assets, options.runs)
        if "quick" in options.ways:
            run_quick(cell, ours, options.assets, options.runs)


def _as_json(config: TrainConfig) -> dict[str, Any]:
    return {
        key: value if isinstance(value, int | float | str | None) else str(value)
        for key, value in asdict(config).items()
    }


if __name__ == "__main__":
    main()
