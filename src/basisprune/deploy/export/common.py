"""What every export needs: an example, the spec of the input, the output to compare with."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import KeyPath, tree_flatten_with_path

from basisprune.errors import ConfigError, ModelError
from basisprune.torchkit.running import mode
from basisprune.torchkit.watching import example_input
from basisprune.types import InputSpec

PixelLayout: TypeAlias = Literal["NHWC", "NCHW"]

INPUT, OUTPUT = "images", "scores"
"""What a graph calls its input, and its output if there is only one."""

LEAST = 1e-6
"""Outputs that are smaller than this count as this large where differences are given relative to them."""


class WithPreparation(nn.Module):
    """The network behind the preparation of its images: uint8 pixels of the right size in, scores out."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, spec: InputSpec, layout: PixelLayout) -> None:
        super().__init__()
        self.network = network
        self.layout = layout
        like = next(network.parameters())
        self.register_buffer("mean", like.new_tensor(spec.mean).view(-1, 1, 1))
        self.register_buffer("std", like.new_tensor(spec.std).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> Tensor:
        """The scores for pixels (N, H, W, C) or (N, C, H, W), as the layout says."""
        images = pixels.permute(0, 3, 1, 2) if self.layout == "NHWC" else pixels
        scores: Tensor = self.network((images.to(self.mean.dtype) / 255 - self.mean) / self.std)
        return scores


def example_for(
    model: nn.Module, example: Tensor | None, spec: InputSpec | None, pixels: PixelLayout | None = None
) -> Tensor:
    """The example, or two random inputs that fit the spec, on the device of the model; pixels where asked for.

    A single input is doubled: exporters take a batch of one for a fixed size.
    """
    if example is None:
        if spec is None:
            raise ConfigError.of(
                "export", [f"example_inputs: {type(model).__name__} does not know its input; pass a batch of inputs"]
            )
        example = example_input(model, spec.shape)
        if pixels is not None:
            shape = (*spec.size, spec.channels) if pixels == "NHWC" else spec.shape
            example = torch.randint(0, 256, (2, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    device = next((p.device for p in model.parameters() if p.is_floating_point()), torch.device("cpu"))
    return torch.cat([example, example])[: max(2, len(example))].to(device)


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's output in eval mode; raises ModelError unless it is one tensor of finite numbers."""
    named = named_outputs(model, inputs)
    if list(named) != [OUTPUT]:
        raise ModelError(f"{type(model).__name__} outputs {', '.join(named)}; one tensor is needed here")
    return named[OUTPUT]


@torch.no_grad()
def named_outputs(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """All that the model outputs in eval mode, by name: "scores" for one tensor, others by their places.

    Raises ModelError unless these are tensors of finite numbers.

    >>> named_outputs(nn.Identity(), torch.zeros(2))
    {'scores': tensor([0., 0.])}
    """
    with mode(model, training=False):
        output = model(inputs)
    leaves, _ = tree_flatten_with_path(output)
    found = {_name(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
    if not found or not all(bool(leaf.isfinite().all()) for leaf in found.values()):
        what = "NaN or infinite values" if found else f"{type(output).__name__} without tensors"
        raise ModelError(f"{type(model).__name__} outputs {what}; a network to export outputs finite tensors")
    return found


def _name(path: KeyPath) -> str:
    """The keys and places that lead to a tensor, such as "out" or "layer.0"."""
    steps = [str(getattr(step, "key", getattr(step, "idx", getattr(step, "name", step)))) for step in path]
    if not steps:
        return OUTPUT
    return ".".join([f"output{steps[0]}" if steps[0].isdigit() else steps[0], *steps[1:]])
