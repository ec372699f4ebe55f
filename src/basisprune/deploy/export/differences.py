"""Which layer of an ONNX graph is the first to differ from PyTorch."""

from __future__ import annotations

import ast
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from basisprune.deploy.export.common import LEAST
from basisprune.deploy.export.runtime import feed_of, open_session
from basisprune.errors import LayerError
from basisprune.torchkit.running import hooked, mode, relative_difference

if TYPE_CHECKING:
    from onnx import ModelProto, NodeProto

_NOTICEABLE = 1e-3


def name_difference(network: nn.Module, proto: ModelProto, inputs: Tensor, difference: float) -> LayerError:
    """The error that names the first layer whose output onnxruntime computes otherwise; `proto` is changed.

    Layers are modules without children that run once and that the exporter did not merge into others.
    """
    onnx = import_module("onnx")
    said = f"the ONNX graph differs from PyTorch by {difference:.2g} of the largest output; nothing was written"
    expected = _leaf_outputs(network, inputs)
    made = {path: name for path, name in _last_outputs(proto).items() if path in expected}
    known = {output.name for output in proto.graph.output}
    proto.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in dict.fromkeys(made.values()) if name not in known
    )
    try:
        session = open_session(proto.SerializeToString())
        values = session.run(list(made.values()), feed_of(session, inputs))
    except Exception as error:  # the graph does not bear to be watched
        return LayerError("", f"{said} (the layer could not be found: {error})")
    for path, value in zip(made, values, strict=True):
        given, wanted = torch.from_numpy(value), expected[path]
        if given.shape == wanted.shape and relative_difference(wanted, given, least=LEAST) > _NOTICEABLE:
            return LayerError(path.removeprefix("network."), f"is the first layer where {said}")
    return LayerError("", f"{said}; every layer on its own agrees, so the difference lies between them")


def module_scopes(node: NodeProto) -> list[str]:
    """The paths of the modules, the outermost first, that a node of an exported graph comes from."""
    notes = {prop.key: prop.value for prop in node.metadata_props}
    scopes: list[str] = ast.literal_eval(notes.get("pkg.torch.onnx.name_scopes", "[]"))
    return scopes[:-1]  # the last is the operation


def _last_outputs(proto: ModelProto) -> dict[str, str]:
    """The last tensor that each module makes in the graph, in order, by the module's path."""
    last: dict[str, str] = {}
    for node in proto.graph.node:
        path = ["", *module_scopes(node)][-1]
        last.pop(path, None)
        last[path] = node.output[0]
    return last


@torch.no_grad()
def _leaf_outputs(network: nn.Module, inputs: Tensor) -> dict[str, Tensor]:
    """What every module without children outputs, if it runs once and outputs one tensor."""
    seen: dict[str, list[object]] = {}

    def keep(name: str, _module: nn.Module, _args: object, output: object) -> None:
        seen.setdefault(name, []).append(output.detach().cpu().clone() if isinstance(output, Tensor) else output)

    leaves = [(name, module) for name, module in network.named_modules() if name and not list(module.children())]
    handles = [module.register_forward_hook(partial(keep, name)) for name, module in leaves]
    with hooked(handles), mode(network, training=False):
        network(inputs)
    return {name: calls[0] for name, calls in seen.items() if len(calls) == 1 and isinstance(calls[0], Tensor)}
