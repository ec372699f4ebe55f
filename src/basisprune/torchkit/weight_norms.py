"""Weights that the hooks of torch's old `weight_norm` and `spectral_norm` compute before each run, made plain."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm


def copied(model: nn.Module) -> nn.Module:
    """A copy of the model, in which every weight that such a hook computes is a parameter of its own.

    torch cannot copy a network with these hooks, and a rewrite of its layers would lose them. What they compute in
    eval mode is baked in, so that the copy outputs the same; it is trained as a network without them.
    """
    computed = {
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
    """The model itself, in place, with every tensor that torch's parametrizations compute a plain one, as in eval mode.

    >>> layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    >>> [name for name, _ in bake_parametrizations(layer).named_parameters()]
    ['bias', 'weight']
    """
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
