"""Residual branches that can go as a whole: which there are, and the network without some of them (not in the paper).

A block computes x + f(x), or relu(x + f(x)). Where f goes, its mean stays: x + E[f(x)]. If f ends in a pair, what that
costs is known: it is the sum of the scores of all its basis vectors.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair, Shift, basis_pairs
from basisprune.errors import PlanError
from basisprune.torchkit.running import hooked, mode
from basisprune.torchkit.surgery import find_layers, replace_module
from basisprune.types import Block

_HIGH = 1e4  # where a relu does nothing
_SAME = 1e-9 * _HIGH  # in float64


@torch.no_grad()
def find_blocks(model: nn.Module, example: Tensor) -> tuple[Block, ...]:
    """Return the blocks of a decomposed model whose branch ends in a pair, in the order in which they run.

    They are found by what they do: with the output of the pair held constant, such a block shifts each channel of its
    input by a constant, in float64.
    """
    found: list[Block] = []
    for name, width in _holders(model, example).items():
        if any(name.startswith(f"{block.name}.") or block.name.startswith(f"{name}.") for block in found):
            continue
        twin = copy.deepcopy(model.get_submodule(name)).cpu().double().eval()
        last = _last_pair(twin, width)
        if last is None:
            continue
        shift = _shift(twin, last, torch.zeros(width, dtype=torch.float64))
        if shift is not None:
            found.append(Block(name, f"{name}.{last}", shift[1]))
    return tuple(found)


def _holders(model: nn.Module, example: Tensor) -> dict[str, int]:
    """The modules that hold a pair, run once and make a map of the shape that they read: its channels by name."""
    widths: dict[str, list[int]] = {}

    def note(name: str, _module: nn.Module, args: tuple[object, ...], output: object) -> None:
        read, width = args[0] if len(args) == 1 else None, 0
        if isinstance(read, Tensor) and isinstance(output, Tensor) and read.dim() == 4 and read.shape == output.shape:
            width = read.shape[1]
        widths.setdefault(name, []).append(width)

    pairs = [name for name, _ in find_layers(model, BasisPair)]
    handles = [
        module.register_forward_hook(partial(note, name))
        for name, module in model.named_modules()
        if name and name not in pairs and any(pair.startswith(f"{name}.") for pair in pairs)
    ]
    with hooked(handles), mode(model, training=False):
        model(example)
    return {name: found[0] for name, found in widths.items() if len(found) == 1 and found[0]}


def _last_pair(block: nn.Module, width: int) -> str | None:
    """The pair that runs last in a float64 block, if each runs once and it makes a map of this width."""
    order: list[str] = []
    inner = dict(find_layers(block, BasisPair))
    handles = [pair.register_forward_hook(lambda *_, name=name: order.append(name)) for name, pair in inner.items()]
    with hooked(handles):
        try:
            block(_probe(width))
        except RuntimeError:
            return None  # it wants a larger map, or another one
    last = order[-1] if order and len(set(order)) == len(order) else None
    return last if last is not None and inner[last].out_channels == width else None


def _probe(width: int) -> Tensor:
    return torch.randn(1, width, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _shift(block: nn.Module, last: str, output: Tensor) -> tuple[Tensor, bool] | None:
    """What a float64 block adds to each channel if its last pair outputs this constant, and whether a relu follows."""

    def hold(_module: nn.Module, _args: object, made: Tensor) -> Tensor:
        return output.view(1, -1, 1, 1).expand_as(made)

    x = _probe(len(output))
    with hooked([block.get_submodule(last).register_forward_hook(hold)]):
        high, made = x.abs() + _HIGH, block(x)
        constant: Tensor = (block(high) - high).mean(dim=(0, 2, 3))
    expected = x + constant.view(1, -1, 1, 1)
    for rectifies, wanted in ((False, expected), (True, expected.relu())):
        if made.shape == wanted.shape and float((made - wanted).abs().max()) <= _SAME:
            return constant, rectifies
    return None


@torch.no_grad()
def drop_blocks(
    model: nn.Module, blocks: Sequence[Block], means: Mapping[str, Sequence[float]], *, inplace: bool = False
) -> nn.Module:
    """Return the model without the branches of these blocks; each adds the mean of what its branch added instead.

    `means` are those of the features of the last pair of each block, as scores know them; a branch without means adds
    what it makes of features that are all zero. Raises PlanError for a block that is not one of the model.
    """
    pairs = basis_pairs(model)
    shifts: dict[str, nn.Module] = {}
    for block in blocks:
        if block.last not in pairs:
            raise PlanError(f"{block.name}: the model has no block with the pair {block.last}; find its blocks again")
        pair = copy.deepcopy(pairs[block.last]).cpu().double()
        features = torch.tensor(means.get(block.last) or [0.0] * pair.rank, dtype=torch.float64)
        output = pair.scaling(features.view(1, -1, 1, 1)).flatten()
        twin = copy.deepcopy(model.get_submodule(block.name)).cpu().double().eval()
        found = _shift(twin, block.last.removeprefix(f"{block.name}."), output)
        if found is None:
            raise PlanError(f"{block.name}: does not add a branch to what it reads; find its blocks again")
        shift = Shift(found[0].to(pairs[block.last].scaling.weight))
        shifts[block.name] = nn.Sequential(shift, nn.ReLU()) if block.rectifies else shift
    result = model if inplace else copy.deepcopy(model)
    for name, rest in shifts.items():
        result = replace_module(result, name, rest)
    return result
