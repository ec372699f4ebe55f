"""Networks as ONNX graphs: exported by torch, run and quantised by onnxruntime."""

from __future__ import annotations

import ast
import json
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from basisprune.deploy.export.exportable import INPUT, OUTPUT, Exportable
from basisprune.deploy.export.runtime import Runtime
from basisprune.deploy.export.sandboxed import PREFIX, fed, onnx_session, open_onnx
from basisprune.errors import LayerError, ModelError
from basisprune.files import replacing
from basisprune.torchkit.running import hooked, mode, relative_difference
from basisprune.transfer.several import SeveralInputs

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

LEAST = 1e-6
"""Outputs that are smaller than this count as this large where differences are given relative to them."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_NOTICEABLE = 1e-3
_LAYERS = ("Conv", "ConvTranspose", "Gemm", "MatMul")
_SHARES = (0.125, 0.25, 0.5)  # of the layers that stay in float, tried until the int8 file is good enough


def open_session(model: Path | bytes, threads: int | None = None) -> Any:
    """Open an ONNX file, or the content of one, in onnxruntime; raises ModelError if it cannot be read."""
    try:
        return onnx_session(model, threads)
    except Exception as error:  # onnxruntime's own, of several kinds
        where = model if isinstance(model, Path) else "the graph"
        raise ModelError(f"{where}: onnxruntime cannot read it ({str(error)[:500]}); export it again") from error


# ------------------------------------------------------------------------------------------- network -> graph


def to_proto(network: nn.Module, example: Tensor, outputs: Sequence[str] = (OUTPUT,)) -> ModelProto:
    """Export the network in eval mode with a free batch size; raises ModelError if it cannot be exported."""
    with torch.no_grad(), mode(network, training=False):
        network(torch.cat([example, example[:1]]))  # or what it keeps for the shape of its last input fixes the batch
    if isinstance(network, SeveralInputs):
        proto = _exported(network, network.unpacked(example), network.names, list(outputs), any_batch=True)
    else:
        proto = _exported(network, (example,), [INPUT], list(outputs), any_batch=True)
    _shorten_statistics(proto)
    return proto


def layer_protos(layers: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[ModelProto]:
    """Export each layer for the one shape of its input; all at once, because the exporter takes a moment to start."""
    ins, outs = ([f"{kind}_{index}" for index in range(len(layers))] for kind in (INPUT, OUTPUT))
    proto = _exported(_SideBySide(layers), tuple(inputs), ins, outs)
    whole = import_module("onnx.utils").Extractor(proto)
    return [whole.extract_model([one], [other]) for one, other in zip(ins, outs, strict=True)]


def proto_of(what: Exportable) -> ModelProto:
    """Export a network with its metadata: in our own words and, where all is known, in those of other readers."""
    proto = to_proto(what.network, what.example, list(what.outputs))
    notes = {f"{PREFIX}{name}": text for name, text in what.notes.items()}
    if what.spec is not None and len(what.spec.size) == 2 and what.classes is not None:
        notes |= what.ultralytics_notes
        notes |= {f"model_info {name}": text for name, text in what.openvino_notes.items()}
    notes |= getattr(what.network, "file_notes", {})
    notes[f"{PREFIX}preparing"] = json.dumps([] if what.layout is None else _preparing(proto))
    for key, value in notes.items():
        entry = proto.metadata_props.add()
        entry.key, entry.value = key, value
    # What only serves to debug the exporter goes: traces with paths of this machine, and derived shapes.
    for part in (proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output, *proto.graph.initializer):
        del part.metadata_props[:]
    del proto.graph.value_info[:]
    return proto


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
    each = ({0: torch.export.Dim("batch")},) * len(inputs)
    shapes = (each,) if isinstance(network, SeveralInputs) else each  # of its one starred argument
    options: dict[str, Any] = {"dynamo": True, "verbose": False, "dynamic_shapes": shapes if any_batch else None}
    with torch.no_grad(), mode(network, training=False), warnings.catch_warnings(), _FourAxes():
        warnings.simplefilter("ignore")  # the exporter warns of its own affairs
        try:
            program = torch.onnx.export(network, inputs, input_names=ins, output_names=outs, **options)
        except Exception as error:
            reason = _COLOURS.sub("", str(error))[:500]
            what = f"{type(network).__name__} cannot be exported"
            raise ModelError(f"{what}: {type(error).__name__}: {reason}") from error
    if program is None:
        raise ModelError(f"{type(network).__name__} cannot be exported: torch gave no program")
    return program.model_proto


class _FourAxes(TorchFunctionMode):
    """Computes attention in the one shape that torch's exporter knows: (batch, heads, length, width)."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return (over_two_axes if func is F.scaled_dot_product_attention else func)(*args, **kwargs or {})


