"""Networks that are not what they seem: compiled, scripted, without weights, with computed ones."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm

from basisprune.errors import ConfigError, ModelError
from basisprune.torchkit.running import tensors_with_graphs

_TRAINABLE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def odd_kinds(model: nn.Module) -> list[str]:
    """What the network is, where it cannot be looked into or copied; empty for a plain one."""
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


def refuse_lazy(model: nn.Module, where: str) -> None:
    """Raises ModelError for a network with lazy layers, which running it would fill with random weights."""
    if any(map(is_lazy, model.parameters())):
        raise ModelError(f"{where}: a network with lazy layers that have not run yet given; run it once first")


def why_it_fails(given: Iterable[object]) -> str:
    """What is odd about the networks among the arguments of a call that failed, or about torch; empty if nothing is."""
    values = [each for value in given for each in (value.values() if isinstance(value, Mapping) else [value])]
    for model in (value for value in values if isinstance(value, nn.Module)):
        if kinds := odd_kinds(model):
            return f"{kinds[0]} was given; pass the plain network that it was made of, with its weights"
        if torch.get_default_dtype() == torch.float32 and (others := _other_precisions(model, {torch.float32})):
            return f"a network with weights of {others} was given; pass model.float()"
    if torch.get_default_dtype() != torch.float32:
        return (
            f"torch's default dtype is {torch.get_default_dtype()}; call torch.set_default_dtype(torch.float32) first"
        )
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        return "it was called without gradients; call it outside of torch.no_grad() and torch.inference_mode()"
    return ""


def _other_precisions(model: nn.Module, usual: Collection[torch.dtype]) -> str:
    others = {part.dtype for part in model.parameters() if part.is_floating_point()}.difference(usual)
    return ", ".join(sorted(map(str, others)))


def refuse_untrainable(model: nn.Module, where: str) -> None:
    """Raises ConfigError or ModelError unless the network can be trained here and now."""
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        raise ConfigError(f"{where}: called without gradients, which it needs; call it outside of torch.no_grad()")
    if torch.get_default_dtype() != torch.float32:
        raise ConfigError(
            f"{where}: torch's default dtype is {torch.get_default_dtype()}; call "
            "torch.set_default_dtype(torch.float32) first"
        )
    refuse_odd(model)
    if others := _other_precisions(model, _TRAINABLE):
        raise ModelError(
            f"{where}: the network has weights of {others}, which cannot be trained; pass model.float(), or one of "
            f"{', '.join(map(str, _TRAINABLE))}"
        )


def refuse_other_precisions(model: nn.Module, where: str) -> None:
    """Raise ModelError unless the network is in float32, as all that is delivered is."""
    if others := _other_precisions(model, {torch.float32}):
        raise ModelError(f"{where}: the network has weights of {others}; float32 is needed: pass model.float()")


def copied(model: nn.Module) -> nn.Module:
    """Copy the model; every weight that such a hook computes becomes a parameter of its own.

    torch can copy neither networks with these hooks nor tensors of a graph, of which the copy has the values.
    """
    computed = {id(tensor): tensor.detach().clone() for tensor in tensors_with_graphs(model)}
    computed |= {
        id(value): value.detach().clone()
        for module, _ in _hooked(model)
        for value in vars(module).values()
        if isinstance(value, Tensor)
    }
    return plain_weights(copy.deepcopy(model, computed) if computed else copy.deepcopy(model))


def plain_weights(model: nn.Module) -> nn.Module:
    """The model itself, in place, with every weight that such a hook computes a parameter of its own."""
    for module, hook in list(_hooked(model)):
        trained = any(part.requires_grad for part in module.parameters(recurse=False))
        remove = remove_weight_norm if isinstance(hook, WeightNorm) else remove_spectral_norm
        remove(module, hook.name)
        module.get_parameter(hook.name).requires_grad_(trained)
    return model


def bake_parametrizations(model: nn.Module) -> nn.Module:
    """Make every tensor that torch's parametrizations compute a plain one, as in eval mode, in place."""
    for module in list(model.modules()):
        if is_parametrized(module):
            was_training = module.training
            module.eval()  # some change their state in train mode
            for name in list(module.parametrizations):  # type: ignore[arg-type]
                remove_parametrizations(module, name, leave_parametrized=True)
            module.train(was_training)
    return model


def has_computed_weights(model: nn.Module) -> bool:
    """Whether the model has such hooks."""
    return next(_hooked(model), None) is not None


def _hooked(model: nn.Module) -> Iterator[tuple[nn.Module, WeightNorm | SpectralNorm]]:
    for module in model.modules():
        for hook in list(module._forward_pre_hooks.values()):
            if isinstance(hook, WeightNorm | SpectralNorm):
                yield module, hook
