"""Training form -> inference form: numerically the same, in plain PyTorch."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
from timm.layers import Conv2dSame, DropBlock2d, DropPath
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from basisprune.basis.decompose import merge_pair
from basisprune.basis.factors import full_rank
from basisprune.basis.layers import BasisPair, Shift
from basisprune.deploy.comparing import difference
from basisprune.deploy.forms import (
    PLAIN,
    BatchNorm,
    affine,
    answer_like,
    drop_statistics,
    merged,
    plain_layers,
    plain_pair,
    subsampled,
    table_seconds,
)
from basisprune.deploy.latency import Backend, LayerTimer, in_channels_last, interleaved, onnx_layer_seconds
from basisprune.deploy.tracing import trace
from basisprune.errors import ConfigError, LayerError, ModelError
from basisprune.layer_times import TimeTable
from basisprune.torchkit.running import hooked, mode, refuse_lazy, relative_difference, tensors_in
from basisprune.torchkit.surgery import Layer, find_layers, output_channels, refuse_hooks, replace_module
from basisprune.torchkit.watching import Dataflow, LayerCall, dataflow_of, example_input
from basisprune.transfer.body import NormedConv
from basisprune.transfer.model import KeptModel, TransferModel
from basisprune.transfer.several import SeveralInputs
from basisprune.types import InputSpec

Preference: TypeAlias = Literal["macs", "params", "latency", "none"]

LAYERS: tuple[type[Layer | BasisPair], ...] = (*PLAIN, BasisPair)

_PLAIN_LAYERS = (*LAYERS, Conv2dSame)
_DROPOUTS = (nn.modules.dropout._DropoutNd, DropPath, DropBlock2d, StochasticDepth)
_ROUNDS = 15
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3, torch.float16: 3e-2}
_TIGHT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3}


def fold(
    model: nn.Module,
    example_inputs: Tensor | tuple[Tensor, ...],
    prefer: Preference = "macs",
    *,
    runtime: Backend = "eager",
    times: TimeTable | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Return the model as it is best used: plain modules, frozen, in eval mode, with the same output.

    Scales go into the weights behind them; a batch norm goes into the layer before it, where a run on `example_inputs`
    shows that nothing else reads that layer's output; any other norm keeps a weight and a bias alone; dropout goes.
    Each pair becomes two plain layers or the one dense layer it stands for, whichever is cheaper. A `TransferModel` or
    `KeptModel` becomes a `torch.fx.GraphModule` with the same names inside, which knows its `input_spec` and `classes`
    and needs only torch and the package its blocks come from. The outputs are always compared.

    Args:
        model: The network; it is changed only if `inplace`.
        example_inputs: What to run it on; its memory format counts for `prefer="latency"`.
        prefer: What a pair is to save: "macs", "params", "latency", or "none" to keep all pairs.
        runtime: Where to time the layers, each at its own input size, for "latency".
        times: A table of a device's latencies, which takes the place of timing here.
        inplace: Whether to use the model up.

    Raises:
        LayerError: The outputs differ; it names the first layer that does. Or a network cannot be traced.
        ModelError: The network has lazy layers, or outputs NaN.

    >>> from basisprune.basis.decompose import decompose
    >>> net = nn.Sequential(decompose(nn.Conv2d(3, 8, 3)), nn.BatchNorm2d(8), nn.Dropout(0.5)).eval()
    >>> fold(net, torch.ones(2, 3, 8, 8))
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): Identity()
      (2): Identity()
    )
    """
    options = {"prefer": (prefer, get_args(Preference)), "runtime": (runtime, get_args(Backend))}
    if faults := [
        f"{name}: {got!r} given; allowed are {may}" for name, (got, may) in options.items() if got not in may
    ]:
        raise ConfigError.of("fold", faults)
    if times is not None and prefer != "latency":
        raise ConfigError(f"fold: times given with prefer={prefer!r}; they are for prefer='latency'")
    refuse_lazy(model, "fold")
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    original = copy.deepcopy(model) if inplace else model
    result = merge_shifts((model if inplace else copy.deepcopy(model)).eval(), inputs)
    layers = dict(find_layers(original, LAYERS, opaque=BasisPair))
    run = dataflow_of(original, inputs, layers, dict(find_layers(original, BatchNorm)))
    norms = foldable_norms(result, run)
    choices = _choices(result, run, norms, prefer, by_table=times is not None)
    if prefer != "latency":
        chosen = _cheapest(choices, run, prefer)
    elif times is not None:
        chosen = _by_table(choices, run, times)
    elif runtime == "eager":
        chosen = _fastest(choices, _eager_seconds(result, choices, norms, inputs))
    else:
        chosen = _fastest(choices, _onnx_seconds(choices, run))
    result = _assembled(result, chosen, norms)
    for _, norm in find_layers(result, BatchNorm):
        drop_statistics(norm)
    result = _plain_structure(result).requires_grad_(False).eval()
    _check_same(original, result, inputs, run, skip=norms)
    return result


