"""A network's tensors to a flat dict and back, with what safetensors does not keep beside them."""

from __future__ import annotations

import torch
from safetensors.torch import load
from torch import Tensor, nn

from basisprune.deploy.bundle.config import TensorFacts, check_names
from basisprune.deploy.bundle.layers import may_alias
from basisprune.errors import BundleError, LayerError
from basisprune.torchkit.surgery import find_layers, module_at, named_tensors


def collect_tensors(model: nn.Module, fresh: nn.Module | None) -> tuple[dict[str, Tensor], TensorFacts]:
    """Each tensor under its first name, contiguous; and their other names, layouts, and which are frozen.

    Buffers that `fresh`, or any new norm, makes anyway, bit for bit, and that are no part of a state dict are left
    out. Raises BundleError for a tensor with NaN in it.
    """
    made = (dict(named_tensors(fresh)) if fresh is not None else {}) | _new_statistics(model)
    lasting = set(model.state_dict(keep_vars=True))
    first: dict[int, str] = {}
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    frozen: list[str] = []
    channels_last: list[str] = []
    for name, tensor in named_tensors(model):
        if name not in lasting and name in made and _identical(tensor, made[name]):
            continue
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        _refuse_nan(name, tensor)
        tensors[name] = _usual(tensor.detach())
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            frozen.append(name)
        if _is_channels_last(tensor):
            channels_last.append(name)
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
    facts = TensorFacts(shared, "all" if is_frozen else frozen, channels_last, _aliases(model, first))
    return _unaliased(tensors), facts


def _aliases(model: nn.Module, first: dict[int, str]) -> dict[str, str]:
    """Plain attributes that are somebody's parameter, and whose: `.name` is that of one inside the same module."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) in first:
                origin = first[id(value)]
                inside = path and origin.startswith(f"{path}.")
                found[f"{path}.{name}" if path else name] = origin.removeprefix(path) if inside else origin
    return found


def read_tensors(content: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name; raises BundleError for what cannot be read, named or used."""
    try:
        tensors = load(content)
    except Exception as error:  # a damaged header fails in many ways
        raise BundleError(f"cannot be read ({type(error).__name__}: {error}); fetch it again") from error
    check_names(tensors)
    for name, tensor in tensors.items():
        _refuse_nan(name, tensor)
    return tensors


def assign_tensors(model: nn.Module, tensors: dict[str, Tensor], facts: TensorFacts) -> None:
    """Gives the network the tensors, in place; raises BundleError that names what is missing or too many."""
    shared, channels_last = facts.shared, set(facts.channels_last)
    frozen = set(tensors if facts.frozen == "all" else facts.frozen)
    given: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name in channels_last:
            tensor = torch.empty_like(tensor, memory_format=torch.channels_last).copy_(tensor)
        is_parameter = name.rpartition(".")[2] in _home(model, name)._parameters
        given[name] = nn.Parameter(tensor, requires_grad=name not in frozen) if is_parameter else tensor
    for name, tensor in {**given, **{name: _of(given, origin) for name, origin in shared.items()}}.items():
        _put(model, name, tensor)
    for name, tensor in _new_statistics(model).items():
        if name not in given and name not in shared:
            _put(model, name, tensor)
    for name, origin in facts.aliases.items():
        path, _, leaf = name.rpartition(".")
        if not may_alias(home := _home(model, name), leaf):
            raise BundleError(f"{name}: is not an attribute that a bundle may set")
        vars(home)[leaf] = _of(given, path + origin if origin.startswith(".") else origin)
    lasting = set(model.state_dict(keep_vars=True))
    left = ((name, tensor) for name, tensor in named_tensors(model) if name not in given and name not in shared)
    unset = [name for name, tensor in left if name in lasting or tensor.is_meta]
    if unset:
        raise BundleError(f"{len(unset)} tensors of the network are missing, first {unset[0]}")


def _new_statistics(model: nn.Module) -> dict[str, Tensor]:
    """The running statistics of norms which have no place in a state dict, as any new norm has them."""
    return {
        f"{path}.{leaf}" if path else leaf: torch.full_like(norm.weight, value, requires_grad=False)
        for path, norm in find_layers(model, nn.modules.batchnorm._BatchNorm)
        for leaf, value in (("running_mean", 0), ("running_var", 1))
        if leaf in norm._non_persistent_buffers_set and norm._buffers[leaf] is not None and norm.weight is not None
    }


def _of(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise BundleError(f"{name}: there is no such tensor")
    return tensors[name]


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    home, leaf = _home(model, name), name.rpartition(".")[2]
    for place in (home._parameters, home._buffers):
        if place.get(leaf) is not None:
            place[leaf] = tensor  # type: ignore[assignment]
            return
    raise BundleError(f"{name}: the architecture has no such tensor")


def _home(model: nn.Module, name: str) -> nn.Module:
    try:
        return module_at(model, name.split(".")[:-1])
    except LayerError as error:
        raise BundleError(f"{name}: the architecture has no such tensor") from error


def _refuse_nan(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and bool(tensor.isnan().any()):
        raise BundleError(f"{name}: holds NaN; a network like that is neither saved nor loaded")


def _is_channels_last(tensor: Tensor) -> bool:
    """Whether the strides are just those of channels_last, which `is_contiguous` cannot tell for 1x1 kernels."""
    if tensor.dim() != 4:
        return False
    usual, last = (
        torch.empty(tensor.shape, device="meta", memory_format=order).stride()
        for order in (torch.contiguous_format, torch.channels_last)
    )
    return last == tensor.stride() != usual


def _usual(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format) if _is_channels_last(tensor) else tensor.contiguous()


def _identical(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


def _unaliased(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where two lie in one memory, which safetensors does not take."""
    seen: set[int] = set()
    result = {}
    for name, tensor in tensors.items():
        pointer = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return result
