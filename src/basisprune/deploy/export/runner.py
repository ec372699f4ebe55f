"""Runs one exported file for the process that started it, within bounds; needs NumPy and the file's runtime alone.

    python runner.py RUNTIME FILE THREADS BYTES SECONDS

An ONNX graph can ask for any memory and never end, so a file that somebody hands over is not run in the process that
was asked to. Here memory is limited to BYTES where the system can, and each step to its seconds. A line of JSON comes
first, with what the file says of itself. Then each batch, with its seconds, is answered by the scores; arrays are sent
as `send` does. Nothing here may import anything of basisprune: torch would take seconds to start.
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
from typing import IO, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Run: TypeAlias = Callable[[NDArray[np.generic]], NDArray[np.generic]]
Opened: TypeAlias = tuple[Mapping[str, str], Run]

PREFIX = "basisprune."
MOST_NOTES, _MOST_SCORES = 64 << 20, 256 << 20  # bytes


def open_onnx(path: str, threads: int) -> Opened:
    """The notes of an ONNX file, and what runs it in onnxruntime."""
    onnxruntime = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    said = session.get_modelmeta().custom_metadata_map
    name = session.get_inputs()[0].name
    notes = {key.removeprefix(PREFIX): value for key, value in said.items() if key.startswith(PREFIX)}
    return notes, lambda batch: np.asarray(session.run(None, {name: batch})[0])


def open_openvino(path: str, threads: int) -> Opened:
    """The notes of an .xml file, and what runs it in OpenVINO.

    It is compiled in single precision: left to itself, OpenVINO takes bfloat16 where a processor has it.
    """
    core: Any = import_module("openvino").Core()
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

    def run(batch: NDArray[np.generic]) -> NDArray[np.generic]:
        ready = request(len(batch))
        ready.get_input_tensor().data[:] = batch  # a tensor made for each call would take longer than the copy
        ready.infer(share_outputs=True)
        return np.array(ready.get_output_tensor().data)

    model = core.read_model(path)
    notes = {name: str(model.get_rt_info(["basisprune", name]).value) for name in ("input", "classes")}
    request(1)
    return notes, run


RUNNERS: Mapping[str, Callable[[str, int], Opened]] = {"onnx": open_onnx, "openvino": open_openvino}


def main(runtime: str, path: str, threads: str, most: str, seconds: str) -> None:
    """Answers until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the one that asks, who ends this process
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    _limit_memory(int(most))
    _end_after(int(seconds))
    try:
        notes, run = RUNNERS[runtime](path, int(threads))
        if sum(map(len, notes.values())) > MOST_NOTES:
            raise ValueError("it says too much of itself")
    except Exception as error:  # runtimes raise errors of their own kinds
        _tell(answers, error=_said(error))
        return
    _tell(answers, notes=dict(notes))
    while line := sys.stdin.buffer.readline():
        asked = json.loads(line)
        batch = receive(sys.stdin.buffer, asked)
        _end_after(asked["seconds"])
        try:
            scores = run(batch)
            if scores.dtype.kind not in "fiub" or scores.nbytes > _MOST_SCORES:
                raise ValueError(
                    f"it outputs {scores.dtype} {scores.shape}, which are no scores of {len(batch)} images"
                )
        except Exception as error:
            _tell(answers, error=_said(error))
            continue
        send(answers, scores)
        _end_after(0)


def send(pipe: IO[bytes], array: NDArray[np.generic], **values: object) -> None:
    """Writes the values and what the array is as a line of JSON, and then its bytes."""
    about = {"dtype": array.dtype.str, "shape": array.shape}
    pipe.write(json.dumps(about | values).encode() + b"\n" + array.tobytes())
    pipe.flush()


def receive(pipe: IO[bytes], about: Mapping[str, Any]) -> NDArray[np.generic]:
    """The array that such a line announces; raises EOFError where it ends before."""
    dtype, shape = np.dtype(about["dtype"]), about["shape"]
    size = math.prod(shape) * dtype.itemsize
    content = pipe.read(size)
    if len(content) < size:
        raise EOFError
    return np.frombuffer(content, dtype).reshape(shape)


def _tell(answers: IO[bytes], **values: object) -> None:
    answers.write(json.dumps(values).encode() + b"\n")
    answers.flush()


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


def _limit_memory(most: int) -> None:
    """Bounds what this process may hold in memory; where the system has no such limit, time alone is bounded."""
    try:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (most if hard < 0 else min(most, hard), hard))
    except (ImportError, OSError, ValueError):
        return


def _end_after(seconds: int) -> None:
    """Ends this process that many seconds from now, even if nobody is left to do so; 0 is never."""
    if hasattr(signal, "alarm"):
        signal.alarm(seconds)


if __name__ == "__main__":
    main(*sys.argv[1:])
