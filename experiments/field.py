"""Accuracy, parameters, multiply-adds and milliseconds of what users could pick, each method at several sizes.

    python experiments/field.py --assets DIR [--models efficientnet_lite0 ...] [--datasets cifar10 ...]
                                [--methods ours ...] [--seeds 0 1 2] [--sizes 2]

Each cell (network, dataset, method, size, seed) becomes a line of <results> as soon as it is done, and is skipped when
it is there, so that a run that was stopped resumes; several processes may share the file. All methods have the same
time to prune and tune: CPU seconds, counted in passes of the unpruned network, measured beside each network.
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

import torch
from field_bench import IMAGES, SIDE, START_PASSES, TEST_IMAGES, TUNE_PASSES, VAL_IMAGES, Bench, timed
from field_methods import DATASETS, METHODS, TUNING, Size, start
from field_results import Record, add_result, key_of, read_results
from torch import nn

from basisprune.deploy.fold import settle
from basisprune.torchkit.watching import example_input
from basisprune.transfer.model import spec_of

RESULTS = Path(__file__).parent / "results" / "field.jsonl"
MODELS = ("efficientnet_lite0", "resnet50")


@dataclass(frozen=True)
class Cell:
    """One network to make: by which method, and at which size."""

    model: str
    dataset: str
    method: str
    size: Size
    seed: int

    @property
    def name(self) -> str:
        """The name of its files."""
        size = "+".join(f"{part:g}" for part in self.size)
        parts = (self.model, self.dataset, self.method, size, self.seed)
        return "-".join(map(str, parts)).replace(" ", "_").replace(",", "")

    @property
    def side(self) -> int:
        """The side of its images, in pixels."""
        return int(self.size[0]) if METHODS[self.method].prune is None else SIDE


@dataclass(frozen=True)
class Cut:
    """A network to tune, and how many CPU seconds its pruning took: tuning between steps is not among them."""

    network: nn.Module
    seconds: float


def cut(cell: Cell, bench: Bench) -> Cut:
    """Prune the start by the cell's method."""
    method = METHODS[cell.method]
    assert method.prune is not None
    start(bench)  # which all have, so that it is not counted
    times, measuring = method.times(bench)
    began, tuned = time.process_time(), bench.tuning_seconds
    network = method.prune(bench, cell.size)
    network = settle(network, example_input(network, spec_of(network).shape), times)
    return Cut(network, measuring + time.process_time() - began - (bench.tuning_seconds - tuned))


def run(cell: Cell, assets: Path, runs: Path) -> Record:
    """The record of a cell."""
    began, processor = time.perf_counter(), time.process_time()
    method, bench = METHODS[cell.method], opened(cell.model, cell.dataset, cell.seed, cell.side, assets, runs)
    if method.prune is None:
        small, budget = Cut(bench.pretrained, 0.0), START_PASSES + TUNE_PASSES
    else:
        small, budget = cut(cell, bench), method.budget
    teacher = start(bench) if method.tuning.distill else None
    # Which statistics of norms the training will find is not known yet; those of the batch take longer.
    pace = bench.pace(small.network, replace(method.tuning, norm_statistics="batch"), teacher)
    tuned = bench.trained(small.network, method.tuning, pace.passes(budget, small.seconds), teacher)
    return {
        **asdict(cell),
        "kind": method.kind,
        "point": asdict(bench.point(tuned.model, onnx_file(cell, runs), method.times(bench)[0])),
        "untuned_val_accuracy": None if method.prune is None else bench.val_accuracy(small.network),
        "passes": tuned.config.epochs,
        "pruning_seconds": round(small.seconds, 1),
        "pass_seconds": round(pace.reference, 2),
        "found": {
            "lr": tuned.config.lr,
            "norm_statistics": tuned.config.norm_statistics,
            "mixed_precision": tuned.config.mixed_precision,
            "flip": tuned.config.augmentation.flip,
        },
        "seconds": round(time.perf_counter() - began, 1),
        "processor_seconds": round(time.process_time() - processor, 1),
    }


def onnx_file(cell: Cell, runs: Path) -> Path:
    """Where the cell's deployed network goes."""
    return runs / "onnx" / f"{cell.name}.onnx"


def retime(results: Path, assets: Path, runs: Path) -> None:
    """Time all deployed files that are there once more; the new times are appended to the results."""
    for record in read_results(results):
        cell = Cell(**{field.name: record[field.name] for field in fields(Cell)} | {"size": tuple(record["size"])})
        file = onnx_file(cell, runs)
        if file.exists():
            ms, clock_ms = timed(file.read_bytes(), cell.side, assets)
            settings = {name: value for name, value in record["settings"].items() if name != "settings"}
            add_result(results, record | {"point": record["point"] | {"ms": ms, "clock_ms": clock_ms}}, settings)
            log(f"{cell.name}: {ms:.3f} ms, clock {clock_ms:.3f} ms")


@cache
def opened(model: str, dataset: str, seed: int, side: int, assets: Path, runs: Path) -> Bench:
    return Bench(model, dataset, seed, assets, runs, side)


def settings() -> Record:
    """What cells have in common: the protocol, and where they were run."""
    protocol = {
        "side": SIDE,
        "images": IMAGES,
        "val_images": VAL_IMAGES,
        "test_images": TEST_IMAGES,
        "start_passes": START_PASSES,
        "tune_passes": TUNE_PASSES,
        "tuning": asdict(TUNING),
    }
    return {"protocol": protocol, "versions": versions(), "device": device()}


def versions() -> dict[str, str]:
    packages = ("basisprune", "torch", "timm", "numpy", "torch-pruning", "onnxruntime")
    return {"python": platform.python_version()} | {package: version(package) for package in packages}


def device() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads: 1"


def wanted(options: argparse.Namespace) -> Iterator[Cell]:
    """All cells in the order in which they tell most."""
    places = product(options.seeds, options.models, options.sizes, options.datasets, options.methods)
    for seed, model, count, dataset, name in places:
        for size in METHODS[name].sizes[:count]:
            yield Cell(model, dataset, name, size, seed)


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
        if key_of(asdict(cell)) in {key_of(record) for record in read_results(options.results)}:
            continue
        record = run(cell, options.assets, options.runs)
        add_result(options.results, record, settings())
        point, found = record["point"], record["found"]
        log(
            f"{cell.dataset} {cell.method} {cell.size} seed {cell.seed}: {point['test_accuracy']:.4f} "
            f"(untuned {record['untuned_val_accuracy']}) {point['parameters'] / 1e6:.3f}M "
            f"{point['macs'] / 1e6:.1f}M macs {point['ms']:.2f}/{point['clock_ms']:.2f} ms {record['passes']} passes, "
            f"rate {found['lr']:.2g} {found['norm_statistics']} {found['mixed_precision']}, pass "
            f"{record['pass_seconds']:.1f} s, pruning {record['pruning_seconds']:.0f} s, all "
            f"{record['processor_seconds']:.0f}/{record['seconds']:.0f} s"
        )


def log(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, flush=True)


if __name__ == "__main__":
    main()
