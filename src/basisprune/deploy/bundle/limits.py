"""What a network out of a file may ask of this machine: while it is built, tried, and run on inputs of a new shape."""

from __future__ import annotations

import math
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from basisprune.deploy.allowed import ARITHMETIC, FUNCTION_NAMES, FUNCTIONS, METHODS
from basisprune.errors import BundleError

_LARGEST = 2 << 30  # bytes of one tensor
_MEMORY = 4 << 30  # bytes of all tensors at a time
_OPERATIONS = 30_000
_CALLS = 100_000  # of modules
_WORK = 10**13  # floating-point operations, about those of the largest networks of timm on one image
_PER_NUMBER = 20  # what reading or writing one number costs, in floating-point operations
_LAID_OUT = 500  # what one number costs that a conv writes down for a product of matrices
_SMALL_CONV = 20_480  # numbers in the first four sides of an input, up to which torch has no library for its conv
_SLOW = 100  # times that a product of matrices in float16 takes for which there is no library
_LARGEST_NUMBER, _MOST_PIECES = 1 << 40, 4096
_MOST_VALUES = 100_000  # given to one step


def work_allowed(weights: int, numbers: int) -> int:
    """Return the most floating-point operations that a network with these weights may need for such an input.

    A conv without stride uses each weight at each pixel, and layers without weights do little else than their input.
    """
    return min(_WORK, 2 * 10**10 + 4 * weights * numbers + 10**4 * numbers)


def memory_allowed(weights: int, numbers: int) -> int:
    """Return how many bytes at a time such a network may need for such an input."""
    return min(_MEMORY, (256 << 20) + 16 * weights + 3200 * numbers)


