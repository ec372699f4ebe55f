"""Two forms of one network, side by side: whether they compute the same, whatever they are given and in either mode."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from basisprune.deploy.allowed import OtherSizeError
from basisprune.errors import BundleError
from basisprune.torchkit.running import mode, placed, tensors_in

_MORE = 32  # pixels by which the other image size differs: what networks divide their images by
_EXAMPLES = 4  # of each batch that is given
_GOLDEN = (math.sqrt(5) - 1) / 2


def difference(
    original: nn.Module,
    other: nn.Module,
    shape: Sequence[int],
    given: Iterable[Tensor] = (),
    *,
    modes: Sequence[bool] = (False, True),
) -> str | None:
    """Say where `other` does not compute what `original` does, bit for bit; None if it always does.

    Both run, as copies and with the same random numbers, on the batches `given` and on random ones of inputs of this
    `shape`: of several sizes and ranges, and in eval mode of a larger image. `modes` says whether to train. What the
    original cannot run on, or answers with numbers that are not finite, is left out. A graph that refuses larger images
    by name is no other network.
    """
    batches = [*(placed(batch[:_EXAMPLES], original) for batch in given), *varied_inputs(original, shape)]
    for training in modes:
        twins = [copy.deepcopy(network).train(training) for network in (original, other)]
        for seed, batch in enumerate(batches[:-1] if training else batches):
            expected = _output(twins[0], batch, seed)
            if isinstance(expected, Exception) or not _is_finite(expected):
                continue
            found = _output(twins[1], batch, seed)
            if isinstance(found, OtherSizeError) and seed == len(batches) - 1:  # a larger image may be refused
                continue
            if isinstance(found, Exception) or not alike(expected, found):
                what = f"fails with {type(found).__name__}: {found}" if isinstance(found, Exception) else "differs"
                return f"in {'training' if training else 'eval'} mode, for inputs {tuple(batch.shape)}, it {what}"
    return None


def varied_inputs(model: nn.Module, shape: Sequence[int]) -> list[Tensor]:
    """Random batches for the model, of different sizes and ranges, the last one of larger images if it takes any."""
    draw = torch.Generator().manual_seed(1)
    larger = [*shape[:1], *(side + _MORE for side in shape[1:])] if len(shape) > 2 else list(shape)
    batches = [
        4 * torch.rand(3, *shape, generator=draw),
        torch.randn(2, *shape, generator=draw),
        torch.randn(1, *larger, generator=draw) - 1,
    ]
    return [placed(batch, model) for batch in batches]


def alike(one: object, other: object) -> bool:
    """Whether two outputs are the same: tensors bit for bit, in containers that are read in the same way."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if _kind(one) is not _kind(other):
        return False
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(alike, one, other))
    return alike(vars(one), vars(other)) if hasattr(one, "__dict__") else bool(one == other)


def _kind(value: object) -> type:
    """The type of a value; a dict in order is a dict, and so is one that is read as attributes too."""
    return dict if isinstance(value, dict) else type(value)


@torch.no_grad()
def _output(network: nn.Module, batch: Tensor, seed: int) -> object:
    """What the network outputs with these random numbers, or the error that it raises."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return network(batch.clone())
        except Exception as error:
            return error


def _is_finite(output: object) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors_in(output))


def fixed_input(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """Return one input in [-1, 1] that looks random and is the same on every machine and in every version."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    steps = torch.arange(math.prod(shape), dtype=torch.float64) * _GOLDEN % 1
    return (2 * steps - 1).reshape(1, *shape).to(like.dtype)


def run(model: nn.Module, images: Tensor) -> Tensor:
    """Return what the network outputs in eval mode: one tensor as it is; of several, all numbers in a row.

    Raises BundleError unless these are finite numbers.
    """
    with torch.no_grad(), mode(model, training=False):
        try:
            output = model(images)
        except BundleError:
            raise
        except (Exception, SystemExit) as error:
            raise BundleError(
                f"the network does not run on an input of shape {tuple(images.shape)}: {type(error).__name__}: {error}"
            ) from error
    tensors = list(tensors_in(output))
    if not tensors or not all(bool(tensor.isfinite().all()) for tensor in tensors):
        what = "values that are not finite" if tensors else f"{type(output).__name__} without tensors"
        raise BundleError(f"the network outputs {what}; tensors of finite numbers are needed")
    if isinstance(output, Tensor):
        return output
    return torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors])