def deploy(model: nn.Module, spec: InputSpec, classes: Sequence[str], times: TimeTable | None = None) -> nn.Module:
    """The model as it is deployed: folded, and knowing its classes if it has any.

    A split layer becomes whichever form is smaller or, with the `times` of a device, faster there.
    """
    example = example_input(model, spec.shape)
    folded = fold(model, example, "params") if times is None else fold(model, example, "latency", times=times)
    if classes:
        folded.classes = tuple(classes)  # type: ignore[assignment]
    return folded


def merge_full_rank(model: nn.Module, example_inputs: Tensor, times: TimeTable | None = None) -> nn.Module:
    """Return a copy with every pair of full rank that `deploy` would make one layer as that layer, frozen.

    Such a pair costs the same once it is deployed, and one layer trains faster. A pair without some of its basis
    vectors stays one even if it does not pay, so that these do not come back.

    >>> from basisprune.basis.decompose import decompose
    >>> merge_full_rank(decompose(nn.Conv2d(3, 8, 3)), torch.ones(2, 3, 8, 8))
    Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
    """
    layers = dict(find_layers(model, LAYERS, opaque=BasisPair))
    run = dataflow_of(model, (example_inputs,), layers, dict(find_layers(model, BatchNorm)))
    choices = _choices(model, run, {}, "params", by_table=times is not None)
    chosen = _cheapest(choices, run, "params") if times is None else _by_table(choices, run, times)
    result = copy.deepcopy(model)
    for name, pair in list(find_layers(result, BasisPair)):
        if isinstance(chosen[name], PLAIN) and pair.rank >= full_rank(pair.basis, pair.out_channels):
            result = replace_module(result, name, merge_pair(pair))
    return result


settle = merge_full_rank  # its deprecated name


def foldable_norms(model: nn.Module, run: Dataflow) -> dict[str, str]:
    """The batch norm that can go into each layer, by the layer's name."""
    found = {}
    for name, norm in find_layers(model, BatchNorm):
        source = next(iter(run.sources.get(name, [])), None)
        if source is None or affine(norm) is None:
            continue
        layer = model.get_submodule(source)
        # A linear layer has its features on the last axis, a norm reads them on axis 1.
        linear = isinstance(layer.basis if isinstance(layer, BasisPair) else layer, nn.Linear)
        on_features = not linear or all(len(call.shape) == 2 for call in run.calls[source])
        if type(layer) in _PLAIN_LAYERS and on_features and run.is_passage(source, name):
            found[source] = name
    return found


def _choices(
    model: nn.Module, run: Dataflow, norms: Mapping[str, str], prefer: Preference, *, by_table: bool
) -> dict[str, list[nn.Module]]:
    """The forms of each layer that does not stay as it is; raises LayerError where hooks would be lost."""
    choices = {}
    batch_norms = dict(find_layers(model, BatchNorm))
    for name, layer in find_layers(model, LAYERS, opaque=BasisPair):
        norm = batch_norms[norms[name]] if name in norms else None
        forms = _forms(layer, norm, run.calls.get(name, []), prefer)
        if prefer == "latency" and not by_table:
            forms += [other for form in forms if (other := subsampled(form)) is not None]
        if forms != [layer]:
            refuse_hooks(name, layer)
            choices[name] = forms
        if norm is not None:
            refuse_hooks(norms[name], norm)
    return choices


def _forms(
    layer: Layer | BasisPair, norm: BatchNorm | None, calls: list[LayerCall], prefer: Preference
) -> list[nn.Module]:
    # Extra arguments are for the first of two layers alone; of a linear layer that is not called, the weight is read.
    if (
        not isinstance(layer, BasisPair)
        or (layer.scaling.spatial_dims == 0 and not calls)
        or any(call.extra_arguments for call in calls)
    ):
        return [merged(layer, norm)]
    return [*([] if prefer == "none" else [merged(layer, norm)]), plain_pair(layer, norm)]


def _cheapest(choices: Mapping[str, list[nn.Module]], run: Dataflow, prefer: Preference) -> dict[str, nn.Module]:
    """The form of each layer with the fewest multiply-adds or parameters, the simplest one of equals."""
    return {name: min(forms, key=partial(_cost, prefer, run.calls.get(name, []))) for name, forms in choices.items()}