class Bounded(TorchDispatchMode):
    """Raises BundleError before an operation that takes too much memory, or when it has become too much work.

    The size of what an operation makes is found on torch's meta device, where tensors have a shape and no memory.
    `memory` is for all tensors at a time that were made in this context, `largest` for any one of them, in bytes.
    """

    def __init__(
        self,
        operations: int = _OPERATIONS,
        *,
        work: int = _WORK,
        memory: int = _MEMORY,
        largest: int = _LARGEST,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self.most_work, self.memory, self.largest = operations, work, memory, largest
        self.operations = self.calls = self.work = self.live = 0
        self._hook: RemovableHandle | None = None

    def __enter__(self) -> Bounded:
        self._hook = register_module_forward_pre_hook(self._count_call)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._hook is not None:
            self._hook.remove()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        _types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.operations += 1
        if self.operations > self.most:
            raise BundleError(f"a part of its network takes more than {self.most:,} operations")
        options = dict(kwargs or {})
        given = _storages((args, options))
        self._refuse_too_much(func, args, options)
        result = func(*args, **options)
        for key, storage in _storages(result).items():
            if key not in given:
                self.live += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self._refuse_memory(_largest(result), 0)  # not every operation tells beforehand
        return result

    def _refuse_too_much(self, func: torch._ops.OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> None:
        inputs, options = tree_map_only(Tensor, _without_memory, (args, kwargs))
        if any(argument.name == "device" for argument in func._schema.arguments):
            options["device"] = torch.device("meta")
        try:
            made = func(*inputs, **options)
        except Exception:  # not every operation tells its shape; then it is tried as it is
            made = None
        given, new = _storages((inputs, options)), _storages(made)
        needed = sum(each.nbytes() for key, each in new.items() if key not in given)
        laid_out = _laid_out(args, made) if func._overloadpacket is torch.ops.aten.convolution else 0
        if not func.is_view:
            operands = list(_tensors((args, kwargs)))
            # Kernels copy what is expanded, and convs write down what they multiply.
            needed += sum(leaf.nbytes for leaf in operands if leaf.nbytes > leaf.untyped_storage().nbytes())
            needed += sum(laid_out * leaf.itemsize for leaf in operands[:1])
            self.work += _PER_NUMBER * sum(leaf.numel() for leaf in _tensors((inputs, options, made)))
            self.work += _taps(func, args, kwargs) * sum(leaf.numel() for leaf in _tensors(made)) + _LAID_OUT * laid_out
        self._refuse_memory(_largest(made), needed)
        count: Callable[..., int] | None = flop_registry.get(func._overloadpacket)
        if count is not None and made is not None:
            is_slow = any(leaf.dtype is torch.float16 and 1 not in leaf.stride()[-2:] for leaf in _tensors(args))
            self.work += count(*inputs, **options, out_val=made) * (_SLOW if is_slow else 1)
        if self.work > self.most_work:
            raise BundleError(f"its network takes more than {self.most_work:.0e} floating-point operations")

    def _refuse_memory(self, largest: int, more: int) -> None:
        if largest > self.largest:
            raise BundleError(f"its network makes a tensor of {largest:,} bytes; at most {self.largest:,} are allowed")
        if self.live + more > self.memory:
            raise BundleError(
                f"its network needs {self.live + more:,} bytes of memory at a time; at most {self.memory:,} are allowed"
            )

    def _free(self, size: int) -> None:
        self.live -= size

    def _count_call(self, _module: nn.Module, _args: object) -> None:
        self.calls += 1
        if self.calls > _CALLS:
            raise BundleError(f"its network calls more than {_CALLS:,} modules for one input")


def _laid_out(args: Sequence[object], made: object) -> int:
    """How many numbers a conv writes down to be a product of matrices: where torch has no library that does better."""
    given, weight, transposed, groups = (args[place] for place in (0, 1, 6, 8))
    if not (isinstance(given, Tensor) and isinstance(weight, Tensor) and isinstance(made, Tensor)):
        return 0
    is_fast = given.dtype is torch.float32 and math.prod(given.shape[:4]) > _SMALL_CONV
    if is_fast or math.prod(weight.shape[2:]) == 1:
        return 0
    places = (given if transposed else made).shape
    return places[0] * math.prod(places[2:]) * weight[0].numel() * int(cast(int, groups))


def _taps(func: torch._ops.OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> int:
    """How many numbers a pooling reads for each that it makes; 0 for what has no kernel, or counts its work."""
    names = [argument.name for argument in func._schema.arguments]
    if func._overloadpacket in flop_registry or "kernel_size" not in names:
        return 0
    place = names.index("kernel_size")
    sides = args[place] if place < len(args) else kwargs.get("kernel_size")
    if not isinstance(sides, (tuple, list)):
        return 0
    times: int = func._schema.arguments[place].N if len(sides) == 1 else 1  # type: ignore[attr-defined]
    return int(math.prod(sides) ** times)


def _tensors(value: object) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def _largest(value: object) -> int:
    return max((leaf.nbytes for leaf in _tensors(value)), default=0)


def _storages(value: object) -> dict[int, torch.UntypedStorage]:
    """The memory that the tensors in the value lie in, by its identity."""
    found = (leaf.untyped_storage() for leaf in _tensors(value) if leaf.layout is torch.strided)
    return {storage._cdata: storage for storage in found}


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


class RunGuard:
    """Watches over a graph out of a file: each step always, and all costs when its input has a new shape.

    A graph may compute shapes from those of its input, so that what it does for one image says nothing of a batch.
    """

    def __init__(self, weights: int, shape: Sequence[int]) -> None:
        self.numbers = math.prod(shape)  # in one input
        self.work = work_allowed(weights, self.numbers)
        self.known = {(1, *shape)}  # is tried when the network is loaded

    def watch(self, images: Tensor) -> AbstractContextManager[object]:
        """The context to run the graph in on these images; nothing is bounded where another program traces."""
        traces = _is_traced() or type(images) is not Tensor
        if traces or images.device.type == "meta" or (shape := tuple(images.shape)) in self.known:
            return nullcontext()
        self.known.add(shape)
        memory = max(_MEMORY, _machine_memory() * 3 // 4)
        inputs = max(1, -(-images.numel() // self.numbers))
        return Bounded(work=self.work * inputs, memory=memory, largest=memory)

    def check(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Raise BundleError before a step takes numbers that are too large, or makes too many pieces.

        Python itself sets no bounds to a list times a billion, or to a number squared forty times. Values in a tensor,
        which differ from image to image, may not decide on a size.
        """
        if _is_traced():  # numbers are tensors then
            return
        values = list(islice(_leaves((args, kwargs)), _MOST_VALUES + 1))
        if len(values) > _MOST_VALUES:
            raise BundleError(f"graph: a step is given more than {_MOST_VALUES:,} values")
        if any(isinstance(value, fx.Proxy) for value in values):
            return
        if any(isinstance(value, int) and abs(value) > _LARGEST_NUMBER for value in values):
            raise BundleError("graph: a number in it becomes too large")
        if function in ARITHMETIC:
            if not all(isinstance(value, (Tensor, int, float)) for value in args):
                raise BundleError(f"graph: {FUNCTION_NAMES[function]} of something that is neither tensor nor number")
        else:
            _refuse_values_as_sizes(function, args[1:], kwargs)
        if function in _PIECES and (pieces := _PIECES[function](*args, **kwargs)) > _MOST_PIECES:
            raise BundleError(f"graph: {pieces:,} pieces of a tensor; at most {_MOST_PIECES:,} are allowed")


def _refuse_values_as_sizes(function: object, index: Sequence[object], kwargs: Mapping[str, object]) -> None:
    if function is operator.getitem:
        if any(map(_is_mask, _leaves(index))) or any(isinstance(leaf, Tensor) for leaf in _bounds(index)):
            raise BundleError("graph: values in it are picked by other values, so their number is unknown")
    elif function not in _OF_SEVERAL and any(map(_is_whole, _leaves((index, kwargs)))):
        raise BundleError("graph: a number in a tensor is used as a size, so its size is unknown")


def _is_traced() -> bool:
    """Whether torch follows what is computed, to export or compile it."""
    return bool(torch.jit.is_tracing()) or torch.compiler.is_compiling()  # type: ignore[attr-defined, no-untyped-call]


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # on Windows
        return 0


def _leaves(value: object) -> Iterator[object]:
    """What the value holds, in sequences, dicts and slices, however deep."""
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _bounds(index: object) -> Iterator[object]:
    """The beginnings, ends and steps of the slices in an index."""
    for item in index if isinstance(index, (tuple, list)) else (index,):
        if isinstance(item, slice):
            yield from _leaves(item)
        elif isinstance(item, (tuple, list)):
            yield from _bounds(item)


def _is_mask(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _is_whole(value: object) -> bool:
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _split(tensor: Tensor, split_size_or_sections: object = None, dim: int = 0, *, split_size: object = None) -> int:
    size = split_size if split_size_or_sections is None else split_size_or_sections
    return tensor.shape[dim] // max(size, 1) if isinstance(size, int) else len(cast(Sequence[int], size))


_COUNTS: Mapping[str, Callable[..., int]] = {
    "unbind": lambda tensor, dim=0: tensor.shape[dim],
    "split": _split,
    "chunk": lambda _tensor, chunks, _dim=0, **_: chunks,
}
_PIECES: Mapping[Callable[..., object], Callable[..., int]] = {
    place[prefix + name]: count
    for name, count in _COUNTS.items()
    for place, prefix in ((FUNCTIONS, "torch."), (METHODS, ""))
}
"""How many pieces each function makes of a tensor."""
_OF_MASKS = "eq ge gt le logical_and logical_or lt masked_fill ne where"
_BINARY = ("add", "div", "maximum", "minimum", "mul", "pow", "sub")
_OF_SEVERAL: Set[Callable[..., object]] = {
    *(FUNCTIONS[f"torch.{name}"] for name in (*_BINARY, "cat", "concat", "max", "min", "stack")),
    *(METHODS[name] for name in (*_BINARY, "add_", "div_", "mul_", "sub_", "expand_as", "view_as", "max", "min")),
    FUNCTIONS["functional.scaled_dot_product_attention"],
    *(place[prefix + name] for place, prefix in ((FUNCTIONS, "torch."), (METHODS, "")) for name in _OF_MASKS.split()),
    *(METHODS[name] for name in ("masked_fill_", "type_as")),
    FUNCTIONS["torch.meshgrid"],
}
"""The functions that take whole numbers in tensors for what they are, and not as sizes."""
