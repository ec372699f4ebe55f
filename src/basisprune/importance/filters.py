"""Scores of filters by any method, under one interface (the paper's Section 3.4 and 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.layers import BasisScalingConv
from basisprune.errors import ConfigError, DataError, nearest
from basisprune.importance.gradients import mean_square_products
from basisprune.importance.hrank import mean_ranks
from basisprune.torchkit.running import average_over_processes, images_of, mode
from basisprune.torchkit.surgery import is_norm, is_transposed
from basisprune.types import LayerScores, Scores

FilterMethod: TypeAlias = Literal["l1", "taylor", "hrank", "bn_scale", "random"]
Batches: TypeAlias = Iterable[tuple[Tensor, Tensor]]


def score_filters(
    model: nn.Module,
    method: FilterMethod,
    layers: Sequence[str],
    batches: Batches | None = None,
    *,
    seed: int = 0,
) -> Scores:
    """The importance of every filter (output channel) of the layers named; the model is not changed.

    - "l1": the sum of the absolute weights of the filter; of a decomposed layer, of its second half, scales
      included.
    - "taylor": the squared first-order effect of a gate behind the filter, averaged over batches as in Molchanov
      et al. (2019): (g_gamma gamma + g_beta beta)^2 of the norm right behind the layer, or of the layer's own
      output where there is none.
    - "hrank": the average rank of the filter's feature maps, behind the activation (Lin et al., 2020).
    - "bn_scale": the absolute scale of the norm right behind the layer; the L1 norm where there is none.
    - "random": the control.

    All but "l1" and "random" need `batches` of prepared images, "taylor" with labels. No layers have no scores.
    """
    if method not in get_args(FilterMethod):
        allowed = get_args(FilterMethod)
        hint = nearest(str(method), allowed)
        raise ConfigError(f"method: {method!r} given; allowed are {', '.join(allowed)}.{hint}")
    if not layers:  # a network of which every filter is frozen
        values: dict[str, torch.Tensor] = {}
    elif method == "random":
        generator = torch.Generator().manual_seed(seed)
        values = {name: torch.rand(len(_filters(model, name)), generator=generator) for name in layers}
    elif method == "l1":
        values = {name: _l1(model, name) for name in layers}
    elif batches is None:
        raise DataError(f"method {method!r} needs images; pass batches of prepared images, such as PreparedBatches")
    elif method == "hrank":
        values = mean_ranks(model, layers, (images_of(batch) for batch in batches))
    elif method == "bn_scale":
        norms = norms_behind(model, layers, _first_images(batches))
        values = {name: norms[name].weight.detach().abs() if name in norms else _l1(model, name) for name in layers}
    else:
        values = _taylor(model, layers, batches)
    return Scores(method, {name: LayerScores(tuple(value.double().cpu().tolist())) for name, value in values.items()})


def norms_behind(model: nn.Module, layers: Sequence[str], images: Tensor) -> dict[str, Any]:
    """For each layer the affine norm layer that reads its output and nothing else, where there is one."""
    outputs: dict[int, str] = {}
    alive: list[Tensor] = []
    found: dict[str, nn.Module] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            outputs[id(output)] = name
            alive.append(output)  # so that no other tensor gets its id

        return hook

    def look(norm: Any, args: tuple[Any, ...]) -> None:
        name = outputs.get(id(args[0])) if args else None
        if name is None or getattr(norm, "weight", None) is None or getattr(norm, "bias", None) is None:
            return
        # torch's own LayerNorm reads the last axis, which of a conv's output is not the channels.
        by_channel = type(norm) is not nn.LayerNorm or isinstance(model.get_submodule(name), nn.Linear)
        if by_channel and norm.weight.shape == (len(_filters(model, name)),):
            found.setdefault(name, norm)

    handles = [model.get_submodule(name).register_forward_hook(remember(name)) for name in layers]
    handles += [module.register_forward_pre_hook(look) for module in model.modules() if is_norm(module)]
    try:
        with torch.no_grad(), mode(model, training=False):
            model(images.to(next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _taylor(model: nn.Module, layers: Sequence[str], batches: Batches) -> dict[str, Tensor]:
    norms = norms_behind(model, layers, _first_images(batches))
    bare = [name for name in layers if name not in norms]
    with _gates(model, bare) as gates:
        pairs: dict[str, list[Tensor]] = {name: [norm.weight, norm.bias] for name, norm in norms.items()}
        pairs |= {name: [gate] for name, gate in gates.items()}
        sums = mean_square_products(model, list(pairs.values()), batches, F.cross_entropy)
    values = dict(zip(pairs, sums, strict=True))
    return {name: average_over_processes(values[name]) for name in layers}


@contextmanager
def _gates(model: nn.Module, layers: Sequence[str]) -> Iterator[dict[str, Tensor]]:
    """A gate, a vector of ones, multiplied into the output channels of each layer for a while."""
    gates = {}
    handles = []
    for name in layers:
        layer = model.get_submodule(name)
        like = next(layer.parameters())
        gate = torch.ones(len(_filters(model, name)), device=like.device, dtype=like.dtype)
        gates[name] = gate
        last = isinstance(layer, nn.Linear) or (isinstance(layer, BasisScalingConv) and layer.spatial_dims == 0)

        def hook(_module: nn.Module, _args: Any, output: Tensor, gate: Tensor = gate, last: bool = last) -> Tensor:
            return output * (gate if last else gate.view(-1, *[1] * (output.dim() - 2)))

        handles.append(layer.register_forward_hook(hook))
    try:
        yield gates
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _filters(model: nn.Module, name: str) -> Tensor:
    """The weights of each output channel of the layer, (c_o, -1); of a pair, of its second half, scales included."""
    layer: Any = model.get_submodule(name)
    if isinstance(layer, BasisScalingConv):
        return layer.scaled_weight().flatten(1)
    weight: Tensor = layer.weight.detach()
    if is_transposed(layer):  # (c_i, c_o / groups, *)
        weight = weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def _l1(model: nn.Module, name: str) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(_filters(model, name), ord=1, dim=1)
    return norms


def _first_images(batches: Batches) -> Tensor:
    for batch in batches:
        return images_of(batch)
    raise DataError("batches: no batch came; give the validation data")
