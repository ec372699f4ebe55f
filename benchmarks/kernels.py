"""Where the time goes that multiply-adds do not explain: the nodes of networks in ONNX Runtime, by what they do.

    python benchmarks/kernels.py [--models densenet121 tf_efficientnet_lite0]

The networks of benchmarks/latency.py, unpruned and without 70 % and 90 % of their basis vectors, in ONNX Runtime's own
trace, one image of 128x128, one thread; of each node the fastest of several runs. For each kind of node: how many there
are, milliseconds, and multiply-adds a nanosecond. `explained` is what the network would take if all its multiply-adds
were as fast as those of the unpruned one on average. Writes results/kernels.json.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnxruntime
import torch
from common import Cells
from latency import SIZE, networks
from torch import nn

from basisprune.deploy.export.onnx import to_proto
from basisprune.deploy.fold import fold

MODELS = ("densenet121", "tf_efficientnet_lite0")
KEYS = ("dense", "basis 0.7", "basis 0.9")
REPEATS = 25


def traced(model: nn.Module) -> list[dict[str, Any]]:
    """All events of onnxruntime's trace of a network."""
    content = to_proto(model, torch.zeros(2, 3, SIZE, SIZE)).SerializeToString()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level, options.enable_profiling = 3, True
    with TemporaryDirectory() as scratch:
        options.profile_file_prefix = str(Path(scratch) / "trace")
        session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        feed = {session.get_inputs()[0].name: np.zeros((1, 3, SIZE, SIZE), dtype=np.float32) + 0.1}
        for _ in range(REPEATS):
            session.run(None, feed)
        events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text())
    return [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]


def kind_of(event: dict[str, Any]) -> tuple[str, float]:
    """What a node is, and its multiply-adds."""
    operation, given = event["args"]["op_name"], event["args"]["input_type_shape"]
    if operation != "Conv":
        return operation, 0.0
    shapes = [next(iter(each.values())) for each in given]
    weight = shapes[1]
    (made,) = (next(iter(each.values())) for each in event["args"]["output_type_shape"][:1])
    if "_bn_" in event["name"]:
        return "norm that no conv takes in", math.prod(made)
    side, places = made[-1], math.prod(made[2:])
    macs = float(places * math.prod(weight))
    if weight[1] == 1 and weight[0] > 1 and shapes[0][1] != 1:
        name = "depthwise conv"
    else:
        name = f"{weight[2]}x{weight[3]} conv"
        name += f", rank {weight[1]}" if weight[1] <= 8 else ""
    return f"{name}, maps of {side}x{side}" if side <= 4 else name, macs


def breakdown(model: nn.Module) -> dict[str, Any]:
    folded = fold(model, torch.zeros(1, 3, SIZE, SIZE), "latency", runtime="onnxruntime")
    runs: dict[str, list[float]] = defaultdict(list)
    kinds = {}
    for event in traced(folded):
        runs[event["name"]].append(event["dur"] / 1000)
        kinds[event["name"]] = kind_of(event)
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"nodes": 0, "milliseconds": 0.0, "macs": 0.0})
    for name, (kind, macs) in kinds.items():
        row = found[kind]
        row["nodes"] += 1
        row["milliseconds"] += min(runs[name])
        row["macs"] += macs
    ordered = dict(sorted(found.items(), key=lambda item: -item[1]["milliseconds"]))
    for row in ordered.values():
        row["macs a nanosecond"] = round(row["macs"] / (1e6 * row["milliseconds"]), 2)
        row["milliseconds"] = round(row["milliseconds"], 3)
    return ordered


def compare(name: str) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for key in KEYS:
        rows = breakdown(networks(name)[key])
        totals = {part: sum(row[part] for row in rows.values()) for part in ("milliseconds", "macs")}
        results[key] = {**{part: round(value, 3) for part, value in totals.items()}, "by kind": rows}
        whole = results["dense"]
        results[key]["explained"] = round(whole["milliseconds"] * totals["macs"] / whole["macs"], 3)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = Cells("kernels", {"size": SIZE, "repeats": REPEATS, "networks": list(KEYS)})
    for name in options.models:
        cells.run(name, partial(compare, name))


if __name__ == "__main__":
    main()
