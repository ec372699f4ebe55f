"""Networks for ncnn: a .param file and its .bin, made by pnnx, and a .json with what ncnn has no place for."""

from __future__ import annotations

import json
import subprocess
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from basisprune.deploy.export.interface import Order, Run, Runtime
from basisprune.errors import ModelError
from basisprune.files import parse_json, read_bytes
from basisprune.torchkit.running import mode

_PARAM, _BIN, _JSON = ".ncnn.param", ".ncnn.bin", ".ncnn.json"
_SECONDS = 600
_MOST_BYTES = 16 << 20


def _write(order: Order, path: Path) -> None:
    example, program = order.example[:1].clone(), import_module("pnnx").EXEC_PATH
    with TemporaryDirectory() as scratch:
        source = Path(scratch) / "model.pt"
        with torch.no_grad(), mode(order.network, training=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pnnx reads nothing but traces, which torch calls old
            torch.jit.trace(order.network, example).save(str(source))
        shape = ",".join(map(str, example.shape))
        command = [program, source.name, f"inputshape=[{shape}]f32", "fp16=0"]
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=_SECONDS, check=False)
        made = {suffix: source.with_name(f"model{suffix}") for suffix in (_PARAM, _BIN)}
        if done.returncode or not all(file.is_file() for file in made.values()):
            said = " ".join(done.stderr.split())[-500:]
            raise ModelError(f"{type(order.network).__name__} cannot be exported: pnnx failed ({said})")
        for suffix, file in made.items():
            _beside(path, suffix).write_bytes(file.read_bytes())
    _beside(path, _JSON).write_text(json.dumps(order.notes))


def _open(path: Path, threads: int) -> Run:
    ncnn: Any = import_module("ncnn")
    net = ncnn.Net()
    net.opt.use_vulkan_compute, net.opt.num_threads = False, threads
    if net.load_param(str(path)) or net.load_model(str(_beside(path, _BIN))):
        raise ModelError(f"{path}: ncnn cannot read it; export it again")

    def run(batch: NDArray[np.generic]) -> NDArray[np.generic]:
        extractor = net.create_extractor()
        extractor.input("in0", ncnn.Mat(np.ascontiguousarray(batch[0])).clone())
        failed, scores = extractor.extract("out0")
        if failed:
            raise ModelError(f"{path}: ncnn cannot run it")
        return np.array(scores)[None]

    return run


def _notes(path: Path) -> Mapping[str, str]:
    notes = parse_json(read_bytes(_beside(path, _JSON), most=_MOST_BYTES))
    return {key: str(value) for key, value in notes.items()} if isinstance(notes, dict) else {}


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name.removesuffix(_PARAM) + suffix)


NCNN = Runtime(
    name="ncnn",
    title="ncnn",
    what="for ncnn, on phones and boards; takes one prepared image",
    packages=("ncnn", "pnnx"),
    suffixes=(_PARAM, _BIN, _JSON),
    write=_write,
    open=_open,
    notes=_notes,
    takes_pixels=False,
    takes_batches=False,
    tolerance=1e-3,
)
