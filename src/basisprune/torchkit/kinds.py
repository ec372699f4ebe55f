"""Networks that are not what they seem: compiled, scripted, without weights, or of another precision."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from basisprune.errors import ConfigError, ModelError


def odd_kinds(model: nn.Module) -> list[str]:
    """What the network is, where it cannot be looked into or copied; empty for a plain one.

    >>> odd_kinds(nn.Linear(2, 2)), odd_kinds(nn.LazyLinear(2))
    ([], ['a network with lazy layers that have not run yet'])
    """
    kinds = {
        "a compiled network": any(hasattr(module, "_orig_mod") for module in model.modules()),
        "a scripted network": any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()),
        "a network with lazy layers that have not run yet": any(is_lazy(part) for part in model.parameters()),
        "a network on the meta device, without weights": any(
            part.is_meta for part in (*model.parameters(), *model.buffers()) if not is_lazy(part)
        ),
    }
    return [kind for kind, found in kinds.items() if found]


def refuse_odd(model: nn.Module) -> None:
    """Raises ModelError unless the network is a plain one, which can be looked into and copied."""
    kinds = odd_kinds(model)
    if kinds:
        raise ModelError(f"{kinds[0]} given; pass the plain network that it was made of, with its weights")


def refuse_untrainable(model: nn.Module, where: str) -> None:
    """Raises ConfigError or ModelError unless the network can be trained here and now, in float32."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise ConfigError(f"{where}: called without gradients, which it needs; call it outside of torch.no_grad()")
    if torch.get_default_dtype() != torch.float32:
        raise ConfigError(
            f"{where}: torch's default dtype is {torch.get_default_dtype()}; call "
            "torch.set_default_dtype(torch.float32) first"
        )
    refuse_odd(model)
    others = {part.dtype for part in model.parameters() if part.is_floating_point()} - {torch.float32}
    if others:
        found = ", ".join(sorted(map(str, others)))
        raise ModelError(f"{where}: the network has weights of {found}; float32 is needed: pass model.float()")
