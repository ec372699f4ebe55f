"""One run of a network with channel labels on every tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from basisprune.coupling.combining import COMBINING, PRODUCTS, elementwise, shape_only
from basisprune.coupling.labels import (
    CONSTANT,
    Labels,
    Ledger,
    Operation,
    Rule,
    attach,
    attached,
    listed,
    support,
    vector,
)
from basisprune.coupling.rearranging import REARRANGING
from basisprune.torchkit.running import hooked, mode, tensors_in
from basisprune.types import OUTPUT

RULES: dict[str, Rule] = {**COMBINING, **REARRANGING, **PRODUCTS}
"""What is known of operations; one that is not here and not element-wise by torch's own tags is unknown."""

_NORMS = ("native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update", "cudnn_batch_norm")


class Tracer(TorchDispatchMode):
    """Carries labels from tensor to tensor while a network runs; products and batch norms give zeros."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = ledger
        self.stack: list[tuple[str, tuple[object, ...]]] = []
        self.failing: list[Tensor] = []  # what the running operation reads; after an error, what failed

    def labels_of(self, tensor: Tensor) -> Labels:
        """The labels of a tensor; parameters get theirs when they are first asked for."""
        found = attached(tensor)
        if found is not None:
            return found
        if id(tensor) not in self.ledger.names:
            return CONSTANT
        fields = [vector(ids, dim, tensor.ndim) for dim, ids in enumerate(self.ledger.parameter(tensor))]
        return Labels(tuple(ids for ids in fields if ids.size > 1), active=False)

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        _types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        self.failing = tensors
        namespace, _, name = func._schema.name.partition("::")
        if namespace != "aten":
            name = func._schema.name
        elif not name.endswith("__"):
            name = name.removesuffix("_")
        out = self._result(func, name, args, kwargs)
        labels = [self.labels_of(tensor) for tensor in tensors]
        if any(label.fields for label in labels):
            module = self.stack[-1][0] if self.stack else ""
            call = Operation(name, func, args, kwargs, out, module, self.ledger, self.labels_of)
            self._mark(out, self._apply(call, labels))
        elif any(label.active for label in labels):
            self._mark(out, Labels((), active=True))
        self.failing = []
        return out

    def _result(
        self, func: OpOverload[..., object], name: str, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if name in PRODUCTS:
            return shape_only(func, args, kwargs)
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _NORMS and first is not None:
            return torch.zeros_like(first), *(first.new_zeros(0) for _ in func._schema.returns[1:])
        if func._schema.is_mutable and first is not None and id(first) in self.ledger.names:
            return first
        return func(*args, **kwargs)

    def _apply(self, call: Operation, labels: list[Labels]) -> Labels | list[Labels]:
        rule: Rule | None = RULES.get(call.name)
        if rule is None and torch.Tag.pointwise in getattr(call.func, "tags", ()):
            rule = elementwise
        if rule is not None:
            return rule(call)
        self.ledger.unknown[str(call.func)] = None
        for label in labels:
            for ids in label.fields:
                self.ledger.freeze(ids, f"it enters {call.func}, which is not known")
        return Labels((), any(label.active for label in labels))

    def _mark(self, out: object, labels: Labels | list[Labels]) -> None:
        results = listed(out)
        each = labels if isinstance(labels, list) else [labels] * len(results)
        for tensor, label in zip(results, each, strict=True):
            if isinstance(tensor, Tensor) and id(tensor) not in self.ledger.names:
                fits = all(ids.ndim == tensor.ndim for ids in label.fields)
                attach(tensor, label if fits else Labels((), label.active))


@contextmanager
def _quiet(model: nn.Module, training: bool) -> Iterator[None]:
    """The network in one mode, without gradients, random state and fused attention; all is put back."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    rng = torch.random.fork_rng(enabled=training)
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), rng, mode(model, training=training):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def _watched(model: nn.Module, tracer: Tracer) -> Iterator[None]:
    """Keep the tracer's stack of running modules; after an error the stack shows where it happened."""
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}

    def enter(module: nn.Module, args: tuple[object, ...]) -> None:
        tracer.stack.append((names.get(module, ""), args))
        for item in args:
            for ids in tracer.labels_of(item).fields if isinstance(item, Tensor) else ():
                tracer.ledger.hint(tracer.stack[-1][0], ids, support(ids)[-1])

    def leave(*_: object) -> None:
        tracer.stack.pop()

    with hooked([register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]):
        yield


def _two_images(example: Tensor) -> Tensor:
    """The first two examples, or the only one twice: a batch axis of length one would look like no axis."""
    return example[:2].detach().clone() if len(example) > 1 else example[:1].detach().repeat_interleave(2, 0)


def forward(model: nn.Module, inputs: tuple[Tensor, ...], tracer: Tracer, *, training: bool) -> None:
    """Runs the network under the tracer and freezes what reaches its output; raises what the network raises."""
    images = [_two_images(example) for example in inputs]
    for image in images:
        attach(image, Labels((), active=True))
    with _quiet(model, training), _watched(model, tracer), tracer:
        output = model(*images)
    for result in tensors_in(output):
        for ids in tracer.labels_of(result).fields:
            tracer.ledger.freeze(ids, OUTPUT)
