"""A network as a program of torch.export, which runs without the code that made it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from basisprune.deploy.export.common import LEAST, example_for, outputs_of
from basisprune.deploy.export.interface import Order, Run, Runtime
from basisprune.deploy.export.runner import PREFIX
from basisprune.errors import ModelError
from basisprune.files import replacing
from basisprune.torchkit.running import mode, relative_difference
from basisprune.transfer.model import known_spec


def export_program(model: nn.Module, path: str | Path, *, example_inputs: Tensor | None = None) -> Path:
    """The path of a `.pt2` file that `torch.export.load` reads: the network in eval mode, for any batch size.

    `example_inputs` are for networks without an `input_spec`. The file is loaded and its output compared
    before it takes its place. The network is not changed. Raises ModelError if it cannot be exported.
    """
    path = Path(path)
    if path.suffix != ".pt2":
        raise ModelError(f"{path}: a program of torch.export ends in .pt2; name it so")
    example = example_for(model, example_inputs, known_spec(model))
    expected = outputs_of(model, example)
    program = _exported(model, example)
    with replacing(path) as partial:
        torch.export.save(program, partial)
        loaded = torch.export.load(partial).module()
        for count in (len(example), 1):
            difference = relative_difference(expected[:count], outputs_of_program(loaded, example[:count]), least=LEAST)
            if difference > 1e-4:
                raise ModelError(
                    f"{type(model).__name__}: the program differs by {difference:.2g} of the largest output; "
                    "its forward does something else when it is traced, and nothing was written"
                )
    return path


def _exported(model: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """The network in eval mode as a program for any batch size; raises ModelError if it cannot be."""
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad(), mode(model, training=False):
        try:
            program = torch.export.export(model, (example,), dynamic_shapes=shapes)
            program.module()  # its parts may have names that torch keeps for itself
            return program
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__} cannot be exported: {type(error).__name__}: {str(error)[:500]}"
            ) from error


@torch.no_grad()
def outputs_of_program(program: nn.Module, inputs: Tensor) -> Tensor:
    """What a loaded program outputs; it has no train and eval mode to switch."""
    output: Tensor = program(inputs)
    return output


def _write(order: Order, path: Path) -> None:
    program = _exported(order.network, order.example)
    torch.export.save(program, path, extra_files={f"{PREFIX}{name}": text for name, text in order.notes.items()})


def _open(path: Path, _threads: int) -> Run:
    """The loaded program; its threads are torch's own."""
    program = torch.export.load(path).module()
    return lambda batch: outputs_of_program(program, torch.as_tensor(batch)).numpy()


def _notes(path: Path) -> dict[str, str]:
    found = dict.fromkeys((f"{PREFIX}input", f"{PREFIX}classes"), "")
    torch.export.load(path, extra_files=found)
    return {name.removeprefix(PREFIX): text for name, text in found.items()}


TORCH = Runtime(
    name="torch",
    title="torch.export",
    what="for torch, without the code that made it",
    packages=(),
    suffixes=(".pt2",),
    write=_write,
    open=_open,
    notes=_notes,
)
