"""How far filter pruning reaches: networks of timm and torchvision with random weights, one by one.

    python benchmarks/coverage.py [--results FILE]
    python benchmarks/coverage.py --all [--again]    the matrix: every step, see matrix.py
    python benchmarks/coverage.py --stacks [--again] the second table: other libraries, see matrix_stacks.py
    python benchmarks/coverage.py --page             docs/coverage.md from the results of the matrix

Each network gets a process of its own with one thread and a time limit. It is traced, 30 % of the units of
every group are cut at random (evenly in all parts), and the result runs forward in eval mode and forward
and backward in training mode. One line of JSON per network is appended to the results file; networks that
are in it already are skipped, so that a run can be stopped and taken up again. The summary goes to stdout.

Filters are the output channels of all convs and linear layers (children of attention modules included),
without those that make the network's output; a filter is prunable if it belongs to a group.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import matrix_runs
import timm
import torch
import torchvision
from torch import Tensor, nn

from basisprune.coupling import cut, trace_coupling
from basisprune.types import OUTPUT, Coupling

HERE = Path(__file__).parent
SIZES = (96, 128, 160)
PRUNING_RATIO = 0.3


def build(library: str, name: str) -> tuple[nn.Module, tuple[int, ...]]:
    """The network and the size of its images by default."""
    if library == "timm":
        model = timm.create_model(name, pretrained=False)
        return model, tuple(model.default_cfg["input_size"])
    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    model = torchvision.models.get_model(name, weights=None, **options)
    return model, (3, 299, 299) if name == "inception_v3" else (3, 224, 224)


def images_for(model: nn.Module, default: tuple[int, ...]) -> Tensor:
    """Two random images of the smallest size that the network trains on (auxiliary heads need more)."""
    for size in (*SIZES, default[1]):
        images = torch.randn(2, default[0], size, size)
        try:
            with torch.no_grad():
                model.train()(images)
                return images
        except Exception:
            if size == default[1]:
                raise
    raise AssertionError("unreachable")


def random_keep(coupling: Coupling, ratio: float, seed: int = 0) -> dict[str, tuple[int, ...]]:
    """About `1 - ratio` of each group's units, equally many in each part, at least one."""
    generator = torch.Generator().manual_seed(seed)
    keep = {}
    for group in coupling.groups:
        length = len(group.parts[0])
        left = max(1, length - round(length * ratio))
        kept = [part[i] for part in group.parts for i in torch.randperm(length, generator=generator)[:left].tolist()]
        keep[group.name] = tuple(sorted(kept))
    return keep


def filters(model: nn.Module) -> dict[str, int]:
    """The number of output channels of each conv and linear layer."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            found[name] = module.out_channels
        elif isinstance(module, nn.Linear):
            found[name] = module.out_features
    return found


def shapes(output: Any) -> list[list[int]]:
    """The shapes of all tensors in an output."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return [list(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]


def examine(library: str, name: str) -> dict[str, Any]:
    """The record of one network."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, default = build(library, name)
    images = images_for(model, default)
    before = filters(model)
    parameters = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    coupling = trace_coupling(model, images)
    traced = time.perf_counter()
    smaller = cut(model, coupling, random_keep(coupling, PRUNING_RATIO))
    done = time.perf_counter()
    with torch.no_grad():
        expected = shapes(model.eval()(images))
        found = shapes(smaller.eval()(images))
    del model
    smaller.train()
    outputs = [leaf for leaf in torch.utils._pytree.tree_leaves(smaller(images)) if isinstance(leaf, Tensor)]
    torch.stack([output.square().mean() for output in outputs]).sum().backward()
    after = filters(smaller)
    classes = [layer for layer, reason in coupling.frozen.items() if reason == OUTPUT]
    total = sum(count for layer, count in before.items() if layer not in classes)
    prunable: dict[str, int] = {}
    for group in coupling.groups:
        for layer, count in group.filters.items():
            if layer in before:
                prunable[layer] = prunable.get(layer, 0) + count
    return {
        "ok": expected == found,
        "image": images.shape[-1],
        "filters": total,
        "prunable": sum(prunable.values()),
        "removed": sum(before.values()) - sum(after.values()),
        "groups": len(coupling.groups),
        "parameters": parameters,
        "parameters_after": sum(p.numel() for p in smaller.parameters()),
        "seconds_trace": round(traced - start, 3),
        "seconds_cut": round(done - traced, 3),
        "unknown_ops": list(coupling.unknown_ops),
        "frozen": dict(coupling.frozen),
    }


def in_process(library: str, name: str, seconds: float) -> dict[str, Any]:
    """The record of one network, made by a process of its own."""
    command = [sys.executable, __file__, "--one", library, name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    record: dict[str, Any] = {"library": library, "name": name}
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return {**record, "ok": False, "error": f"more than {seconds:g} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {**record, "ok": False, "error": errors[-1], "trace": errors[-6:]}
    return {**record, **json.loads(lines[-1]), "seconds": round(time.perf_counter() - start, 1)}


def versions() -> dict[str, str]:
    """What the numbers were measured with."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "torchvision": torchvision.__version__,
    }


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The two bars: how many networks succeed, and in how many half of all filters can be pruned."""
    good = [record for record in records if record["ok"]]
    half = [record for record in good if 2 * record["prunable"] >= record["filters"]]
    return {
        "versions": versions(),
        "networks": len(records),
        "succeeded": len(good),
        "half_prunable": len(half),
        "failed": {f"{r['library']}/{r['name']}": r.get("error", "output shape") for r in records if not r["ok"]},
        "below_half": {
            f"{r['library']}/{r['name']}": round(r["prunable"] / max(1, r["filters"]), 3) for r in good if r not in half
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, default=HERE / "coverage_models.json")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "coverage.jsonl")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit for one network")
    parser.add_argument("--all", action="store_true", help="run the matrix, with records in results/matrix.jsonl")
    parser.add_argument(
        "--stacks", action="store_true", help="run the second table, with records in results/stacks.jsonl"
    )
    parser.add_argument("--again", action="store_true", help="with --all: those that failed once more")
    parser.add_argument("--only", nargs="*", default=[], help="with --all: networks as library/name")
    parser.add_argument("--page", action="store_true", help="write docs/coverage.md from the records of the matrix")
    parser.add_argument("--one", nargs=2, metavar=("LIBRARY", "NAME"), help="print the record of one network")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(examine(*options.one)))
        return
    if options.all or options.stacks or options.page:
        if options.all:
            matrix_runs.run_all(again=options.again, only=options.only)
        if options.stacks:
            matrix_runs.run_stacks(again=options.again, only=options.only)
        matrix_runs.write_page()
        return
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    records = [json.loads(line) for line in lines]
    known = {(record["library"], record["name"]) for record in records}
    for library, names in json.loads(options.models.read_text()).items():
        for name in names:
            if (library, name) in known:
                continue
            record = in_process(library, name, options.seconds)
            records.append({**record, "versions": versions()})
            with options.results.open("a") as file:
                file.write(json.dumps(records[-1]) + "\n")
            print(library, name, "ok" if record["ok"] else record.get("error"), file=sys.stderr)
    print(json.dumps(summary(records), indent=1))


if __name__ == "__main__":
    main()
