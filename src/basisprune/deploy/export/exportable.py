"""What is exported: a network with the preparation of its images, and what its file says of itself."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import KeyPath, tree_flatten_with_path

from basisprune.data import prepare
from basisprune.errors import ConfigError, ModelError
from basisprune.files import Json, parse_json
from basisprune.torchkit.running import mode
from basisprune.torchkit.watching import example_input
from basisprune.transfer.model import known_spec
from basisprune.types import InputSpec

PixelLayout: TypeAlias = Literal["NHWC", "NCHW"]

INPUT, OUTPUT = "images", "scores"
"""What a graph calls its input, and its output if there is only one."""


@dataclass(frozen=True)
class GraphInput:
    """What an exported graph takes: uint8 pixels in this layout, or prepared images where there is none."""

    spec: InputSpec
    layout: PixelLayout | None

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.spec.size, self.spec.channels) if self.layout == "NHWC" else self.spec.shape

    @property
    def outside(self) -> InputSpec:
        """The preparation that is left to the caller: resizing alone where the graph normalises."""
        zeros, ones = (0.0,) * self.spec.channels, (1.0,) * self.spec.channels
        return self.spec if self.layout is None else replace(self.spec, mean=zeros, std=ones)

    def taken(self, images: Tensor) -> Tensor:
        """Convert images that were prepared as `outside` says to what the graph takes."""
        if self.layout is None:
            return images.contiguous()
        pixels = (images * 255).round().clamp(0, 255).to(torch.uint8)
        return (pixels.permute(0, 2, 3, 1) if self.layout == "NHWC" else pixels).contiguous()

    def batch(self, images: Tensor, *, prepared: bool = False) -> Tensor:
        """Convert images of any size, or `prepared` ones, to what the graph takes."""
        return self.taken(prepare(images, self.outside, prepared=prepared))


@dataclass(frozen=True)
class Exportable:
    """A network to export, on the CPU and behind the preparation of its images if they are pixels.

    `example` is a batch of at least two of what it takes, because exporters take a batch of one for a fixed size;
    `outputs` are those for it, by name.
    """

    name: str
    network: nn.Module
    example: Tensor
    spec: InputSpec | None
    layout: PixelLayout | None
    classes: tuple[str, ...] | None
    outputs: Mapping[str, Tensor]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        layout: PixelLayout | None = None,
        *,
        spec: InputSpec | None = None,
        example: Tensor | None = None,
        classes: Sequence[str] | None = None,
    ) -> Exportable:
        """Take a copy of the model, with the classes and the spec that it knows unless others are given.

        Raises ModelError unless it outputs finite tensors, ConfigError for the wrong number of classes.
        """
        name, spec = type(model).__name__, spec or known_spec(model)
        network: nn.Module = copy.deepcopy(model).cpu()
        for tensor in (*network.parameters(), *network.buffers()):
            tensor.data = tensor.data.contiguous()  # some exporters take no others
        if spec is not None and layout is not None:
            network = _WithPreparation(network, spec, layout)
        if example is None:
            example = _example(name, network, spec, layout)
        example = torch.cat([example, example])[: max(2, len(example))].cpu()
        outputs = named_outputs(network, example)
        width = next(iter(outputs.values())).shape[-1]
        classes = getattr(model, "classes", None) if classes is None else classes
        if classes is not None and list(outputs) == [OUTPUT] and len(classes) != width:
            raise ConfigError.of("export", [f"classes: {len(classes)} given, the network has {width}"])
        names = None if classes is None else tuple(classes)
        return cls(name, network, example, spec, layout, names, outputs)

    @property
    def input(self) -> GraphInput:
        if self.spec is None:
            raise ModelError(f"{self.name} does not know its input; set model.input_spec = InputSpec(...)")
        return GraphInput(self.spec, self.layout)

    @property
    def notes(self) -> dict[str, str]:
        """The metadata of the file, JSON by name; `read_input` and `read_classes` read it."""
        about: dict[str, object] = {"shape": list(self.example.shape[1:]), "layout": self.layout or "NCHW"}
        about |= {"prepares": self.layout is not None, **({} if self.spec is None else asdict(self.spec))}
        return {"input": json.dumps(about), "classes": json.dumps(self.classes)}

    @property
    def ultralytics_notes(self) -> dict[str, str]:
        """The metadata that Ultralytics' reader of ONNX files knows; its values are Python literals."""
        spec, classes = self.input.spec, self.classes or ()
        return {
            "description": "an image classifier, made small by basisprune",
            "task": "classify",
            "stride": "1",
            "batch": "1",
            "channels": str(spec.channels),
            "imgsz": repr(list(spec.size)),
            "names": repr(dict(enumerate(classes))),
        }

    @property
    def openvino_notes(self) -> dict[str, str]:
        """The entries of `model_info` that OpenVINO's Model API knows; its labels are separated by spaces."""
        spec, outside = self.input.spec, self.input.outside
        classes = self.classes or tuple(map(str, range(next(iter(self.outputs.values())).shape[-1])))
        scale = 255 if self.layout is None else 1
        return {
            "model_type": "Classification",
            "task_type": "classification",
            "labels": " ".join("_".join(name.split()) or "_" for name in classes),
            "resize_type": "standard",
            "orig_width": str(spec.size[1]),
            "orig_height": str(spec.size[0]),
            "mean_values": " ".join(f"{scale * value:g}" for value in outside.mean),
            "scale_values": " ".join(f"{scale * value:g}" for value in outside.std),
            "reverse_input_channels": str(spec.channels == 3),  # it reads images as BGR
            "multilabel": "False",
            "hierarchical": "False",
            "output_raw_scores": "True",
        }


