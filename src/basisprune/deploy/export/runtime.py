"""torch's ONNX exporter and onnxruntime's sessions, for all that uses them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from basisprune.deploy.export.attention import FourAxes
from basisprune.deploy.export.common import INPUT, OUTPUT
from basisprune.deploy.export.runner import PREFIX
from basisprune.errors import MissingExtraError, ModelError
from basisprune.torchkit.running import mode

if TYPE_CHECKING:
    from onnx import ModelProto

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Named(Protocol):
    """An input of a session."""

    name: str


class Metadata(Protocol):
    """What a file says of itself."""

    custom_metadata_map: Mapping[str, str]


class Session(Protocol):
    """An onnxruntime session, as far as it is used here."""

    def run(self, outputs: Sequence[str] | None, feed: Mapping[str, NDArray[np.generic]]) -> list[NDArray[np.generic]]:
        """The outputs of those names, or all of them."""

    def get_inputs(self) -> Sequence[Named]:
        """What it takes."""

    def get_modelmeta(self) -> Metadata:
        """What its file says of itself."""


def has_onnx() -> bool:
    """Whether the packages of the extra `onnx` are installed."""
    return all(find_spec(package) is not None for package in PACKAGES)


def require_onnx() -> None:
    """Raises MissingExtraError for the first package of the extra `onnx` that is not installed."""
    for package in PACKAGES:
        if find_spec(package) is None:
            raise MissingExtraError(package, extra="onnx")


def to_proto(network: nn.Module, example: Tensor, outputs: Sequence[str] = (OUTPUT,)) -> ModelProto:
    """The network in eval mode as an onnx.ModelProto with a free batch size; raises ModelError if it cannot be."""
    proto = _exported(network, (example,), [INPUT], list(outputs), any_batch=True)
    _shorten_statistics(proto)
    return proto


def layer_protos(layers: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[ModelProto]:
    """Each layer on its own as an onnx.ModelProto for the one shape of its input.

    The exporter takes a moment to start, so all go through it at once and are parted afterwards.
    """
    utils = import_module("onnx.utils")
    ins, outs = ([f"{kind}_{index}" for index in range(len(layers))] for kind in (INPUT, OUTPUT))
    proto = _exported(_SideBySide(layers), tuple(inputs), ins, outs)
    whole = utils.Extractor(proto)
    return [whole.extract_model([given], [made]) for given, made in zip(ins, outs, strict=True)]


def open_session(model: Path | bytes, threads: int | None = None) -> Session:
    """An onnxruntime session on the CPU for a file, or for its content; raises ModelError if it cannot be read."""
    onnxruntime = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    if threads is not None:
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    try:
        session: Session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own, of several kinds
        where = model if isinstance(model, Path) else "the graph"
        raise ModelError(f"{where}: onnxruntime cannot read it ({str(error)[:500]}); export it again") from error
    return session


def feed_of(session: Session, inputs: Tensor) -> dict[str, NDArray[np.generic]]:
    """What to run the session on, for a network with one input."""
    return {session.get_inputs()[0].name: inputs.cpu().numpy()}


def notes_in(session: Session) -> dict[str, str]:
    """What the file of the session says of itself, as JSON texts by name."""
    said = session.get_modelmeta().custom_metadata_map
    return {key.removeprefix(PREFIX): value for key, value in said.items() if key.startswith(PREFIX)}


def run_session(session: Session, inputs: Tensor) -> Tensor:
    """The first output of an onnxruntime session; raises ModelError if it cannot be run."""
    return run_all(session, inputs)[0]


def run_all(session: Session, inputs: Tensor) -> list[Tensor]:
    """All outputs of an onnxruntime session; raises ModelError if it cannot be run."""
    try:
        outputs = session.run(None, feed_of(session, inputs))
    except Exception as error:  # onnxruntime's own, of several kinds
        given = f"{inputs.dtype} {tuple(inputs.shape)}"
        raise ModelError(f"onnxruntime cannot run the graph on {given} ({str(error)[:500]})") from error
    return [torch.from_numpy(np.asarray(output)) for output in outputs]


class _SideBySide(nn.Module):
    """Each layer on an input of its own."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(features) for layer, features in zip(self.layers, inputs, strict=True))


def _exported(
    network: nn.Module, inputs: tuple[Tensor, ...], ins: list[str], outs: list[str], *, any_batch: bool = False
) -> ModelProto:
    shapes = ({0: torch.export.Dim("batch")},) * len(inputs) if any_batch else None
    with torch.no_grad(), mode(network, training=False), warnings.catch_warnings(), FourAxes():
        warnings.simplefilter("ignore")  # the exporter warns of its own affairs
        try:
            program = torch.onnx.export(
                *(network, inputs),
                input_names=ins,
                output_names=outs,
                dynamo=True,
                verbose=False,
                dynamic_shapes=shapes,
            )
        except Exception as error:
            said = _COLOURS.sub("", str(error))[:500]
            raise ModelError(f"{type(network).__name__} cannot be exported: {type(error).__name__}: {said}") from error
    if program is None:
        raise ModelError(f"{type(network).__name__} cannot be exported: torch gave no program")
    return program.model_proto


def _shorten_statistics(proto: ModelProto) -> None:
    """Writes the statistics that `fold` leaves in norms, all 0 or all 1, as rules in the place of the numbers.

    Runtimes carry them out once, when they load the file; norms of one width share theirs.
    """
    onnx = import_module("onnx")
    graph = proto.graph
    constants = {constant.name: constant for constant in graph.initializer}
    rules: dict[str, NDArray[np.generic]] = {}
    replaced: set[str] = set()
    for norm in (node for node in graph.node if node.op_type == "BatchNormalization"):
        for place, name in enumerate(norm.input[3:5], 3):
            values = onnx.numpy_helper.to_array(constants[name]) if name in constants else np.empty(0)
            if len(values) and values[0] in (0, 1) and (values == values[0]).all():
                replaced.add(name)
                norm.input[place] = f"fill.{values[0]:g}.{len(values)}"
                rules[norm.input[place]] = values
    replaced -= {name for node in graph.node for name in node.input}
    for index in reversed(range(len(graph.initializer))):
        if graph.initializer[index].name in replaced:
            del graph.initializer[index]
    for size in sorted({len(values) for values in rules.values()}):
        graph.initializer.append(onnx.numpy_helper.from_array(np.array([size], dtype=np.int64), f"size.{size}"))
    for name, values in rules.items():
        value = onnx.numpy_helper.from_array(values[:1])
        rule = onnx.helper.make_node("ConstantOfShape", [f"size.{len(values)}"], [name], name, value=value)
        graph.node.insert(0, rule)
