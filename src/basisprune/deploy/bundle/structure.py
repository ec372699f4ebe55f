"""A network's modules as JSON: how they differ from a freshly built network, and the way back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence

import torch
from pydantic import JsonValue
from torch import nn

from basisprune.deploy.bundle.config import Node
from basisprune.deploy.bundle.layers import (
    INTERNAL,
    NAMES,
    OURS,
    check_arguments,
    class_of,
    is_taken,
    may_be_set,
)
from basisprune.deploy.bundle.limits import Bounded
from basisprune.deploy.bundle.values import Plain, decode, encode, is_plain
from basisprune.deploy.folded import LAYER_ATTRIBUTES
from basisprune.errors import BundleError, LayerError
from basisprune.torchkit.surgery import TORCH_CONVS

_MOST_PARTS = 100_000
_MOST_NODES = 30_000  # that are built, or taken from the architecture
_MOST_OPERATIONS = 2_000  # to construct one layer


def describe(model: nn.Module, fresh: nn.Module | None = None) -> Node:
    """How the model's modules differ from those of `fresh`, or all of them if there is none; JSON values only.

    Weights are left out. Neither network is changed. Raises LayerError for a module that is neither in `fresh`
    nor of a class that a bundle may name.

    >>> describe(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Identity()), nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()))
    {'children': {'0': {'attributes': {'out_channels': 4}}, '1': {'class': 'torch.nn.Identity'}}}
    """
    return _Describer(fresh).node(model, fresh, "")


def rebuild(node: Node, fresh: nn.Module | None = None) -> nn.Module:
    """The network that `describe` saw, on the modules of `fresh`, which is used up; weights are left as they are.

    Raises BundleError if the node does not fit.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU())
    >>> rebuild(describe(net))
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(1, 1), stride=(1, 1))
      (1): ReLU()
    )
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
        _shorten_answers(module, node)
        if list(module._modules) != list(base._modules):
            node["order"] = list(module._modules)
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
        name, args = NAMES.get(type(module)), _arguments(module)
        if name is not None and args is not None:
            try:
                return _construct(name, args), {"class": name, **({"args": args} if args else {})}
            except (TypeError, ValueError, RuntimeError):
                pass  # its constructor wants more than its attributes tell
        for taken, base in self.fresh.items():
            if self._may_start(module, base):
                return base, {"take": taken}
        raise LayerError(
            path,
            f"{type(module).__name__} is neither in the architecture that is built anew nor of a class of torch.nn; "
            "pass factory='package.module:function' (or a timm name), which builds this network (or its backbone)",
        )


class _Rebuilder:
    def __init__(self, fresh: nn.Module | None) -> None:
        self.fresh = dict(fresh.named_modules()) if fresh is not None else {}
        self.done: dict[str, nn.Module] = {}
        self.nodes = 0
        self.parts: dict[nn.Module, int] = {}  # the modules in each that is built, those met again counted again

    def module(self, node: Node, fresh: nn.Module | None, path: str) -> nn.Module:
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            raise BundleError(f"its network has more than {_MOST_NODES:,} parts of their own")
        base = self._start(node, fresh)
        if base is None:
            raise BundleError(f"{path or 'structure'}: the architecture has no such module")
        if "same" in node:
            return base
        if self.parts.get(base) == 0:
            raise BundleError(f"{path}: is inside itself")
        self.done[path], self.parts[base] = base, 0
        _apply_own(base, node)
        children = node.get("children", {})
        order = node.get("order", list(base._modules))
        _check_order(order, children, path)
        built: dict[str, nn.Module | None] = {}
        for name in order:
            start = _fresh_child(base, name, fresh)
            inner = children.get(name, Node())
            if inner is None or (name in base._modules and start is None and not inner):
                built[name] = None
            else:
                built[name] = self.module(inner, start, f"{path}.{name}" if path else name)
        base._modules.clear()
        for name, child in built.items():
            _refuse_taken(base, name)
            base._modules[name] = child
        if "answers" in node:
            _answer(base, built.get(node["answers"]))
        self._count(base)
        return base

    def _start(self, node: Node, fresh: nn.Module | None) -> nn.Module | None:
        """The module that the node describes changes of."""
        if "same" in node:
            earlier = self.done.get(node["same"])
            if earlier is not None and self.parts[earlier] == 0:
                raise BundleError(f"{node['same']}: is inside itself")
            return earlier
        if "class" in node:
            return _construct(node["class"], node.get("args", {}))
        return self.fresh.get(node["take"]) if "take" in node else fresh

    def _count(self, base: nn.Module) -> None:
        # A module may be met again as often as one likes, and what walks a network meets it as often.
        self.parts[base] = 1 + sum(self.parts[child] for child in base._modules.values() if child is not None)
        if self.parts[base] > _MOST_PARTS:
            raise BundleError(f"its network has more than {_MOST_PARTS:,} parts")