def _cost(prefer: Preference, calls: list[LayerCall], form: nn.Module) -> int:
    """The parameters or multiply-adds of one layer or of two in a row."""
    parts = list(plain_layers(form).values())
    if prefer == "params" or not calls:
        return sum(parameter.numel() for part in parts for parameter in part.parameters())
    return sum(part.weight.numel() * _places(part, call, parts[-1]) for part in parts for call in calls)


def _places(part: Layer, call: LayerCall, last: Layer) -> int:
    """At how many places the whole weight of a part is applied: those of its output, or input if transposed."""
    if not isinstance(part, nn.Linear) and part.transposed:
        return math.prod(call.shape) // part.in_channels
    return math.prod(call.output_shape) // output_channels(last)


def _assembled(model: nn.Module, layers: Mapping[str, nn.Module], norms: Mapping[str, str]) -> nn.Module:
    """The model with these layers, and without the norms that are in them; in place."""
    for name, layer in layers.items():
        model = replace_module(model, name, layer)
    for name in norms.values():
        model = replace_module(model, name, _behind_norm(model.get_submodule(name)))
    return model


def _by_table(choices: Mapping[str, list[nn.Module]], run: Dataflow, times: TimeTable) -> dict[str, nn.Module]:
    """The form of each layer that is fastest by the table; the smallest of those it does not know, as linear layers."""
    known = table_seconds(choices, run, times)
    return _cheapest(choices, run, "params") | _fastest({name: choices[name] for name in known}, known)


def _fastest(choices: Mapping[str, list[nn.Module]], seconds: Mapping[str, Sequence[float]]) -> dict[str, nn.Module]:
    """The form of each layer that takes the least time, the simplest one where nothing was timed."""
    return {
        name: forms[seconds[name].index(min(seconds[name]))] if name in seconds else forms[0]
        for name, forms in choices.items()
    }


@torch.inference_mode()
def _eager_seconds(
    model: nn.Module, choices: Mapping[str, list[nn.Module]], norms: Mapping[str, str], inputs: tuple[object, ...]
) -> dict[str, list[float]]:
    """How long each form of each layer takes, in runs of the whole model, so with caches as in use."""
    timers = []
    for index in range(max(map(len, choices.values()), default=0)):
        layers = {name: copy.deepcopy(forms[index % len(forms)]) for name, forms in choices.items()}
        variant = _assembled(copy.deepcopy(model), layers, norms)
        channels_last = any(isinstance(x, Tensor) and x.dim() == 4 and not x.is_contiguous() for x in inputs)
        variant = in_channels_last(variant) if channels_last else variant
        timers.append(LayerTimer(variant, choices))
    interleaved({str(i): partial(timer.run, *inputs) for i, timer in enumerate(timers)}, repeats=_ROUNDS)
    return {name: [timers[index].seconds(name) for index in range(len(forms))] for name, forms in choices.items()}


def _onnx_seconds(choices: Mapping[str, list[nn.Module]], run: Dataflow) -> dict[str, list[float]]:
    """How long each form of each layer that has several takes in onnxruntime."""
    open_ones = {name: forms for name, forms in choices.items() if len(forms) > 1 and run.calls.get(name)}
    return onnx_layer_seconds(open_ones, {name: run.calls[name][0].shape for name in open_ones}, _ROUNDS)


def _behind_norm(norm: nn.Module) -> nn.Module:
    """What is left of a norm that went into the layer before it: its activation, if it has one."""
    rest = [part for part in norm.children() if not isinstance(part, nn.Identity)]
    if not rest:
        return nn.Identity()
    return rest[0] if len(rest) == 1 else nn.Sequential(*rest)


def _plain_structure(model: nn.Module) -> nn.Module:
    """The model with torch's modules in the place of dropout and of the containers of this package."""
    for name, _ in list(find_layers(model, _DROPOUTS)):
        model = replace_module(model, name, nn.Identity())
    for name, normed in list(find_layers(model, NormedConv)):
        conv, norm = normed.conv, normed.norm
        plain: nn.Module = conv
        if not isinstance(norm, nn.Identity):
            parts: dict[str, nn.Module] = {"conv": conv, "norm": norm}
            plain = answer_like(nn.Sequential(OrderedDict(parts)), conv, conv.out_channels)
        model = replace_module(model, name, plain)
    outer: tuple[type[TransferModel | KeptModel], ...] = (TransferModel, KeptModel)
    for name, whole in list(find_layers(model, outer)):
        graph = trace(name, whole)
        if where := difference(whole, graph, whole.input_spec.shape, modes=(False,)):
            raise LayerError(name, f"its code does something else when it is traced ({where})")
        model = replace_module(model, name, graph)
    for name, module in model.named_modules():
        is_outer = not name and isinstance(module, SeveralInputs)  # its network is plain
        if type(module).__module__.partition(".")[0] == "basisprune" and not is_outer:
            raise LayerError(name, f"{type(module).__name__} has no plain form; use it only inside a TransferModel")
    return model


