"""Training step and decomposition of ResNet-50 against the plain network: speed and peak memory.

    python benchmarks/step.py [--model resnet50] [--size 64] [--batch 32] [--repeats 7] [--processes 5]

Random weights, channels_last, one thread. `speed` is the plain step's time over the decomposed one's, so 1.0
is as fast; multiply-adds alone would allow `macs`, and `frozen` is the same with frozen scales, whose gradient costs
nothing. `decompose` is its time over that of a bare LAPACK SVD of the same matrices, `memory` the ratio of the peaks of
a step. The networks take turns of three steps, of which the last is timed, as each would run by itself. From one
process to the next the ratio moves by several per cent, so it is taken in several processes and `speed` is the median;
`speeds` has all of them. Writes results/step.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import write_result
from torch import nn

from basisprune import decompose, measure, transfer_model
from basisprune.basis.layers import BasisScalingConv
from basisprune.deploy.latency import interleaved, speedup
from basisprune.torchkit.surgery import find_layers
from basisprune.training.trainable import project_scales, set_trainable


def make_step(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    model.to(memory_format=torch.channels_last)
    model.train()
    optimizer = torch.optim.SGD(set_trainable(model), lr=1e-3, momentum=0.9)

    def step() -> None:
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        project_scales(model)

    return step


def peak_bytes(step: Callable[[], None]) -> int:
    """The most memory that tensors held during a step, beyond what was there before it."""
    step()
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    changes = [
        event["args"]["Bytes"] for event in sorted(events, key=lambda e: e.get("ts", 0)) if event["name"] == "[memory]"
    ]
    held = peak = 0
    for change in changes:
        held += change
        peak = max(peak, held)
    return peak


def bare_svd(model: nn.Module) -> Callable[[], None]:
    matrices = [conv.weight.detach().double().flatten(1).mT for _, conv in find_layers(model, nn.Conv2d)]

    def run() -> None:
        for matrix in matrices:
            torch.linalg.svd(matrix, full_matrices=False)

    return run


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """The seconds of the steps and decompositions, and the peaks of memory, in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plain = transfer_model(options.model, 10, input_size=options.size)
    split = decompose(plain)
    images = torch.randn(options.batch, *plain.input_spec.shape).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (options.batch,))
    steps = {"plain": make_step(plain, images, labels), "decomposed": make_step(split, images, labels)}
    memory = {name: peak_bytes(step) for name, step in steps.items()}
    steps["scales frozen"] = make_step(frozen := copy.deepcopy(split), images, labels)
    for _, layer in find_layers(frozen, BasisScalingConv):
        layer.scale.requires_grad_(False)
    seconds = interleaved(steps, repeats=options.repeats, settle=2)
    seconds |= interleaved({"decompose": lambda: decompose(plain), "lapack": bare_svd(plain)}, repeats=1, warmup=1)
    return {"seconds": seconds, "bytes": memory, "macs": measure(plain).macs / measure(split).macs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--processes", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)  # what is recorded; each process sets its own
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        runs = list(pool.map(measured, [options] * options.processes))
    seconds = [run["seconds"] for run in runs]
    memory = runs[0]["bytes"]

    def ratios(slower: str, faster: str) -> list[float]:
        return [speedup(values, slower, faster) for values in seconds]

    results = {
        "speed": statistics.median(speeds := ratios("plain", "decomposed")),
        "speeds": speeds,
        "frozen": statistics.median(ratios("plain", "scales frozen")),
        "macs": runs[0]["macs"],
        "memory": memory["decomposed"] / memory["plain"],
        "decompose": statistics.median(ratios("decompose", "lapack")),
        "median seconds": {
            name: statistics.median(value for values in seconds for value in values[name]) for name in seconds[0]
        },
        "peak bytes": memory,
    }
    print(json.dumps(results, indent=1))
    print(f"written to {write_result('step', vars(options), results)}")


if __name__ == "__main__":
    main()
