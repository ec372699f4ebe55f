"""A network as a program of torch.export, which runs without the code that made it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from basisprune.deploy.export.common import LEAST, example_for, outputs_of
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
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad(), mode(model, training=False):
        try:
            program = torch.export.export(model, (example,), dynamic_shapes=shapes)
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__} cannot be exported: {type(error).__name__}: {str(error)[:500]}"
            ) from error
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


@torch.no_grad()
def outputs_of_program(program: nn.Module, inputs: Tensor) -> Tensor:
    """What a loaded program outputs; it has no train and eval mode to switch."""
    output: Tensor = program(inputs)
    return output
