"""Who reads what: the layers of one run of a network, and the batch norms behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from basisprune.basis.layers import BasisPair
from basisprune.torchkit.running import mode
from basisprune.torchkit.surgery import TORCH_CONVS, find_layers

BatchNorm: TypeAlias = nn.modules.batchnorm._BatchNorm

LAYERS: tuple[type[nn.Module], ...] = (*TORCH_CONVS, nn.Linear, BasisPair)


@dataclass
class Call:
    """One call of a layer, and which norms (None for anything else) read what came out."""

    layer: str
    shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    channels_last: bool
    extra_arguments: bool
    readers: list[str | None] = field(default_factory=list)


class Run(TorchDispatchMode):
    """The calls of all layers in one run of a model, and what each batch norm read.

    Every operation passes here with its tensors, so that nothing reads a layer's output unnoticed.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: dict[str, list[Call]] = {}
        self.sources: dict[str, list[str | None]] = {}
        self.output: Any = None
        self._norm: str | None = None
        self._made_by: Any = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Notes which of the layers' outputs the operation reads."""
        self._note_reader(self._norm, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def finish(self, output: Any) -> None:
        """Notes what the model returned, which counts as read by others."""
        self.output = output
        self._note_reader(None, output)

    def layer_done(self, name: str, _layer: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        """A forward hook of layers."""
        features: Tensor = args[0] if args else next(iter(kwargs.values()))
        channels_last = features.dim() == 4 and not features.is_contiguous()
        extra = len(args) + len(kwargs) > 1
        call = Call(name, tuple(features.shape), tuple(output.shape), channels_last, extra)
        self.calls.setdefault(name, []).append(call)
        self._made_by[output] = call

    def norm_starts(self, name: str, _norm: nn.Module, args: Any) -> None:
        """A forward pre-hook of batch norms."""
        call = self._made_by.get(args[0]) if args else None
        self.sources.setdefault(name, []).append(call.layer if call else None)
        self._norm = name

    def norm_done(self, *_: Any) -> None:
        """A forward hook of batch norms."""
        self._norm = None

    def is_passage(self, layer: str, norm: str) -> bool:
        """Whether the norm reads nothing but this layer, and nothing else reads the layer."""
        readers = {reader for call in self.calls[layer] for reader in call.readers}
        return set(self.sources[norm]) == {layer} and readers == {norm}

    def _note_reader(self, reader: str | None, values: Any) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and (call := self._made_by.get(tensor)) is not None:
                call.readers.append(reader)


@torch.no_grad()
def observe(model: nn.Module, inputs: tuple[Any, ...]) -> Run:
    """One run of the model in eval mode."""
    run = Run()
    handles = [
        layer.register_forward_hook(partial(run.layer_done, name), with_kwargs=True)
        for name, layer in find_layers(model, LAYERS, opaque=BasisPair)
    ]
    for name, norm in find_layers(model, BatchNorm):
        handles.append(norm.register_forward_pre_hook(partial(run.norm_starts, name)))
        handles.append(norm.register_forward_hook(run.norm_done))
    try:
        with mode(model, training=False):
            with run:
                output = model(*inputs)
            run.finish(output)
    finally:
        for handle in handles:
            handle.remove()
    return run
