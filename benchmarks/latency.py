"""How much faster pruned networks are than the dense ones, against what their multiply-adds promise.

    python benchmarks/latency.py [--models resnet50 vgg16 ...] [--backends onnxruntime eager] [--batches 1 32]

Random weights, 128x128, one thread. Networks are basis-pruned at four ratios by Taylor scores on random images and
labels (with random weights the scores only decide how the ranks are shared out), or double-pruned: half of the
basis vectors, then 30 % of the filters by L1. Ranks are multiples of the largest of 32, 16 and 8 that the ratio
allows. Networks are folded by latency, at batch 1, in the runtime in which they are then timed.

All take turns with the dense original, whose batch norms are folded too, and are timed by the thread's CPU time.
`speedup` is over that original, `macs` the ratio of multiply-adds, `bar` what is to be reached. "dense" is the
unpruned network folded like the others: what a speed-up owes to folding alone. `bytes` are those of the bundle,
tensors and config, which are to be at most 1.02 times four bytes a parameter and 64 kB. Writes results/latency.json.
"""

from __future__ import annotations

import argparse
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import Cells
from torch import nn

from basisprune import PlanConfig, decompose, measure, save_pretrained, transfer_model
from basisprune.coupling import trace_coupling
from basisprune.deploy.fold import fold
from basisprune.deploy.latency import Backend, measure_latency
from basisprune.errors import PlanError
from basisprune.importance import score_filters, taylor_scores
from basisprune.planning import plan_basis, plan_filters
from basisprune.pruning import prune_basis, prune_filters
from basisprune.types import BasisPlan, Scores

SIZE = 128
MODELS = ("resnet50", "vgg16", "densenet121", "tf_efficientnet_lite0")
RATIOS = (0.3, 0.5, 0.7, 0.9)
REPEATS = {1: 31, 32: 7}
SHARES = {"onnxruntime": (0.9, 0.65), "eager": (0.8, 0.5)}


@cache
def networks(name: str) -> dict[str, nn.Module]:
    """The dense network and what pruning makes of it, not folded."""
    torch.manual_seed(0)
    dense = transfer_model(name, 10, input_size=SIZE)
    split = decompose(dense, scale_init=1.0)
    images, labels = torch.randn(16, 3, SIZE, SIZE), torch.randint(10, (16,))
    scores = taylor_scores(split, list(zip(images.split(8), labels.split(8), strict=True)))
    result: dict[str, nn.Module] = {"dense": dense}
    result |= {f"basis {ratio}": prune_basis(split, aligned_plan(scores, ratio)) for ratio in RATIOS}
    half = result["basis 0.5"]
    coupling = trace_coupling(half, images[:2])
    config = PlanConfig(normalise="max", round_to=16)
    plan = plan_filters(half, score_filters(half, "l1", coupling.layers), 0.3, config, coupling=coupling)
    return result | {"double": prune_filters(half, plan)}


def aligned_plan(scores: Scores, ratio: float) -> BasisPlan:
    """The plan whose ranks are multiples of the largest block that allows for the ratio."""
    for block in (32, 16, 8):
        try:
            return plan_basis(scores, ratio, PlanConfig(round_to=block))
        except PlanError:
            continue
    return plan_basis(scores, ratio)


@cache
def folded(name: str, backend: Backend) -> dict[str, nn.Module]:
    """The networks in the form in which they are timed, the dense original first."""
    example = torch.randn(1, 3, SIZE, SIZE).to(memory_format=torch.channels_last)
    variants = {key: fold(model, example, "latency", runtime=backend) for key, model in networks(name).items()}
    return {"original": fold(networks(name)["dense"], example, "none"), **variants}


@cache
def file_sizes(name: str, backend: Backend) -> dict[str, int]:
    """The bytes of the tensors and config of each network's bundle."""
    sizes = {}
    for key, model in folded(name, backend).items():
        with TemporaryDirectory() as scratch:
            folder = save_pretrained(model, Path(scratch) / "bundle")
            sizes[key] = sum((folder / part).stat().st_size for part in ("model.safetensors", "config.json"))
    return sizes


def bar(name: str, backend: Backend, batch: int, macs: float) -> float:
    """The speed-up to reach; none for what is not pruned."""
    if macs == 1:
        return 0.0
    if name not in ("resnet50", "vgg16") or batch != 1 or macs > 8:
        return 0.98
    high, low = SHARES[backend]
    return max(0.98, (high if macs <= 3 else low) * macs)


def compare(name: str, backend: Backend, batch: int) -> dict[str, Any]:
    models = folded(name, backend)
    report = measure_latency(models, batch_sizes=(batch,), backends=(backend,), threads=1, repeats=REPEATS[batch])
    costs = {key: measure(model) for key, model in models.items()}
    rows: dict[str, Any] = {}
    for key, cost in costs.items():
        row = report.row(key, backend, batch)
        macs = costs["original"].macs / cost.macs
        rows[key] = {
            "speedup": round(row.speedup, 3),
            "macs": round(macs, 3),
            "share": round(row.speedup / macs, 3),
            "bar": round(bar(name, backend, batch, macs), 3),
            "parameters": cost.parameters,
            "bytes": file_sizes(name, backend)[key],
            "seconds": row.seconds,
            "spread": row.spread,
        }
        small = rows[key]["bytes"] <= 1.02 * 4 * cost.parameters + 64_000
        rows[key]["reached"] = rows[key]["speedup"] >= rows[key]["bar"] and small
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--backends", nargs="+", default=["onnxruntime", "eager"], choices=list(SHARES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(REPEATS), choices=list(REPEATS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    repeats = {str(batch): count for batch, count in REPEATS.items()}
    config = {"size": SIZE, "ratios": list(RATIOS), "threads": 1, "repeats": repeats, "fold": "latency"}
    cells = Cells("latency", config)
    for batch in options.batches:
        for name in options.models:
            for backend in options.backends:
                cell = f"{name}, {backend}, batch {batch}"
                cells.run(cell, lambda n=name, b=backend, s=batch: compare(n, b, s))  # type: ignore[misc]
    results = [(cell, key, row) for cell, rows in cells.results.items() for key, row in rows.items()]
    missed = [f"{cell}, {key}: {row}" for cell, key, row in results if not row["reached"]]
    print(f"{len(missed)} bars missed", *missed, sep="\n  ")


if __name__ == "__main__":
    main()
