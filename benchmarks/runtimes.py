"""The demo's model in every runtime that is installed: size, parity, accuracy and latency, measured in turns.

    python benchmarks/runtimes.py [--demo runs/demo] [--runtimes onnx openvino ...]

Exports the model of `basisprune demo` for each runtime, as `basisprune export` does, with int8 where there is one.
Outputs are compared with PyTorch's on training images, and the accuracy on the 500 test images is measured by each
runtime itself. Latency is that of one image on one thread, the CPU time of the process, in turns. Then OpenVINO is
compared with ONNX Runtime on the same graphs: the demo's, and two networks of timm. Runtimes that are not installed
are named in the result; `pip install '.[openvino,executorch,ncnn]'` installs all that fit. Writes
results/runtimes.json.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import write_result
from torch import nn

from basisprune import fold, transfer_model
from basisprune.demo import demo_data
from basisprune.deploy.export import export
from basisprune.deploy.export.runtimes import RUNTIMES
from basisprune.deploy.latency import file_seconds
from basisprune.runs.export import ExportOptions, export_result
from basisprune.runs.finished import load_any

OTHERS = {"resnet50": 128, "tf_efficientnet_lite0": 128}
PACKAGES = ("onnxruntime", "openvino", "nncf", "executorch", "torch", "ncnn", "pnnx")


def rows_of(demo: Path, names: list[str], folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in names:
        options = ExportOptions(demo_data(), folder, int8=RUNTIMES[name].quantise is not None)
        rows = [asdict(row) for row in export_result(demo / "model", name, options)]
        print(name, rows[-2], flush=True)
    return rows


def compare(model: nn.Module) -> dict[str, float]:
    """How many times faster than ONNX Runtime OpenVINO runs a graph: the median and the middle half of the rounds."""
    with TemporaryDirectory() as scratch:
        files = {name: export(model, name, scratch)[0].path for name in ("onnx", "openvino")}
        seconds = file_seconds({name: (RUNTIMES[name], path) for name, path in files.items()}, repeats=100)
    ratios = [a / b for a, b in zip(seconds["onnx"], seconds["openvino"], strict=True)]
    found = {f"{name} ms": 1000 * statistics.median(values) for name, values in seconds.items()}
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {**found, "speedup": middle, "low": low, "high": high}


def installed() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, default=Path("runs/demo"), help="a folder that `basisprune demo` wrote")
    ready = [name for name, runtime in RUNTIMES.items() if runtime.is_installed]
    parser.add_argument("--runtimes", nargs="+", default=ready, choices=list(RUNTIMES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as scratch:
        rows = rows_of(options.demo, options.runtimes, Path(scratch) / "files")
    results: dict[str, Any] = {"rows": rows, "missing": [name for name in RUNTIMES if name not in options.runtimes]}
    if {"onnx", "openvino"} <= set(options.runtimes):
        networks = {"the demo's model": load_any(options.demo / "model").model}
        for name, size in OTHERS.items():
            model = transfer_model(name, 10, input_size=size)
            networks[f"{name}, {size}x{size}"] = fold(model, torch.zeros(1, 3, size, size))
        results["OpenVINO against ONNX Runtime"] = {name: compare(network) for name, network in networks.items()}
    print(write_result("runtimes", {"packages": installed(), "threads": 1}, results))


if __name__ == "__main__":
    main()