def over_two_axes(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **named: Any
) -> Tensor:
    """Compute `scaled_dot_product_attention` of (..., length, width), with all leading axes but the last in one."""
    leading = query.shape[:-2]
    if len(leading) == 2:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **named)
    if attn_mask is not None:
        attn_mask = _with_two(attn_mask.expand(*leading, *attn_mask.shape[-2:]))
    query, key, value = (_with_two(each) for each in (query, key, value))
    found = F.scaled_dot_product_attention(query, key, value, attn_mask, *rest, **named)
    return found.squeeze(1) if len(leading) == 1 else found.unflatten(0, leading[:-1])


def _with_two(features: Tensor) -> Tensor:
    return features.unsqueeze(1) if features.ndim == 3 else features.flatten(0, -4)


def _shorten_statistics(proto: ModelProto) -> None:
    """Write the statistics that `fold` leaves in norms, all 0 or all 1, as rules in the place of the numbers.

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


def _preparing(proto: ModelProto) -> list[str]:
    """The nodes that prepare the images, which `quantise` leaves alone: what comes before all of the network's layers.

    A folded network is a graph, whose operations between layers name no module that they come from.
    """
    constants = {constant.name for constant in proto.graph.initializer}
    before, names = {"", *constants, *(each.name for each in proto.graph.input)}, []
    for node in proto.graph.node:
        inside = any(f"{scope}.".startswith("network.") for scope in _module_scopes(node))
        if not inside and before.issuperset(node.input):
            before.update(node.output)
            names.append(node.name)
    return names


def _module_scopes(node: NodeProto) -> list[str]:
    """The paths of the modules, the outermost first, that a node of an exported graph comes from."""
    notes = {prop.key: prop.value for prop in node.metadata_props}
    scopes: list[str] = ast.literal_eval(notes.get("pkg.torch.onnx.name_scopes", "[]"))
    return scopes[:-1]  # the last is the operation


# ------------------------------------------------------------------------------------------- where a graph differs


def _locate(what: Exportable, inputs: Tensor, difference: float) -> LayerError:
    """Name the first layer whose output onnxruntime computes otherwise.

    Layers are modules without children that run once and that the exporter did not merge into others.
    """
    reason = f"the ONNX graph differs from PyTorch by {difference:.2g} of the largest output; nothing was written"
    expected = _leaf_outputs(what.network, inputs)
    proto = to_proto(what.network, what.example, list(what.outputs))
    last: dict[str, str] = {}  # tensor that each module makes in the graph
    for node in proto.graph.node:
        path = ["", *_module_scopes(node)][-1]
        last.pop(path, None)
        last[path] = node.output[0]
    found = {path: name for path, name in last.items() if path in expected}
    try:
        values = _watched(proto, list(found.values()), inputs)
    except Exception as error:  # the graph does not bear to be watched
        return LayerError("", f"{reason} (the layer could not be found: {error})")
    for path, name in found.items():
        given, wanted = torch.from_numpy(values[name]), expected[path]
        if given.shape == wanted.shape and relative_difference(wanted, given, least=LEAST) > _NOTICEABLE:
            return LayerError(path.removeprefix("network."), f"is the first layer where {reason}")
    return LayerError("", f"{reason}; every layer on its own agrees, so the difference lies between them")


@torch.no_grad()
def _leaf_outputs(network: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """What every module without children outputs, if it runs once and outputs one tensor."""
    seen: dict[str, list[object]] = {}

    def keep(name: str, _module: nn.Module, _args: object, output: object) -> None:
        seen.setdefault(name, []).append(output.clone() if isinstance(output, Tensor) else output)

    leaves = [(name, module) for name, module in network.named_modules() if name and not list(module.children())]
    handles = [module.register_forward_hook(partial(keep, name)) for name, module in leaves]
    with hooked(handles), mode(network, training=False):
        network(inputs)
    return {name: calls[0] for name, calls in seen.items() if len(calls) == 1 and isinstance(calls[0], Tensor)}


def _watched(proto: ModelProto, names: Sequence[str], batch: Tensor) -> dict[str, NDArray[np.generic]]:
    """The values of those tensors in a graph, as far as they are there; the graph is changed."""
    onnx = import_module("onnx")
    there = {output for node in proto.graph.node for output in node.output}
    known = {output.name for output in proto.graph.output}
    found = [name for name in dict.fromkeys(names) if name in there]
    proto.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in found if name not in known)
    session = open_session(proto.SerializeToString())
    values = session.run(found, fed(session, batch.cpu().numpy()))
    return dict(zip(found, map(np.asarray, values), strict=True))


# ------------------------------------------------------------------------------------------- 8 bits


def quantise(source: Path, target: Path, batches: Sequence[Tensor], keep: Sequence[str] = ()) -> None:
    """Write the int8 file of a float one: weights per channel, activations by their range on the batches.

    Weights use seven of eight bits, so that no processor overflows. The nodes named in `keep` stay as they are, and
    so do those that prepare the images, and the metadata. Raises ModelError where onnxruntime cannot, and leaves no
    file.
    """
    tools = import_module("onnxruntime.quantization")
    notes = {entry.key: entry.value for entry in _read(source).metadata_props}
    preparing: list[str] = json.loads(notes.get(f"{PREFIX}preparing", "[]"))
    with replacing(target) as partial_file, without_advice():
        try:
            tools.quantize_static(
                source,
                partial_file,
                _Calibration(batches),
                quant_format=tools.QuantFormat.QDQ,
                per_channel=True,
                reduce_range=True,
                activation_type=tools.QuantType.QUInt8,
                weight_type=tools.QuantType.QInt8,
                nodes_to_exclude=[*preparing, *keep],
            )
        except Exception as error:  # onnxruntime's own, of several kinds
            reason = f"{type(error).__name__}: {str(error)[:500]}"
            raise ModelError(f"{source}: onnxruntime cannot quantise it ({reason}); use it as it is") from error


class _Calibration:
    """The batches, as onnxruntime asks for them."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.feeds = iter([{INPUT: batch.cpu().numpy()} for batch in batches])

    def get_next(self) -> Mapping[str, NDArray[np.generic]] | None:
        return next(self.feeds, None)


