"""What each part of the method is worth: the accuracy of ours with one part replaced, same start, same time to tune.

    python experiments/parts.py --assets DIR [--models efficientnet_lite0 ...] [--datasets cifar10 ...]
                                [--parts basis ...] [--seeds 0 1] [--shares 0.75]

The protocol is that of `field.py`, shorter and at 32 pixels. By default half of the filters, then of the basis vectors,
go; the more go, the more it matters which ones do. Each cell is written to results/parts.jsonl as soon as it is
done, and skipped when it is there. `python experiments/field_summary.py` makes a table of docs/field.md of the results.
DIR is described in benchmarks/backbones.py.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import studies
import torch
from field import MODELS, device, log, versions
from field_bench import IMAGES, START_PASSES, Bench
from field_methods import DATASETS, NORMS, TUNED, Ours, Worth, planned, start
from torch import nn

from basisprune import Augment, TrainConfig, measure, predict
from basisprune.budget.planning import CostPlanner
from basisprune.deploy.fold import deploy, merge_full_rank
from basisprune.torchkit.watching import example_input
from basisprune.transfer.model import spec_of

RESULTS = Path(__file__).parent / "results" / "parts.jsonl"
SIDE, TUNE_PASSES = 32, 3.0
HALF = 0.5
"""The share of the filters, and then of the basis vectors, that goes if nothing else is said."""

OURS = Worth()


@lru_cache(maxsize=1)
def pruned(bench: Bench, worth: Worth, share: float = HALF) -> nn.Module:
    """The start without this share of its filters, then of its basis vectors."""
    return Ours(worth=worth)(bench, (share, share))[0]


@dataclass(frozen=True)
class Part:
    """A part of the method, what it is in ours, and what is put in its place: in pruning or in tuning.

    With `settled`, what is deployed as one layer is tuned as one. With `same_passes`, a pass computes as much as one of
    ours, so that both make as many: the clock errs by a pass or two, which would count for more than most parts do.
    """

    name: str
    ours: str
    instead: str
    prune: Worth | Callable[[Bench, float], nn.Module] = OURS
    tuning: TrainConfig = TUNED
    settled: bool = True
    same_passes: bool = True


def parameters(bench: Bench, model: nn.Module) -> int:
    """Of the deployed network."""
    return measure(deploy(model, spec_of(model), bench.splits.classes)).parameters


def jointly(bench: Bench, share: float) -> nn.Module:
    """All ranks and widths planned together, for as many parameters as ours has."""
    left = parameters(bench, pruned(bench, OURS, share)) / parameters(bench, start(bench))
    return planned(bench, CostPlanner("params"), round(1 - left, 4))


PARTS = {
    part.name: part
    for part in (
        Part("ours", "", ""),
        Part(
            "all weights", "tuned", "norms, scales and classifier alone", tuning=NORMS, settled=False, same_passes=False
        ),
        Part("form", "tuned as deployed", "every pair tuned as two layers", settled=False, same_passes=False),
        Part(
            "rate",
            "1 for the weights, gradients clipped",
            "0.3, not clipped",
            tuning=replace(TUNED, weight_lr=0.3, clip_norm=None),
        ),
        Part("warm-up", "none", "a tenth of the steps", tuning=replace(TUNED, warmup=0.1)),
        Part("labels", "as they are", "smoothed by 0.1", tuning=replace(TUNED, label_smoothing=0.1)),
        Part(
            "distillation",
            "none",
            "from the start, half of the loss",
            tuning=replace(TUNED, distill=0.5),
            same_passes=False,
        ),
        Part(
            "augmentation",
            "shifts; mirrored, but digits",
            "crops, TrivialAugment; mirrored, but digits",
            tuning=replace(TUNED, augmentation=Augment(crop=0.5, policy="trivial")),
        ),
        Part(
            "allocation",
            "equal shares of both",
            "planned together, same parameters; whole branches may go",
            jointly,
            same_passes=False,
        ),
        Part("basis", "of the loss", "of the outputs", Worth(basis="outputs")),
        Part("scores", "of the loss", "Taylor", Worth(vectors="taylor")),
        Part(
            "gate",
            "filters by the loss, where they are read",
            "Taylor, gate before the activation",
            Worth(filters="taylor"),
        ),
        Part(
            "gate behind",
            "filters by the loss, where they are read",
            "Taylor, gate behind the activation",
            Worth(filters="taylor_behind"),
        ),
        Part("compensation", "refit of filters that go", "none", Worth(compensate="none")),
    )
}
"""By name; those that tune the same pruned network follow each other, so that it is made once."""


@dataclass(frozen=True)
class Cell:
    """A network, a dataset and a seed with one part replaced, and the share that goes."""

    model: str
    dataset: str
    part: str
    seed: int
    share: float = HALF

    @property
    def name(self) -> str:
        """The name of its result."""
        share = () if self.share == HALF else (f"{self.share:g}",)
        return "-".join((self.model, self.dataset, self.part, *share, str(self.seed))).replace(" ", "_")

    @property
    def ours(self) -> Cell:
        """The cell with nothing replaced, that it is compared with."""
        return replace(self, part="ours")


@lru_cache(maxsize=1)
def opened(model: str, dataset: str, seed: int, assets: Path, runs: Path) -> Bench:
    return Bench(model, dataset, seed, assets, runs, SIDE, SIDE)


def run(cell: Cell, assets: Path, runs: Path, passes: int | None = None) -> dict[str, Any]:
    """The record of a cell, tuned for so many passes, or for as many as the clock allows."""
    began = time.perf_counter()
    bench, part = opened(cell.model, cell.dataset, cell.seed, assets, runs), PARTS[cell.part]
    assert bench.splits.test is not None
    how, share = part.prune, cell.share
    small = pruned(bench, how, share) if isinstance(how, Worth) else how(bench, share)
    form = merge_full_rank(small, example_input(small, spec_of(small).shape)) if part.settled else small
    teacher = start(bench) if part.tuning.distill else None
    network, passes = bench.trained(form, part.tuning, TUNE_PASSES, teacher=teacher, passes=passes)
    before, after = (float(predict(each, bench.splits.test).hits.mean()) for each in (small, network))
    return {
        **asdict(cell),
        "ours": part.ours,
        "instead": part.instead,
        "accuracy": after,
        "untuned": before,
        "parameters": parameters(bench, network),
        "passes": passes,
        "config": {
            "side": SIDE,
            "size": (cell.share, cell.share),
            "images": IMAGES,
            "start_passes": START_PASSES,
            "tune_passes": TUNE_PASSES,
            "tuning": asdict(bench.settled(part.tuning)),
        },
        "versions": versions(),
        "device": device(),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument(
        "--shares", nargs="+", type=float, default=[HALF], help="of filters and of basis vectors, to go"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--runs", type=Path, default=Path("runs/parts"), help="networks to start from")
    options = parser.parse_args()
    torch.set_num_threads(1)
    places = product(options.seeds, options.models, options.datasets, options.shares, options.parts)
    for seed, model, dataset, share, part in places:
        cell = Cell(model, dataset, part, seed, share)
        done = studies.read(options.results)
        if cell.name in done:
            continue
        passes = None
        if cell != cell.ours and PARTS[part].same_passes:
            if cell.ours.name not in done:
                raise SystemExit(f"{cell.ours.name}: not there; run the part 'ours' first, which counts the passes")
            passes = done[cell.ours.name]["passes"]
        record = run(cell, options.assets, options.runs, passes)
        studies.add(options.results, cell.name, record)
        log(
            f"{cell.name}: {record['accuracy']:.4f} (untuned {record['untuned']:.4f}) "
            f"{record['parameters'] / 1e6:.3f}M {record['passes']} passes {record['seconds']:.0f} s"
        )


if __name__ == "__main__":
    main()
