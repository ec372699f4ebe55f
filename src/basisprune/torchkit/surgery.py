"""Find and replace modules by dotted name; clone a conv with every attribute."""

from __future__ import annotations

import copy
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cache
from typing import TypeAlias, TypeVar

import torch
from timm.layers import Conv2dSame
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from basisprune.errors import LayerError, ModelError, pass_on
from basisprune.torchkit.running import mode, relative_difference

Conv: TypeAlias = nn.modules.conv._ConvNd
"""Torch's convs: 1d, 2d or 3d, transposed or not."""

TORCH_CONVS: tuple[type[Conv], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
Layer: TypeAlias = Conv | nn.Linear
"""What can be decomposed."""

_PLAIN: tuple[type[Conv], ...] = (*TORCH_CONVS, Conv2dSame)

_OTHER_NORMS = frozenset({"frn", "abn", "inplaceabn", "inplaceabnsync"})

Kind = TypeVar("Kind", bound=nn.Module)
LayerPatterns: TypeAlias = str | nn.Module | Iterable[str | nn.Module]
"""Layers given as modules, dotted names, or shell patterns such as `"layer1.*"`."""


def find_layers(
    model: nn.Module, kinds: type[Kind] | tuple[type[Kind], ...], *, opaque: type[nn.Module] | tuple[()] = ()
) -> Iterator[tuple[str, Kind]]:
    """Each module of these kinds, once, under its first dotted name; nothing inside `opaque` modules."""
    hidden: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in hidden:
            continue
        if isinstance(module, opaque):
            hidden.update(map(id, module.modules()))
        if isinstance(module, kinds):
            yield name, module


def is_depthwise(conv: Conv) -> bool:
    """Whether each group reads a single channel: such a conv has no factor smaller than itself."""
    return conv.groups > 1 and conv.in_channels == conv.groups


def is_transposed(layer: Layer) -> bool:
    """Whether the layer is a transposed conv, whose weight has the inputs first."""
    return not isinstance(layer, nn.Linear) and layer.transposed


def is_plain(layer: nn.Module) -> bool:
    """Whether the layer is one of torch's convs or linear layers, and computes with its weight as it is."""
    return type(layer) in (*_PLAIN, nn.Linear) and not is_parametrized(layer)


def output_channels(layer: Layer) -> int:
    """How many channels, or features, the layer outputs."""
    return layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels


def has_channels_last(layer: nn.Module) -> bool:
    """Whether the layer's output has its channels on the last axis, as a linear one or half of one; convs on axis 1."""
    weight = getattr(layer, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 2


def is_norm(module: nn.Module) -> bool:
    """Whether the module is a norm layer, by its name; blocks such as `ConvNormAct` hold more than a norm."""
    name = type(module).__name__.lower()
    if isinstance(module, nn.LocalResponseNorm) or not ("norm" in name or name in _OTHER_NORMS):
        return False
    return not any(isinstance(part, (*TORCH_CONVS, nn.Linear)) for part in module.modules())


def replace_module(model: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Replace the module called `name` in place under every name it has; for the root, return the new one."""
    try:
        old = model.get_submodule(name)
    except AttributeError as error:
        raise ModelError(f"{name}: the model has no such module; see model.named_modules()") from error
    new.train(old.training)
    if old is model:
        return new
    for parent in list(model.modules()):
        for child_name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, child_name, new)
    return model


def match_layers(model: nn.Module, patterns: LayerPatterns) -> frozenset[str]:
    """Return the names of all modules that the patterns mean, and of all inside them; raise ModelError for none."""
    modules = dict(model.named_modules(remove_duplicate=False))
    if isinstance(patterns, str | nn.Module):
        patterns = [patterns]
    matched: set[str] = set()
    for pattern in patterns:
        if isinstance(pattern, nn.Module):
            found = {name for name, module in modules.items() if module is pattern}
        else:
            found = {name for name in modules if fnmatchcase(name, pattern)}
        if not found:
            raise ModelError(
                f"ignored_layers: {pattern!r} matches no module of {type(model).__name__}; "
                "pass modules, dotted names as in model.named_modules(), or patterns such as 'layer1.*'"
            )
        matched |= {name for name in modules for top in found if not top or name == top or name.startswith(f"{top}.")}
    meant = {id(modules[name]) for name in matched}
    return frozenset(name for name, module in modules.items() if id(module) in meant)


def clone_conv(conv: Conv, weight: Tensor, bias: Tensor | None) -> Conv:
    """A conv with every attribute of `conv` but these weights, both frozen; its channel counts follow the weight."""
    clone = copy.deepcopy(conv)
    like = conv.weight
    outputs, inputs = (weight.shape[1], weight.shape[0]) if conv.transposed else weight.shape[:2]
    clone.weight = nn.Parameter(weight.to(like.device, like.dtype).contiguous(), requires_grad=False)
    clone.bias = None
    if bias is not None:
        clone.bias = nn.Parameter(bias.to(like.device, like.dtype).clone(), requires_grad=False)
    clone.out_channels = outputs * (conv.groups if conv.transposed else 1)
    clone.in_channels = inputs * (1 if conv.transposed else conv.groups)
    return clone


def make_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with copies of these weights, on their device and of their dtype, frozen."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return layer


def plain_conv(name: str, conv: Conv) -> Conv:
    """Return the conv itself if it convolves plainly with its weight, else a plain one that equals it on random input.

    A weight that is computed in forward is baked in. Raises LayerError for a conv without an equal, or with hooks.
    """
    if isinstance(conv, nn.modules.lazy.LazyModuleMixin):
        raise LayerError(name, "is a lazy conv without weights yet; run the model once before")
    refuse_hooks(name, conv)
    if type(conv) in _PLAIN:
        return conv
    with mode(conv, training=False):  # some parametrisations change their state in train mode
        try:
            for candidate in _plain_candidates(conv):
                if _same_function(conv, candidate):
                    return candidate
        except Exception as error:
            pass_on(error)
            raise LayerError(
                name, f"{type(conv).__name__} cannot be tried on one tensor ({error}); add it to ignored_layers"
            ) from error
    raise LayerError(
        name,
        f"{type(conv).__name__} does not compute a plain convolution; add it to ignored_layers, "
        "or replace it by a torch conv first",
    )


def plain_linear(name: str, layer: nn.Linear) -> nn.Linear:
    """The layer itself; raises LayerError if its forward is not the plain one on random input, or it has hooks."""
    refuse_hooks(name, layer)
    if type(layer) is nn.Linear:
        return layer
    probe = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(0)).to(layer.weight)
    with torch.no_grad(), mode(layer, training=False):
        if _same_values(layer(probe), F.linear(probe, layer.weight, layer.bias)):
            return layer
    raise LayerError(name, f"{type(layer).__name__} does not compute a plain linear layer; add it to ignored_layers")


def refuse_hooks(name: str, layer: nn.Module) -> None:
    """Raises LayerError for a layer with hooks, which a rewrite would lose."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    if any(getattr(layer, kind) for kind in kinds):
        raise LayerError(name, "has hooks, which a rewrite would lose; remove them, or add it to ignored_layers")


def _plain_candidates(conv: Conv) -> Iterator[Conv]:
    weight = _effective_weight(conv)
    if weight is None:
        return
    if weight is conv.weight:
        yield conv
        return
    bases = [base for base in type(conv).__mro__ if base in _PLAIN]
    for base in dict.fromkeys([*bases, *([Conv2dSame] if isinstance(conv, nn.Conv2d) else [])]):
        clone = copy.deepcopy(conv)
        bias = clone.bias
        clone.__class__ = base
        clone._parameters.clear()
        clone._modules.clear()
        for part, tensor in (("weight", weight), ("bias", bias)):
            wanted = getattr(conv, part)
            value = None if tensor is None else nn.Parameter(tensor.detach().clone(), wanted.requires_grad)
            clone.register_parameter(part, value)
        yield clone


_CONVOLUTIONS = frozenset(getattr(torch, f"conv{kind}{dims}d") for kind in ("", "_transpose") for dims in (1, 2, 3))


class _CatchConv(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def __torch_function__(
        self,
        func: Callable[..., object],
        _types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        weight = args[1] if len(args) > 1 else (kwargs or {}).get("weight")
        if func in _CONVOLUTIONS and isinstance(weight, Tensor):
            self.weights.append(weight)
        return func(*args, **(kwargs or {}))


def _probe(conv: Conv, extra: int = 0) -> Tensor:
    steps = zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)
    sizes = [d * (k - 1) + 2 * s + 3 + extra for k, s, d in steps]
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(2, conv.in_channels, *sizes, generator=generator)
    return probe.to(conv.weight.device, conv.weight.dtype)


@torch.no_grad()
def _effective_weight(conv: Conv) -> Tensor | None:
    """The weight that the conv's forward convolves with; None unless it convolves exactly once."""
    if is_parametrized(conv):
        return conv.weight.clone()
    catch = _CatchConv()
    with catch:
        conv(_probe(conv))
    return catch.weights[0] if len(catch.weights) == 1 else None


@torch.no_grad()
def _same_function(conv: Conv, candidate: Conv) -> bool:
    """Whether the candidate equals the conv, and a clone of it with other weights follows those weights.

    The other weights are sums of neighbouring filters, one less than before in each group: whatever comes
    behind the convolution, such as an activation or a gain, does not follow them.
    """
    summed = clone_conv(candidate, _neighbour_sums(candidate.weight, conv.groups, conv.transposed), None)
    for probe in (_probe(conv), _probe(conv, extra=1)):  # odd and even sizes, so that padding shows
        output = candidate(probe)
        if not _same_values(conv(probe), output):
            return False
        if candidate.bias is not None:
            output = output - candidate.bias.view(-1, *[1] * (probe.dim() - 2))
        if not _same_values(_neighbour_sums(output.transpose(0, 1), conv.groups, False), summed(probe).transpose(0, 1)):
            return False
    return True


def _neighbour_sums(values: Tensor, groups: int, transposed: bool) -> Tensor:
    """(c, *) -> (c - groups, *): each channel plus the next of its group; transposed weights have c on axis 1."""
    if transposed:
        return values[:, 1:] + values[:, :-1]
    grouped = values.unflatten(0, (groups, -1))
    sums: Tensor = grouped[:, 1:] + grouped[:, :-1]
    return sums.flatten(0, 1)


def _same_values(expected: Tensor, given: Tensor) -> bool:
    tolerance = 2e-3 if expected.dtype in (torch.float16, torch.bfloat16) else 2e-5
    return relative_difference(expected, given, least=1.0) <= tolerance


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by its dotted name; one that is used twice comes under each name."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def module_at(model: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module that these names lead to, by what modules hold and nothing else; LayerError if there is none."""
    home: nn.Module | None = model
    for name in path:
        home = None if home is None else home._modules.get(name)
    if home is None:
        raise LayerError(".".join(path), "the network has no such module")
    return home


def tensor_at(model: nn.Module, path: Sequence[str]) -> Tensor:
    """The parameter or buffer that these names lead to; raises LayerError if there is none."""
    home, leaf = module_at(model, path[:-1]), path[-1]
    for held in (home._parameters, home._buffers):
        if (tensor := held.get(leaf)) is not None:
            return tensor
    raise LayerError(".".join(path), "the network has no such parameter or buffer")


def refuse_hidden_names(model: nn.Module) -> None:
    """Raise LayerError if an attribute of a module is not what the module holds under that name.

    torch and the code that it generates find modules and tensors as attributes, and would find something else where a
    name is held twice, stands in the instance or its class, or is read as another one in source (PEP 3131).
    """
    for path, module in model.named_modules():
        held = [*module._modules, *module._parameters, *module._buffers]
        known = _attributes(module) | (_attributes(_compiled_graph()) if isinstance(module, fx.GraphModule) else set())
        for name in held:
            if name in known or unicodedata.normalize("NFKC", name) != name:
                raise LayerError(
                    f"{path}.{name}" if path else name,
                    f"{type(module).__name__} has something else of this name; rename this part of the network",
                )
            known.add(name)


def _attributes(module: nn.Module) -> set[str]:
    return {*vars(module), *(name for kind in type(module).__mro__ for name in vars(kind))}


@cache
def _compiled_graph() -> fx.GraphModule:
    """A graph as torch compiles it, which gives its instance and its class more names."""
    graph = fx.Graph()
    graph.output(graph.placeholder("x"))
    return fx.GraphModule(nn.Module(), graph)


def model_heads(model: nn.Module) -> list[nn.Module]:
    """What the model names as its classifier: its `classifier`, or what timm's `get_classifier` gives; else nothing."""
    found = getattr(model, "classifier", None)
    if not isinstance(found, nn.Module) and callable(named := getattr(model, "get_classifier", None)):
        found = named()
    several = found if isinstance(found, tuple | list) else [found]  # networks that learn from a teacher have two
    return [head for head in several if isinstance(head, nn.Module)]
