"""Runs one exported file for the process that started it, within bounds; needs NumPy and the file's runtime alone.

    python sandboxed.py RUNTIME FILE THREADS BYTES SECONDS

An ONNX graph can ask for any memory and never end, so files of others run here, with BYTES of memory where the system
can limit it, and SECONDS for each step. The file's metadata comes first, as a line of JSON. Then each batch, sent with
its seconds, is answered by the scores. Nothing here may import basisprune: torch would take seconds to start.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[np.generic]
Run: TypeAlias = Callable[[Array], list[Array]]
Opened: TypeAlias = tuple[Mapping[str, str], Run]
"""The metadata of a file, and the function that computes its outputs for a batch."""

PREFIX = "basisprune."
_ONNX_TYPES = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}
MOST_NOTES, _MOST_SCORES = 64 << 20, 256 << 20  # bytes


def onnx_session(model: Path | bytes, threads: int | None = None) -> Any:
    """Open an ONNX file, or the content of one, in onnxruntime on the CPU."""
    onnxruntime = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def open_onnx(path: Path, threads: int) -> Opened:
    """Open an ONNX file."""
    session = onnx_session(path, threads)
    entries = session.get_modelmeta().custom_metadata_map
    notes = {key.removeprefix(PREFIX): value for key, value in entries.items() if key.startswith(PREFIX)}
    return notes, lambda batch: [np.asarray(output) for output in session.run(None, fed(session, batch))]


def fed(session: Any, batch: Array) -> dict[str, Array]:
    """What a session is given by name: a batch as it is, or its part for each of several inputs."""
    first, *more = session.get_inputs()
    if not more:
        return {first.name: batch}
    found, start, rows = dict[str, Array](), 0, batch.reshape(len(batch), -1)
    for each in (first, *more):
        size = math.prod(each.shape[1:])
        part = rows[:, start : start + size].reshape(-1, *each.shape[1:])
        found[each.name] = part.astype(_ONNX_TYPES.get(each.type, np.float32))
        start += size
    return found


def open_openvino(path: Path, threads: int) -> Opened:
    """Open an .xml file in single precision: left to itself, OpenVINO takes bfloat16 where a processor has it."""
    core = import_module("openvino").Core()
    config = {
        "INFERENCE_PRECISION_HINT": "f32",
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
    }

    @cache
    def request(count: int) -> Any:
        model = core.read_model(path)
        _, *shape = model.input().get_partial_shape()
        model.reshape([count, *shape])
        return core.compile_model(model, "CPU", config).create_infer_request()

    def run(batch: Array) -> list[Array]:
        ready = request(len(batch))
        ready.get_input_tensor().data[:] = batch  # a tensor made for each call would take longer than the copy
        ready.infer(share_outputs=True)
        return [np.array(ready.get_output_tensor().data)]

    model = core.read_model(path)
    notes = {name: str(model.get_rt_info(["basisprune", name]).value) for name in ("input", "classes")}
    request(1)
    return notes, run


OPENERS: Mapping[str, Callable[[Path, int], Opened]] = {"onnx": open_onnx, "openvino": open_openvino}


def main(runtime: str, path: str, threads: str, most: str, seconds: str) -> None:
    """Answer requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks, which ends this one
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    _limit_memory(int(most))
    _end_after(int(seconds))
    try:
        notes, run = OPENERS[runtime](Path(path), int(threads))
        if sum(map(len, notes.values())) > MOST_NOTES:
            raise ValueError("its metadata is too large")
    except Exception as error:  # runtimes raise errors of their own kinds
        _answer(answers, error=error)
        return
    _answer(answers, notes=dict(notes))
    while line := sys.stdin.buffer.readline():
        request = json.loads(line)
        batch = receive(sys.stdin.buffer, request)
        _end_after(request["seconds"])
        try:
            scores = run(batch)[0]
            if scores.dtype.kind not in "fiub" or scores.nbytes > _MOST_SCORES:
                raise ValueError(f"it outputs {scores.dtype} {scores.shape}, no scores of {len(batch)} images")
        except Exception as error:
            _answer(answers, error=error)
            continue
        send(answers, scores)
        _end_after(0)


def send(pipe: IO[bytes], array: Array, **values: object) -> None:
    """Write the values and the array's type as a line of JSON, and then its bytes."""
    about = {"dtype": array.dtype.str, "shape": array.shape}
    pipe.write(json.dumps(about | values).encode() + b"\n" + array.tobytes())
    pipe.flush()


def receive(pipe: IO[bytes], about: Mapping[str, Any]) -> Array:
    """Read the array that such a line announces; raises EOFError where it ends before."""
    dtype, shape = np.dtype(about["dtype"]), about["shape"]
    size = math.prod(shape) * dtype.itemsize
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return np.frombuffer(content, dtype).reshape(shape)


def _answer(answers: IO[bytes], *, error: Exception | None = None, **values: object) -> None:
    if error is not None:
        values["error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    answers.write(json.dumps(values).encode() + b"\n")
    answers.flush()


def _limit_memory(most: int) -> None:
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
    except (ImportError, OSError, ValueError):
        return  # the system has no such limit; time alone is bounded


def _end_after(seconds: int) -> None:
    """End this process that many seconds from now, even if no other process is left to do so; 0 is never."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
