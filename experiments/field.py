"""Accuracy, parameters, multiply-adds and milliseconds of what users could pick, each method at several sizes.

    python experiments/field.py --assets DIR [--models efficientnet_lite0 ...] [--datasets cifar10 ...]
                                [--methods ours ...] [--seeds 0 1 2] [--sizes 2]

Each cell (network, dataset, method, size, rate, seed) is written to results/field.jsonl as soon as it is done, and
skipped when it is there, so that a run that was stopped goes on. All methods are given the same time to tune, counted
in passes of the unpruned network with all its weights, measured beside each network. Learning rates are swept at a
method's first size with seed 0, and the best by the validation images serves all its other cells.
With --retime, nothing is trained: deployed files in <runs>/onnx/ are timed again, for when the machine is quiet.
`python experiments/field_summary.py` makes docs/field.md of the results. DIR is described in benchmarks/backbones.py.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import studies
import torch
from field_bench import IMAGES, SIDE, START_PASSES, TEST_IMAGES, TUNE_PASSES, VAL_IMAGES, Bench, timed
from field_methods import DATASETS, METHODS, Method, Size, start
from field_points import best_rates

from basisprune.deploy.fold import merge_full_rank
from basisprune.torchkit.watching import example_input
from basisprune.transfer.model import spec_of

RESULTS = Path(__file__).parent / "results" / "field.jsonl"
MODELS = ("efficientnet_lite0", "resnet50")


@dataclass(frozen=True)
class Cell:
    """One network to make: by which method, at which size and rate; `rate` is None where none is swept."""

    model: str
    dataset: str
    method: str
    size: Size
    rate: float | None
    seed: int

    @property
    def name(self) -> str:
        """The name of its result."""
        rate = () if self.rate is None else (f"rate{self.rate:g}",)
        parts = (self.model, self.dataset, self.method, "+".join(f"{part:g}" for part in self.size), *rate, self.seed)
        return "-".join(map(str, parts)).replace(" ", "_").replace(",", "")


def sweep(method: Method) -> list[Cell]:
    """The cells that tell which rate suits the method; none where it has none to choose from.

    They are of the first network, and serve the others too, which take too long: rates are in relation to the size of
    each weight.
    """
    places = product(method.swept_on, method.swept)
    return [Cell(MODELS[0], dataset, method.name, method.sizes[0], rate, 0) for dataset, rate in places]


def best_rate(cells: list[Cell], results: Path) -> float | None:
    """The rate that is best on the validation images of these cells; None where there are no cells."""
    found = studies.read(results) if cells else {}
    (rate,) = best_rates(found[cell.name] for cell in cells).values() or (None,)
    return rate


def run(cell: Cell, assets: Path, runs: Path) -> dict[str, Any]:
    """The record of a cell."""
    began, processor = time.perf_counter(), time.process_time()
    method = METHODS[cell.method]
    bench = opened(cell.model, cell.dataset, cell.seed, side_of(cell), assets, runs)
    tuning = method.tuning if cell.rate is None else replace(method.tuning, weight_lr=cell.rate)
    teacher = start(bench) if tuning.distill else None
    untuned, pruning = None, 0.0
    if method.prune is None:
        network, passes = bench.trained(bench.pretrained, tuning, START_PASSES + TUNE_PASSES)
    else:
        start(bench)  # which is not counted, nor are the times of the layers
        method.times(bench)
        pruning = time.process_time()
        pruned, budget = method.prune(bench, cell.size)
        pruning = time.process_time() - pruning
        untuned = bench.val_accuracy(pruned)
        if tuning.train == "all":
            pruned = merge_full_rank(pruned, example_input(pruned, spec_of(pruned).shape), method.times(bench))
        network, passes = bench.trained(pruned, tuning, budget, teacher=teacher)
    return {
        **asdict(cell),
        "kind": method.kind,
        "config": config() | {"basis_images": method.images, "tuning": asdict(bench.settled(tuning))},
        "point": asdict(bench.point(network, onnx_file(cell, runs), method.times(bench))),
        "untuned_val_accuracy": untuned,
        "passes": passes,
        "pruning_seconds": round(pruning, 1),
        "versions": versions(),
        "device": device(),
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
    }


def onnx_file(cell: Cell, runs: Path) -> Path:
    """Where the cell's deployed network goes."""
    return runs / "onnx" / f"{cell.name}.onnx"


def retime(results: Path, assets: Path, runs: Path) -> None:
    """Times all deployed files that are there once more, and writes that into their results."""
    for name, record in studies.read(results).items():
        names = {field.name: record[field.name] for field in fields(Cell)}
        cell = Cell(**names | {"size": tuple(record["size"])})
        file = onnx_file(cell, runs)
        if file.exists():
            ms, clock_ms = timed(file.read_bytes(), side_of(cell), assets)
            point = record["point"] | {"ms": ms, "clock_ms": clock_ms}
            studies.add(results, name, {**record, "point": point})
            log(f"{name}: {ms:.3f} ms, clock {clock_ms:.3f} ms")


@cache
def opened(model: str, dataset: str, seed: int, side: int, assets: Path, runs: Path) -> Bench:
    return Bench(model, dataset, seed, assets, runs, side)


def side_of(cell: Cell) -> int:
    """The side of its images, in pixels."""
    return int(cell.size[0]) if METHODS[cell.method].prune is None else SIDE


def config() -> dict[str, Any]:
    return {
        "side": SIDE,
        "images": IMAGES,
        "val_images": VAL_IMAGES,
        "test_images": TEST_IMAGES,
        "start_passes": START_PASSES,
        "tune_passes": TUNE_PASSES,
    }


def versions() -> dict[str, str]:
    packages = ("basisprune", "torch", "timm", "numpy", "torch-pruning", "onnxruntime")
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def device() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads: 1"


def wanted(options: argparse.Namespace) -> Iterator[Cell]:
    """All cells in the order in which they tell most; rates are looked up as soon as their sweep is done."""
    for seed, model, count, dataset in product(options.seeds, options.models, options.sizes, options.datasets):
        for method in (METHODS[name] for name in options.methods):
            cells = sweep(method)
            yield from cells
            rate = best_rate(cells, options.results)
            for size in method.sizes[:count]:
                yield Cell(model, dataset, method.name, size, rate, seed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=["efficientnet_lite0"], choices=MODELS)
    parser.add_argument("--datasets", nargs="+", default=list(DATASETS), choices=DATASETS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--sizes", nargs="+", type=int, default=[2, 9], help="so many of each method, then so many")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--runs", type=Path, default=Path("runs/field"), help="networks to start from")
    parser.add_argument("--retime", action="store_true", help="only time all deployed files again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.retime:
        retime(options.results, options.assets, options.runs)
        return
    for cell in wanted(options):
        if cell.name in studies.read(options.results):
            continue
        record = run(cell, options.assets, options.runs)
        studies.add(options.results, cell.name, record)
        point = record["point"]
        log(
            f"{cell.dataset} {cell.method} {cell.size} rate {cell.rate} seed {cell.seed}: "
            f"{point['test_accuracy']:.4f} (untuned {record['untuned_val_accuracy']}) {point['parameters'] / 1e6:.3f}M "
            f"{point['macs'] / 1e6:.1f}M macs {point['ms']:.2f}/{point['clock_ms']:.2f} ms {record['passes']} passes "
            f"{record['pruning_seconds']:.0f}/{record['processor_seconds']:.0f}/{record['seconds']:.0f} s"
        )


def log(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    main()
