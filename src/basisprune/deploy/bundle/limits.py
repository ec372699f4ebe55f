"""What a network out of a file may ask of this machine while it is built and tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from basisprune.errors import BundleError

_LARGEST = 2 << 30  # bytes of one tensor
_OPERATIONS = 100_000
_WORK = 10**13  # floating-point operations, about those of the largest networks of timm on one image


class Bounded(TorchDispatchMode):
    """Raises BundleError before an operation that makes too large a tensor, or when it has become too much work.

    The size of what an operation makes is found on torch's meta device, where tensors have a shape and no memory.
    """

    def __init__(self, most: int = _OPERATIONS) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self.operations = most, 0
        self.work = 0

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        _types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """What the operation gives, if it is allowed."""
        self.operations += 1
        if self.operations > self.most:
            raise BundleError(f"a part of its network takes more than {self.most:,} operations")
        self._refuse_too_much(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _refuse_too_much(
        self, func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> None:
        inputs, options = tree_map_only(Tensor, _without_memory, (args, dict(kwargs)))
        if options.get("device") is not None:
            options["device"] = torch.device("meta")
        try:
            made = func(*inputs, **options)
        except Exception:  # not every operation tells its shape; then it is tried as it is
            return
        largest = max((leaf.nbytes for leaf in tree_leaves(made) if isinstance(leaf, Tensor)), default=0)
        if largest > _LARGEST:
            raise BundleError(f"its network makes a tensor of {largest:,} bytes; at most {_LARGEST:,} are allowed")
        count: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        self.work += 0 if count is None else count(*inputs, **options, out_val=made)
        if self.work > _WORK:
            raise BundleError(f"its network takes more than {_WORK:.0e} floating-point operations for one input")


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