@dataclass(frozen=True)
class Quantised:
    """An int8 file: how many of its layers stay in float, of all, and whether it is good enough."""

    in_float: int
    layers: int
    accepted: bool


def quantise_within(
    source: Path, target: Path, batches: Sequence[Tensor], accepts: Callable[[Path], bool]
) -> Quantised:
    """Write an int8 file that `accepts` takes: more and more layers stay in float, those that hurt most.

    If none is accepted, the last is left there, with half of the layers in float.
    """
    quantise(source, target, batches)
    layers = {node.output[0]: node.name for node in _read(source).graph.node if node.op_type in _LAYERS}
    if accepts(target):
        return Quantised(0, len(layers), accepted=True)
    worst = _by_harm(source, target, layers, batches[0])
    for count in (math.ceil(share * len(worst)) for share in _SHARES):
        quantise(source, target, batches, worst[:count])
        if accepts(target):
            return Quantised(count, len(layers), accepted=True)
    return Quantised(count, len(layers), accepted=False)


def _by_harm(source: Path, quantised: Path, layers: Mapping[str, str], batch: Tensor) -> list[str]:
    """The layers, those first behind which the relative error grows most from one layer to the next."""
    wanted, found = (_watched(_read(path), list(layers), batch) for path in (source, quantised))
    harm, before = {}, 0.0
    for output, layer in layers.items():
        exact = wanted[output].astype(np.float64)
        size = float(np.linalg.norm(exact)) or 1.0
        error = float(np.linalg.norm(exact - found[output].astype(np.float64))) / size if output in found else before
        harm[layer] = error - before
        before = error
    return sorted(harm, key=lambda layer: -harm[layer])


def _read(path: Path) -> ModelProto:
    proto: ModelProto = import_module("onnx").load(str(path))
    return proto


@contextmanager
def without_advice() -> Iterator[None]:
    """Silence what quantisers log: the graph comes from an exporter that merged norms already."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


ONNX = Runtime(
    name="onnx",
    title="ONNX Runtime",
    what="for ONNX Runtime and others",
    packages=("onnx", "onnxscript", "onnxruntime"),
    suffixes=(".onnx",),
    write=lambda what, path: path.write_bytes(proto_of(what).SerializeToString()),
    open=open_onnx,
    quantise=quantise,
    locate=_locate,
)


def has_onnx() -> bool:
    """Whether the packages of the extra `onnx` are installed."""
    return ONNX.is_installed
