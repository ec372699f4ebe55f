"""Measures how long the generated layer models of a folder take on this machine; needs onnxruntime and numpy alone.

    python profile_device.py --output device.json

`basisprune profile --prepare` copies this file into the folder that it fills. Nothing here may import anything else.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

REQUEST = "layers.json"
CHAIN = "chain.onnx"
LINKS = 64
REPEATS = 12
RUNTIME = "onnxruntime"

Times = dict[str, float]


class ProfileError(Exception):
    """The folder or this machine cannot be used, and why."""


def main(arguments: list[str] | None = None) -> int:
    """Measure the folder that this file lies in, write the result, and return the exit code."""
    parser = argparse.ArgumentParser(description="Measure how long layers take on this device.")
    parser.add_argument("--output", type=Path, default=Path("device.json"), help="The file to write.")
    parser.add_argument("--threads", type=int, help="Threads of the runtime (default: as prepared).")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="Runs of each layer.")
    options = parser.parse_args(arguments)
    try:
        table = profile(Path(__file__).resolve().parent, threads=options.threads, repeats=options.repeats, say=_say)
    except ProfileError as error:
        _say(f"error: {error}")
        return 1
    partial = options.output.with_name(f"{options.output.name}.partial")
    partial.write_text(json.dumps(table, indent=1) + "\n")
    os.replace(partial, options.output)
    _say(f"{options.output}: the times of {len(table['shapes'])} layer shapes; pass it to compress --device")
    return 0


def profile(
    folder: Path, *, threads: int | None = None, repeats: int = REPEATS, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Measure the seconds of every layer in the folder on this machine, and return what the file of times holds."""
    try:
        import onnxruntime as runtime
    except ImportError as error:
        raise ProfileError("onnxruntime is not installed here; pip install onnxruntime") from error
    request = _read_request(folder)
    count = threads or request["threads"]
    if count < 1 or repeats < 2:
        raise ProfileError(f"threads {count}, repeats {repeats} given; at least 1 and 2 are needed")
    tables: list[dict[str, Any]] = []
    call, floor = _overhead(runtime, folder / CHAIN, count, repeats)
    for number, layer in enumerate(request["shapes"], 1):
        say(f"{number} of {len(request['shapes'])}: {layer['file']}")
        raw = _node_seconds(runtime, folder / layer["file"], count, repeats)
        corrected = {name: max(value - floor, 0.0) + call for name, value in raw.items()}
        tables.append(
            {key: layer[key] for key in ("shape", "inputs", "outputs")} | {"seconds": _rows(layer, corrected)}
        )
    return {
        "runtime": RUNTIME,
        "device": device_name(),
        "versions": versions(runtime),
        "threads": count,
        "batch": request["batch"],
        "block": _block(runtime, folder, request, count, repeats),
        "shapes": tables,
    }


def device_name() -> str:
    """Return the processor of this machine, as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.lower().startswith(("model name", "hardware"))]
    return f"{platform.machine()} {named[0] if named else platform.processor()}".strip()


def versions(runtime: ModuleType) -> dict[str, str]:
    """Return what the times depend on beside the processor."""
    return {"onnxruntime": str(runtime.__version__), "system": platform.system()}


def _read_request(folder: Path) -> dict[str, Any]:
    path = folder / REQUEST
    try:
        request = json.loads(path.read_text())
        complete = {"threads", "batch", "shapes", "probe"} <= set(request) and request["runtime"] == RUNTIME
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProfileError(f"{path}: cannot be read ({error}); prepare the folder again") from error
    if not complete:
        raise ProfileError(f"{path}: is not a list of layers for {RUNTIME}; prepare the folder again")
    for name in (*(layer["file"] for layer in request["shapes"]), CHAIN, request["probe"]["file"]):
        if not (folder / name).is_file():
            raise ProfileError(f"{folder / name}: is missing; copy the whole folder, or prepare it again")
    return dict(request)


def _open(runtime: ModuleType, path: Path, threads: int, trace: str | None = None) -> Any:
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    if trace is not None:
        options.enable_profiling, options.profile_file_prefix = True, trace
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own, of several kinds
        raise ProfileError(f"{path}: onnxruntime cannot read it ({str(error)[:300]})") from error


def _feed(session: Any) -> dict[str, Any]:
    return {each.name: np.full(each.shape, 0.1, dtype=np.float32) for each in session.get_inputs()}


def _node_seconds(runtime: ModuleType, path: Path, threads: int, repeats: int) -> Times:
    """The fastest run of each node, over all nodes whose names begin with the same word; what it takes undisturbed."""
    with tempfile.TemporaryDirectory() as scratch:
        session = _open(runtime, path, threads, str(Path(scratch) / "trace"))
        feed = _feed(session)
        for _ in range(repeats):
            session.run(None, feed)
        events = json.loads(Path(session.end_profiling()).read_text())
    runs: dict[tuple[str, str], list[float]] = collections.defaultdict(list)
    for event in events:
        name = event["name"]
        if event.get("cat") == "Node" and name.endswith("_kernel_time"):
            runs[name.split("_")[0].split(".")[0], name].append(event["dur"] / 1e6)
    found: Times = collections.defaultdict(float)
    for (word, _), values in runs.items():
        found[word] += min(values)
    return found


def _overhead(runtime: ModuleType, path: Path, threads: int, repeats: int) -> tuple[float, float]:
    """What a node takes that computes almost nothing: in a run, and according to the runtime's own trace."""
    traced = _node_seconds(runtime, path, threads, repeats)
    links = [value for name, value in traced.items() if name.startswith("link")]
    session = _open(runtime, path, threads)
    feed, runs = _feed(session), []
    for _ in range(10 * repeats):
        start = time.perf_counter()
        session.run(None, feed)
        runs.append(time.perf_counter() - start)
    return min(runs) / LINKS, float(np.median(links)) if links else 0.0


def _rows(layer: dict[str, Any], seconds: Times) -> list[list[float]]:
    pattern = "{0}x{1}" if layer["shape"]["kind"] == "conv" else "{0}"
    words = [[pattern.format(inputs, outputs) for outputs in layer["outputs"]] for inputs in layer["inputs"]]
    for word in (word for row in words for word in row):
        if not seconds.get(word):
            raise ProfileError(f"{layer['file']}: onnxruntime's trace does not tell the time of {word}")
    return [[seconds[word] for word in row] for row in words]


def _block(runtime: ModuleType, folder: Path, request: dict[str, Any], threads: int, repeats: int) -> int:
    """How many channels the kernels work on at once: half a block more takes about as long as a whole one."""
    probe = request["probe"]
    seconds = _node_seconds(runtime, folder / probe["file"], threads, 2 * repeats)
    for block in probe["blocks"]:
        half, full = (seconds[f"{probe['inputs']}x{count}"] for count in (5 * block // 2, 3 * block))
        if half > 0.94 * full:
            return int(block)
    return int(probe["blocks"][-1])


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main())
