"""Who reads what: the layers of one run of a network, and the norms that read what they output."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from basisprune.torchkit.running import hooked, mode, tensors_in


@dataclass
class LayerCall:
    """One call of a layer: the shapes that go in and come out, and which norms (None for anything else) read that."""

    layer: str
    shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    extra_arguments: bool
    readers: list[str | None] = field(default_factory=list)


@dataclass
class Dataflow:
    """The calls of each layer in a run of a model, which layer each norm read (None for anything else), the output.

    `norm_sizes` are the (height, width) of the maps that each norm read.
    """

    calls: dict[str, list[LayerCall]] = field(default_factory=dict)
    sources: dict[str, list[str | None]] = field(default_factory=dict)
    output: object = None
    norm_sizes: dict[str, list[tuple[int, int]]] = field(default_factory=dict)

    def is_passage(self, layer: str, norm: str) -> bool:
        """Whether the norm reads nothing but this layer, and nothing else reads the layer."""
        readers = {reader for call in self.calls[layer] for reader in call.readers}
        return set(self.sources[norm]) == {layer} and readers == {norm}


@torch.no_grad()
def dataflow_of(
    model: nn.Module, inputs: Sequence[object], layers: Mapping[str, nn.Module], norms: Mapping[str, nn.Module]
) -> Dataflow:
    """What the norms and everything else read of these layers of the model, in one run in eval mode.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    >>> dataflow_of(net, [torch.zeros(1, 3, 2, 2)], {"0": net[0]}, {"1": net[1]}).is_passage("0", "1")
    True
    """
    watch = _Watch()
    handles = [
        layer.register_forward_hook(partial(watch.layer_done, name), with_kwargs=True) for name, layer in layers.items()
    ]
    for name, norm in norms.items():
        handles.append(norm.register_forward_pre_hook(partial(watch.norm_starts, name)))
        handles.append(norm.register_forward_hook(watch.norm_done))
    with hooked(handles), mode(model, training=False):
        with watch:
            output = model(*inputs)
        watch.finish(output)
    return watch.found


class _Watch(TorchDispatchMode):
    """Every operation passes here with its tensors, so that nothing reads a layer's output unnoticed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Dataflow()
        self._norm: str | None = None
        self._made_by: MutableMapping[Tensor, LayerCall] = WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        _types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Notes which of the layers' outputs the operation reads."""
        self._note_reader(self._norm, (args, kwargs))
        return func(*args, **(kwargs or {}))

    def finish(self, output: object) -> None:
        """Notes what the model returned, which counts as read by others."""
        self.found.output = output
        self._note_reader(None, output)

    def layer_done(
        self, name: str, _layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor
    ) -> None:
        """A forward hook of layers."""
        features = args[0] if args else next(iter(kwargs.values()))
        call = LayerCall(name, tuple(features.shape), tuple(output.shape), len(args) + len(kwargs) > 1)
        self.found.calls.setdefault(name, []).append(call)
        self._made_by[output] = call

    def norm_starts(self, name: str, _norm: nn.Module, args: tuple[object, ...]) -> None:
        """A forward pre-hook of norms."""
        call = self._made_by.get(args[0]) if args and isinstance(args[0], Tensor) else None
        self.found.sources.setdefault(name, []).append(call.layer if call else None)
        if args and isinstance(args[0], Tensor) and args[0].dim() == 4:
            height, width = args[0].shape[-2:]
            self.found.norm_sizes.setdefault(name, []).append((height, width))
        self._norm = name

    def norm_done(self, *_: object) -> None:
        """A forward hook of norms."""
        self._norm = None

    def _note_reader(self, reader: str | None, values: object) -> None:
        for tensor in tensors_in(values):
            if (call := self._made_by.get(tensor)) is not None:
                call.readers.append(reader)