def _check_order(order: Sequence[str], children: Mapping[str, object], path: str) -> None:
    if unknown := children.keys() - set(order):
        raise BundleError(f"{path}: the architecture has no children {sorted(unknown)}")
    if len(set(order)) < len(order):
        raise BundleError(f"{path}: names a child twice")


def _fresh_child(base: nn.Module, name: str, fresh: nn.Module | None) -> nn.Module | None:
    """The module of the fresh network that a child is described from; for a basis it is the conv it came from."""
    takes_place = base is not fresh and isinstance(fresh, (*TORCH_CONVS, nn.Linear))
    return fresh if takes_place and name == "basis" else base._modules.get(name)


def _own_differences(module: nn.Module, base: nn.Module) -> Node:
    node: Node = {}
    known = _plain_attributes(base)
    changed = {
        name: value
        for name, value in _plain_attributes(module).items()
        if known.get(name, ...) != value and may_be_set(base, name, vars(module)[name])
    }
    if changed:
        node["attributes"] = changed
    if (parameters := _parameter_names(module)) != _parameter_names(base):
        node["parameters"] = parameters
    if (buffers := _buffer_names(module)) != _buffer_names(base):
        node["buffers"] = buffers
    return node


def _shorten_answers(module: nn.Module, node: Node) -> None:
    """Notes the attributes that a container has like one of the layers in it by that layer's name alone."""
    for name, child in module.named_children():
        likes = _layer_attributes(child)
        if likes and likes.items() <= vars(module).items() and likes.keys() <= node.get("attributes", {}).keys():
            node["answers"] = name
            node["attributes"] = {key: value for key, value in node["attributes"].items() if key not in likes}
            return


def _layer_attributes(layer: nn.Module) -> dict[str, object]:
    return {name: vars(layer)[name] for name in LAYER_ATTRIBUTES if name in vars(layer)}


def _answer(container: nn.Module, layer: nn.Module | None) -> None:
    """Gives a container the attributes of the layer in it that it answers for."""
    for name, value in ({} if layer is None else _layer_attributes(layer)).items():
        if not may_be_set(container, name, value):
            raise BundleError(f"a {type(container).__name__} cannot answer for a layer in it")
        vars(container)[name] = value


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
            module._parameters[name] = _unset_parameter(there)
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


def _unset_parameter(there: bool) -> nn.Parameter | None:
    return nn.Parameter(torch.empty(0, device="meta")) if there else None


def _parameter_names(module: nn.Module) -> dict[str, bool]:
    """The module's own parameters, and which are there."""
    return {name: value is not None for name, value in module._parameters.items()}


def _buffer_names(module: nn.Module) -> dict[str, tuple[bool, bool]]:
    """The module's own buffers: which are there, and which are persistent."""
    hidden = module._non_persistent_buffers_set
    return {name: (value is not None, name not in hidden) for name, value in module._buffers.items()}


def _arguments(module: nn.Module) -> dict[str, JsonValue] | None:
    """What the module's constructor was given, as far as its attributes tell; None if they do not."""
    args: dict[str, JsonValue] = {}
    if type(module) in OURS:
        return args
    for parameter in inspect.signature(type(module)).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or parameter.name in ("device", "dtype"):
            continue
        value = getattr(module, parameter.name, ...)
        if parameter.name == "bias":
            value = value is not None
        if is_plain(value):
            if not _is_default(value, parameter.default):
                args[parameter.name] = encode(value)
        elif parameter.default is parameter.empty:
            return None
    return args


def _is_default(value: Plain, default: object) -> bool:
    """Whether the value is what a constructor makes of its default: convs make (1, 1) of a stride of 1.

    Where another constructor does not, the attribute differs from that of the module built, and is noted there.
    """
    if isinstance(value, tuple) and isinstance(default, int):
        return set(value) == {default}
    return bool(value == default) and type(value) is type(default)


def _construct(name: str, args: Mapping[str, JsonValue]) -> nn.Module:
    """A module of the class, without memory for its weights; of our own classes a shell without attributes."""
    kind = class_of(name)
    given = {key: decode(value) for key, value in args.items()}
    check_arguments(name, given)
    if kind in OURS:
        hollow = kind.__new__(kind)
        nn.Module.__init__(hollow)
        return hollow
    with torch.device("meta"), Bounded(_MOST_OPERATIONS):
        return kind(**given)


def _plain_attributes(module: nn.Module) -> dict[str, JsonValue]:
    return {name: encode(value) for name, value in vars(module).items() if name not in INTERNAL and is_plain(value)}


def _odd_attributes(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if name not in INTERNAL and not is_plain(value) and not isinstance(value, torch.Tensor)
    }
