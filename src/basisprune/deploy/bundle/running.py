"""A network on one fixed input: does it run, what does it output, and is that what it was."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version

import torch
from torch import Tensor, nn

from basisprune.deploy.bundle.config import Fingerprint
from basisprune.errors import BundleError
from basisprune.torchkit.running import mode, tensors_in

_VALUES = 64
_GOLDEN = (math.sqrt(5) - 1) / 2


def fixed_input(model: nn.Module, shape: Sequence[int]) -> Tensor:
    """One input in [-1, 1] that looks random and is the same on every machine and in every version."""
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
    steps = torch.arange(math.prod(shape), dtype=torch.float64) * _GOLDEN % 1
    return (2 * steps - 1).reshape(1, *shape).to(like.dtype)


def run(model: nn.Module, images: Tensor) -> Tensor:
    """What the network outputs in eval mode: one tensor as it is; of several, all numbers in a row.

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


def fingerprint(output: Tensor) -> Fingerprint:
    """What is kept of the output, to be compared when the network is loaded."""
    values = output.double().flatten()
    return Fingerprint(list(output.shape), values[:_VALUES].tolist(), values.norm().item())


def check_fingerprint(output: Tensor, wanted: Fingerprint, versions: Mapping[str, str]) -> None:
    """Raises BundleError unless the network outputs what it did when it was saved, but for rounding."""
    found, root = fingerprint(output), math.sqrt(max(1, output.numel()))
    coarse = output.is_floating_point() and torch.finfo(output.dtype).bits < 32
    tolerance = (5e-2 if coarse else 2e-3) * found.norm / root + 1e-6
    if (
        found.shape == wanted.shape
        and len(found.values) == len(wanted.values)
        and all(abs(a - b) <= tolerance for a, b in zip(found.values, wanted.values, strict=True))
        and abs(found.norm - wanted.norm) <= tolerance * root
    ):
        return
    here = package_versions()
    others = ", ".join(
        f"{name} {versions.get(name)} then, {here[name]} now" for name in here if versions.get(name) != here[name]
    )
    raise BundleError(
        "the network does not output what it did when it was saved; it was tampered with, or its architecture "
        f"is another one now ({others or 'all versions are the same'})"
    )


def package_versions() -> dict[str, str]:
    """The versions of what a saved network depends on."""
    packages = ("basisprune", "torch", "timm", "safetensors")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}
