"""The table of runtimes; a new one is a file beside this one, and one line here."""

from __future__ import annotations

from pathlib import Path

from basisprune.deploy.export.executorch import EXECUTORCH
from basisprune.deploy.export.interface import Runtime
from basisprune.deploy.export.ncnn import NCNN
from basisprune.deploy.export.onnx import ONNX_RUNTIME
from basisprune.deploy.export.openvino import OPENVINO
from basisprune.deploy.export.torch_export import TORCH
from basisprune.errors import ConfigError, nearest

RUNTIMES: dict[str, Runtime] = {runtime.name: runtime for runtime in (ONNX_RUNTIME, OPENVINO, EXECUTORCH, TORCH, NCNN)}


def find_runtime(name: str, where: str = "export") -> Runtime:
    """The runtime of that name; raises ConfigError that names the nearest.

    >>> find_runtime("open-vino")
    Traceback (most recent call last):
    basisprune.errors.ConfigError: export: 'open-vino' is not a runtime. Did you mean 'openvino'? \
Allowed are onnx, openvino, executorch, torch, ncnn
    """
    if name not in RUNTIMES:
        hint = f"{name!r} is not a runtime.{nearest(name, RUNTIMES)} Allowed are {', '.join(RUNTIMES)}"
        raise ConfigError.of(where, [hint])
    return RUNTIMES[name]


def runtime_of(path: Path) -> Runtime | None:
    """The runtime that opens a file of this name, None where there is none.

    >>> runtime_of(Path("model.int8.xml")).title
    'OpenVINO'
    """
    return next((runtime for runtime in RUNTIMES.values() if path.name.endswith(runtime.suffixes[0])), None)
