"""Networks for ExecuTorch: one .pte file for phones and boards, its layers computed by XNNPACK."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import torch

from basisprune.deploy.export.interface import Order, Run, Runtime
from basisprune.errors import ModelError
from basisprune.torchkit.running import mode

_PREFIX = "basisprune_"


def _write(order: Order, path: Path) -> None:
    exir = import_module("executorch.exir")
    xnnpack = import_module("executorch.backends.xnnpack.partition.xnnpack_partitioner")
    notes = {f"{_PREFIX}{name}": text for name, text in order.notes.items()}
    with torch.no_grad(), mode(order.network, training=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter warns of its own affairs
        try:
            program = torch.export.export(order.network, (order.example[:1].clone(),))
            lowered = exir.to_edge_transform_and_lower(
                program, partitioner=[xnnpack.XnnpackPartitioner()], constant_methods=notes
            )
            path.write_bytes(lowered.to_executorch().buffer)
        except Exception as error:  # ExecuTorch's own, of several kinds
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            raise ModelError(f"{type(order.network).__name__} cannot be exported to ExecuTorch: {reason}") from error


def _open(path: Path, threads: int) -> Run:
    import_module("executorch.extension.pybindings.portable_lib")._unsafe_reset_threadpool(threads)
    program = import_module("executorch.runtime").Runtime.get().load_program(path)
    method = program.load_method("forward")

    def run(batch: object) -> object:
        (scores,) = method.execute([torch.as_tensor(batch)])
        return scores.numpy()

    run.program = program  # type: ignore[attr-defined]  # which the method does not keep alive
    return run  # type: ignore[return-value]


def _notes(path: Path) -> Mapping[str, str]:
    program = import_module("executorch.runtime").Runtime.get().load_program(path)
    return {name: program.load_method(f"{_PREFIX}{name}").execute([])[0] for name in ("input", "classes")}


EXECUTORCH = Runtime(
    name="executorch",
    title="ExecuTorch",
    what="for ExecuTorch with XNNPACK, on phones and boards; takes one image",
    packages=("executorch",),
    suffixes=(".pte",),
    write=_write,
    open=_open,
    notes=_notes,
    takes_batches=False,
)
