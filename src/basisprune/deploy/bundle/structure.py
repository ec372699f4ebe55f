"""A network as data, and back: how its modules differ from a freshly built network, and its tensors by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import cast

import torch
from pydantic import JsonValue
from safetensors.torch import load
from torch import Tensor, nn

from basisprune.deploy.allowed import (
    CLASS_NAMES,
    CLASSES,
    INTERNAL,
    LAYER_ATTRIBUTES,
    OURS,
    check_arguments,
    is_taken,
    may_alias,
    may_be_set,
)
from basisprune.deploy.bundle.config import Node, TensorFacts, check_names, decode, encode, is_plain
from basisprune.deploy.bundle.limits import Bounded
from basisprune.deploy.comparing import alike
from basisprune.errors import BundleError, LayerError
from basisprune.torchkit.surgery import TORCH_CONVS, find_layers, module_at, named_tensors

_MOST_PARTS = 100_000
_MOST_NODES = 30_000  # that are built, or taken from the architecture
_MOST_OPERATIONS, _MOST_IN_ALL = 2_000, 50_000  # to construct one layer, and all; timm's largest networks take 10,000


def describe(model: nn.Module, fresh: nn.Module | None = None) -> Node:
    """Return how the model's modules differ from those of `fresh`, or all of them if there is none, without weights.

    Raises LayerError for a module that is neither in `fresh` nor of a class that a bundle may name.

    >>> describe(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Identity()), nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()))
    {'children': {'0': {'attributes': {'out_channels': 4}}, '1': {'class': 'torch.nn.Identity'}}}
    """
    return _Describer(fresh).node(model, fresh, "")


def rebuild(node: Node, fresh: nn.Module | None = None) -> nn.Module:
    """Return the network that `describe` saw, with any weights, on the modules of `fresh`, which is used up.

    Raises BundleError if the node does not fit.
    """
    try:
        return _Rebuilder(fresh).module(node, fresh, "")
    except BundleError:
        raise
    except Exception as error:  # constructors and attributes that do not go together fail in many ways
        raise BundleError(f"its structure does not fit the architecture ({type(error).__name__}: {error})") from error


def is_described(module: nn.Module) -> bool:
    """Whether a description, from which attributes that are not plain values are missing, is all of the module."""
    try:
        again = rebuild(describe(module))
    except (LayerError, BundleError):
        return False
    return all(
        _odd_attributes(one) == _odd_attributes(other)
        for one, other in zip(module.modules(), again.modules(), strict=True)
    )


class _Describer:
    def __init__(self, fresh: nn.Module | None) -> None:
        self.fresh = dict(fresh.named_modules()) if fresh is not None else {}
        self.paths: dict[nn.Module, str] = {}
        self.bases: dict[nn.Module, nn.Module] = {}  # model's module -> what it is described from
        self.used: set[nn.Module] = set()

    def node(self, module: nn.Module, fresh: nn.Module | None, path: str) -> Node:
        if module in self.paths:
            return {} if self.bases[module] is fresh else {"same": self.paths[module]}
        node: Node = {}
        base = fresh
        if base is None or not self._may_start(module, base):
            base, node = self._start(module, path)
        self.paths[module], self.bases[module] = path, base
        self.used.add(base)
        node |= _own_differences(module, base)
        children: dict[str, Node | None] = {}
        for name, child in module._modules.items():
            if child is None:
                if base._modules.get(name) is not None:
                    children[name] = None
                continue
            inner = self.node(child, _fresh_child(base, name, fresh), f"{path}.{name}" if path else name)
            if inner:
                children[name] = inner
        return node | ({"children": children} if children else {})

    def _may_start(self, module: nn.Module, base: nn.Module) -> bool:
        return type(module) is type(base) and base not in self.used

    def _start(self, module: nn.Module, path: str) -> tuple[nn.Module, Node]:
        """A module to describe this one from, and the node that leads to it."""
        name, args = CLASS_NAMES.get(type(module)), _arguments(module)
        if name is not None and args is not None:
            try:
                return _construct(name, args)[0], {"class": name, **({"args": args} if args else {})}
            except (TypeError, ValueError, RuntimeError):
                pass  # its constructor wants more than its attributes tell
        for taken, base in self.fresh.items():
            if self._may_start(module, base):
                return base, {"take": taken}
        raise LayerError(
            path,
            f"{type(module).__name__} is neither in the architecture that is rebuilt nor of a class of torch.nn; "
            "pass factory='package.module:function' (or a timm name), which builds this network (or its backbone)",
        )


class _Rebuilder:
    def __init__(self, fresh: nn.Module | None) -> None:
        self.fresh = dict(fresh.named_modules()) if fresh is not None else {}
        self.done: dict[str, nn.Module] = {}
        self.nodes = self.operations = 0
        self.parts: dict[nn.Module, int] = {}  # the modules in each that is built, those met again counted again

    def module(self, node: Node, fresh: nn.Module | None, path: str) -> nn.Module:
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            raise BundleError(f"its network has more than {_MOST_NODES:,} parts of their own")
        base = self._start(node, fresh)
        if base is None:
            raise BundleError(f"{path or 'structure'}: the architecture has no such module")
        if self.parts.get(base) == 0:
            raise BundleError(f"{path}: is inside itself")
        if "same" in node:
            return base
        self.done[path], self.parts[base] = base, 0
        _apply_own(base, node)
        built = self._children(node, base, fresh, path)
        base._modules.clear()
        for name, child in built.items():
            _refuse_taken(base, name)
            base._modules[name] = child
        if (layer := built.get(node.get("answers", ""))) is not None:
            for name in filter(vars(layer).__contains__, LAYER_ATTRIBUTES):
                if not may_be_set(base, name, value := vars(layer)[name]):
                    raise BundleError(f"a {type(base).__name__} cannot answer for a layer in it")
                vars(base)[name] = value
        # A module may be met again as often as one likes, and what walks a network meets it as often.
        self.parts[base] = 1 + sum(self.parts[child] for child in base._modules.values() if child is not None)
        if self.parts[base] > _MOST_PARTS:
            raise BundleError(f"its network has more than {_MOST_PARTS:,} parts")
        return base

    def _children(self, node: Node, base: nn.Module, fresh: nn.Module | None, path: str) -> dict[str, nn.Module | None]:
        children = node.get("children", {})
        order = node.get("order", list(base._modules))
        if unknown := children.keys() - set(order):
            raise BundleError(f"{path}: the architecture has no children {sorted(unknown)}")
        if len(set(order)) < len(order):
            raise BundleError(f"{path}: names a child twice")
        built: dict[str, nn.Module | None] = {}
        for name in order:
            start, inner = _fresh_child(base, name, fresh), children.get(name, Node())
            is_empty = inner is None or (name in base._modules and start is None and not inner)
            built[name] = None if is_empty else self.module(inner or Node(), start, f"{path}.{name}" if path else name)
        return built

    def _start(self, node: Node, fresh: nn.Module | None) -> nn.Module | None:
        """The module that the node describes changes of."""
        if "same" in node:
            return self.done.get(node["same"])
        if "class" in node:
            layer, operations = _construct(node["class"], node.get("args", {}))
            self.operations += operations
            if self.operations > _MOST_IN_ALL:
                raise BundleError(f"its network takes more than {_MOST_IN_ALL:,} operations to build")
            return layer
        return self.fresh.get(node["take"]) if "take" in node else fresh


def _fresh_child(base: nn.Module, name: str, fresh: nn.Module | None) -> nn.Module | None:
    """The module of the fresh network that a child is described from; for a basis it is the conv it came from."""
    takes_place = base is not fresh and isinstance(fresh, (*TORCH_CONVS, nn.Linear))
    return fresh if takes_place and name == "basis" else base._modules.get(name)


def _own_differences(module: nn.Module, base: nn.Module) -> Node:
    known, held = _plain_attributes(base), _held(base)
    changed = {
        name: value
        for name, value in _plain_attributes(module).items()
        if known.get(name, ...) != value and may_be_set(base, name, vars(module)[name])
    }
    differences = {key: value for key, value in _held(module).items() if value != held[key]}
    return cast(Node, ({"attributes": changed} if changed else {}) | differences)


def _held(module: nn.Module) -> dict[str, object]:
    """The names of what the module holds; which parameters and buffers are there, and which buffers are persistent."""
    hidden, buffers = module._non_persistent_buffers_set, module._buffers.items()
    return {
        "parameters": {name: value is not None for name, value in module._parameters.items()},
        "buffers": {name: (value is not None, name not in hidden) for name, value in buffers},
        "order": list(module._modules),
    }


def _apply_own(module: nn.Module, node: Node) -> None:
    for name, coded in node.get("attributes", {}).items():
        value = decode(coded)
        if may_be_set(module, name, value):
            vars(module)[name] = value
        elif is_taken(module, name):  # what no class knows, and older versions noted, is not set
            raise BundleError(f"attribute {name!r} is not one that a bundle may set to {str(value)[:80]!r}")
    if "parameters" in node:
        module._parameters.clear()
        for name, there in node["parameters"].items():
            _refuse_taken(module, name)
            module._parameters[name] = nn.Parameter(torch.empty(0, device="meta")) if there else None
    if "buffers" in node:
        module._buffers.clear()
        module._non_persistent_buffers_set.clear()
        for name, (there, persistent) in node["buffers"].items():
            _refuse_taken(module, name)
            module._buffers[name] = torch.empty(0, device="meta") if there else None
            module._non_persistent_buffers_set.update(() if persistent else (name,))


def _refuse_taken(module: nn.Module, name: str) -> None:
    if is_taken(module, name) or any(name in held for held in (module._parameters, module._buffers, module._modules)):
        raise BundleError(f"{name}: a {type(module).__name__} has something else by that name")


def _arguments(module: nn.Module) -> dict[str, JsonValue] | None:
    """What the module's constructor was given, as far as its attributes tell; None if they do not."""
    args: dict[str, JsonValue] = {}
    if type(module) in OURS:
        return args
    for parameter in inspect.signature(type(module)).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in ("device", "dtype"):
            continue
        value, default = getattr(module, parameter.name, ...), parameter.default
        if parameter.name == "bias":
            value = value is not None
        if not is_plain(value):
            if default is parameter.empty:
                return None
        elif isinstance(value, tuple) and isinstance(default, int):  # convs make (1, 1) of a stride of 1
            if set(value) != {default}:  # another constructor may not: then the attribute is noted as a difference
                args[parameter.name] = encode(value)
        elif value != default or type(value) is not type(default):
            args[parameter.name] = encode(value)
    return args