@torch.no_grad()
def _check_same(
    original: nn.Module, result: nn.Module, inputs: tuple[object, ...], run: Dataflow, skip: Collection[str]
) -> None:
    """Raises LayerError, with the first layer that differs, unless the result outputs what the original did."""
    expected = list(tensors_in(run.output))
    if not all(bool(tensor.isfinite().all()) for tensor in expected):
        raise ModelError(f"{type(original).__name__}: its output holds NaN or infinite values, nothing to compare")
    if _same(expected, tensors_in(result(*inputs))):
        return
    before, after = _outputs_by_name(original, inputs), _outputs_by_name(result, inputs)
    for name, outputs in before.items():
        inside_folded = any(name == layer or name.startswith(f"{layer}.") for layer in skip)
        if not inside_folded and name in after and not _same(outputs, after[name]):
            raise LayerError(name, "is the first layer whose output changes when folded; please report this model")
    raise LayerError("", "the output changes when folded; please report this model")


def _outputs_by_name(model: nn.Module, inputs: tuple[object, ...]) -> dict[str, list[Tensor]]:
    """What each module outputs, in the order in which they finish."""
    outputs: dict[str, list[Tensor]] = {}

    def keep(name: str, _module: nn.Module, _args: object, output: object) -> None:
        outputs.setdefault(name, []).extend(tensor.clone() for tensor in tensors_in(output))

    handles = [module.register_forward_hook(partial(keep, name)) for name, module in model.named_modules()]
    with hooked(handles), mode(model, training=False):
        model(*inputs)
    return outputs


def _same(
    expected: Iterable[Tensor], given: Iterable[Tensor], tolerance: Mapping[torch.dtype, float] = _TOLERANCE
) -> bool:
    """Whether all tensors agree up to rounding, in relation to the largest value of each."""
    one, other = list(expected), list(given)
    return len(one) == len(other) and all(
        relative_difference(a, b) <= tolerance.get(a.dtype, tolerance[torch.float16])
        for a, b in zip(one, other, strict=True)
    )


# ------------------------------------------------------------------------- constants left of dropped branches


@torch.no_grad()
def merge_shifts(model: nn.Module, inputs: tuple[object, ...]) -> nn.Module:
    """Replace shifts in the model in eval mode, in place: each goes into the bias of the norm before it if it can.

    A shift behind a sum goes into the norm whose output is the last term of it. Whether that is so is tried out. Where
    it is not, a depthwise 1x1 conv takes the shift's place.
    """

    def without(network: nn.Module, name: str, norm: str) -> nn.Module:
        network.get_parameter(f"{norm}.bias").add_(network.get_parameter(f"{name}.bias" if name else "bias"))
        return replace_module(network, name, nn.Identity())

    for name, shift in list(find_layers(model, Shift)):
        before = _norm_before(model, name, inputs)
        if before is not None:
            tried = without(copy.deepcopy(model), name, before)
            if _same(tensors_in(model(*inputs)), tensors_in(tried(*inputs)), _TIGHT):
                model = without(model, name, before)
                continue
        model = replace_module(model, name, _plain_shift(shift.bias))
    return model


def _plain_shift(bias: Tensor) -> nn.Conv2d:
    width = len(bias)
    conv: nn.Conv2d = nn.utils.skip_init(nn.Conv2d, width, width, 1, groups=width, device=bias.device, dtype=bias.dtype)
    conv.weight.fill_(1.0)
    assert conv.bias is not None
    conv.bias.copy_(bias)
    return conv


def _norm_before(model: nn.Module, shift: str, inputs: tuple[object, ...]) -> str | None:
    """The norm of the shift's width that runs last before it, if each runs once."""
    order: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: order.append(name)

    norms = {name: norm for name, norm in find_layers(model, BatchNorm) if affine(norm) is not None}
    known: dict[str, nn.Module] = {**norms, shift: model.get_submodule(shift)}
    with hooked([module.register_forward_hook(note(name)) for name, module in known.items()]):
        model(*inputs)
    width = len(known[shift].bias)  # type: ignore[arg-type]
    if order.count(shift) != 1:
        return None
    earlier = [name for name in order[: order.index(shift)] if norms[name].num_features == width]
    fits = earlier and order.count(earlier[-1]) == 1 and norms[earlier[-1]].bias is not None
    return earlier[-1] if fits else None