class _WithPreparation(nn.Module):
    """The network behind the normalisation of uint8 pixels of the right size."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, spec: InputSpec, layout: PixelLayout) -> None:
        super().__init__()
        self.network, self.layout = network, layout
        like = next(network.parameters())
        self.register_buffer("mean", like.new_tensor(spec.mean).view(-1, 1, 1))
        self.register_buffer("std", like.new_tensor(spec.std).view(-1, 1, 1))

    def forward(self, pixels: Tensor) -> object:
        images = pixels.permute(0, 3, 1, 2) if self.layout == "NHWC" else pixels
        return self.network((images.to(self.mean.dtype) / 255 - self.mean) / self.std)


def _example(name: str, network: nn.Module, spec: InputSpec | None, layout: PixelLayout | None) -> Tensor:
    if spec is None:
        fault = f"example_inputs: {name} does not know its input; pass a batch of inputs"
        raise ConfigError.of("export", [fault])
    if layout is None:
        return example_input(network, spec.shape)
    shape = GraphInput(spec, layout).shape
    return torch.randint(0, 256, (2, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def named_outputs(model: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """Return all outputs of the model in eval mode: "scores" if there is one, or else named by keys and places.

    Raises ModelError unless they are tensors of finite numbers.

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
    steps = [str(getattr(step, "key", getattr(step, "idx", getattr(step, "name", step)))) for step in path]
    if not steps:
        return OUTPUT
    return ".".join([f"output{steps[0]}" if steps[0].isdigit() else steps[0], *steps[1:]])


def read_input(path: Path, notes: Mapping[str, str]) -> GraphInput:
    """Read what a file takes from its metadata; raises ModelError where that is missing or wrong."""
    try:
        about = cast("dict[str, Json]", parse_json(notes["input"].encode()))
        known = {each.name: about[each.name] for each in fields(InputSpec) if each.name in about}
        spec, prepares, layout = InputSpec.from_json(json.dumps(known)), about["prepares"], about["layout"]
        if not isinstance(prepares, bool) or layout not in get_args(PixelLayout):
            raise TypeError(f"prepares: {prepares!r}, layout: {layout!r}")
        if prepares and len(spec.size) != 2:
            raise ValueError(f"prepares: true, of inputs that are no images ({spec})")
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: does not say how it wants its images; export it with basisprune from a network with an input_spec"
        ) from error
    return GraphInput(spec, cast("PixelLayout", layout) if prepares else None)


def read_classes(path: Path, notes: Mapping[str, str]) -> tuple[str, ...] | None:
    """Read the names of a file's classes, None if it has none; raises ModelError where they are missing or wrong."""
    try:
        names = parse_json(notes["classes"].encode())
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise TypeError(f"{type(names).__name__} found")
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: has no class names; export it again with basisprune") from error
    return None if names is None else tuple(map(str, names))