def _construct(name: str, args: Mapping[str, JsonValue]) -> tuple[nn.Module, int]:
    """A module of the class, without memory for its weights, and what it took; of our own classes an empty shell."""
    kind = CLASSES.get(name)
    if kind is None:
        raise BundleError(f"{name[:80]!r} is not a class that a bundle may name; allowed are listed layers only")
    given = {key: decode(value) for key, value in args.items()}
    check_arguments(name, given)
    if kind in OURS:
        hollow = kind.__new__(kind)
        nn.Module.__init__(hollow)
        return hollow, 0
    with torch.device("meta"), Bounded(_MOST_OPERATIONS) as bounded:
        return kind(**given), bounded.operations


def _plain_attributes(module: nn.Module) -> dict[str, JsonValue]:
    return {name: encode(value) for name, value in vars(module).items() if name not in INTERNAL and is_plain(value)}


def _odd_attributes(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in INTERNAL and not is_plain(value) and not isinstance(value, Tensor)
    }


# ---------------------------------------------------------------------------------------------- tensors


def collect_tensors(model: nn.Module, fresh: nn.Module | None) -> tuple[dict[str, Tensor], TensorFacts]:
    """Return each tensor under its first name, contiguous, and what safetensors does not keep of them.

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
        if name not in lasting and name in made and alike(tensor, made[name]):
            continue
        if id(tensor) in first:
            shared[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        _refuse_nan(name, tensor)
        is_last, plain = _is_channels_last(tensor), tensor.detach()
        tensors[name] = plain.clone(memory_format=torch.contiguous_format) if is_last else plain.contiguous()
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            frozen.append(name)
        if is_last:
            channels_last.append(name)
    is_frozen = not any(parameter.requires_grad for parameter in model.parameters())
    facts = TensorFacts(shared, "all" if is_frozen else frozen, channels_last, _aliases(model, first))
    seen: set[int] = set()
    for name, tensor in tensors.items():  # safetensors does not take two that lie in one memory
        pointer = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if pointer in seen else tensor
        seen.add(pointer)
    return tensors, facts


def _aliases(model: nn.Module, first: dict[int, str]) -> dict[str, str]:
    """Plain attributes that are a module's parameter, and which: `.name` is that of one inside the same module."""
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) in first:
                origin = first[id(value)]
                inside = path and origin.startswith(f"{path}.")
                found[f"{path}.{name}" if path else name] = origin.removeprefix(path) if inside else origin
    return found


def read_tensors(content: bytes) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file; raises BundleError for what cannot be read, named or used."""
    try:
        tensors = load(content)
    except Exception as error:  # a damaged header fails in many ways
        raise BundleError(f"cannot be read ({type(error).__name__}: {error}); fetch it again") from error
    check_names(tensors)
    for name, tensor in tensors.items():
        _refuse_nan(name, tensor)
    return tensors


def assign_tensors(model: nn.Module, tensors: dict[str, Tensor], facts: TensorFacts) -> None:
    """Give the network the tensors, in place; raises BundleError that names what is missing or too many."""
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
