"""What every run of a network needs: its mode and hooks, batches and losses, and that the network can be run at all."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations
from torch.nn.utils.spectral_norm import SpectralNorm, remove_spectral_norm
from torch.nn.utils.weight_norm import WeightNorm, remove_weight_norm
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from basisprune.errors import ConfigError, DataError, ModelError

_LARGEST_WHOLE = 1 << 24
_OF_TORCH = frozenset(vars(nn.Module()))
"""The attributes of every module, which hold its parameters, buffers, hooks and parts."""


class BatchLoss(Protocol):
    """What knows how a batch is read and what the loss of a network on it is, such as a `Task`."""

    def inputs_and_targets(self, batch: object) -> tuple[Tensor, object]:
        """The prepared inputs (N, ...) of a batch, and what is wanted for them."""

    def mean_loss(self, model: nn.Module, inputs: Tensor, targets: object) -> Tensor:
        """The mean loss of the model on inputs where it is, a scalar."""


Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor] | BatchLoss
"""(the network's output, labels) -> the mean loss of the images, such as `F.cross_entropy`; or a `Task`."""


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """The model in train or eval mode temporarily; every module gets its own mode back afterwards."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Hooks that were registered stay temporarily, and go however it ends."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def is_transformed() -> bool:
    """Whether a transform of torch.func (vmap, jvp, ...) is under way, for which custom gradients must step aside."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


@torch.no_grad()
def idle_modules(model: nn.Module, images: Tensor) -> set[str]:
    """The names of all modules that are not called when the model runs on these images in eval mode."""
    called: set[nn.Module] = set()
    handles = [module.register_forward_pre_hook(lambda module, _args: called.add(module)) for module in model.modules()]
    with hooked(handles), mode(model, training=False):
        model(placed(images, model))
    return {name for name, module in model.named_modules(remove_duplicate=False) if module not in called}


def cut_graphs(model: nn.Module) -> None:
    """Detach tensors that modules keep in plain attributes, such as a list of outputs, in place.

    Such a tensor holds on to a graph that the next backward pass would run into, and that cannot be copied.
    """
    for module in model.modules():
        vars(module).update({name: _detached(value) for name, value in vars(module).items() if name not in _OF_TORCH})


def tensors_with_graphs(model: nn.Module) -> Iterator[Tensor]:
    """The tensors that `cut_graphs` would detach."""
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in _OF_TORCH:
                yield from (tensor for tensor in _tensors_kept(value) if tensor.grad_fn is not None)


def _detached(value: object) -> object:
    """The value with its tensors detached; lists and dicts stay the objects that they are, as modules share them."""
    if isinstance(value, Tensor):
        return value if value.grad_fn is None else value.detach()
    if type(value) is tuple:
        return tuple(map(_detached, value))
    if type(value) is list:
        value[:] = map(_detached, value)
    elif type(value) is dict:
        value.update({key: _detached(item) for key, item in value.items()})
    return value


def _tensors_kept(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (tuple, list, dict):
        for item in value.values() if isinstance(value, dict) else value:  # type: ignore[attr-defined]
            yield from _tensors_kept(item)


def plain_tensors(batch: object) -> Any:
    """The batch with tensors of subclasses, such as MONAI's MetaTensor, as plain ones, which know no tricks."""
    if isinstance(batch, Tensor):
        return batch if type(batch) is Tensor else batch.as_subclass(Tensor)
    return batch if all(type(tensor) is Tensor for tensor in tensors_in(batch)) else tree_map(plain_tensors, batch)


def images_of(batch: object) -> Tensor:
    """The images of a batch, which is a tensor, or a tuple or list that starts with them; several inputs as one."""
    images = batch[0] if isinstance(batch, tuple | list) and batch else batch
    images = packed(images) if isinstance(images, tuple | list | dict) else images
    if not isinstance(images, Tensor) or not images.is_floating_point():
        kind = f"{images.dtype} tensor" if isinstance(images, Tensor) else type(images).__name__
        raise DataError(
            f"batches: a {kind} given, a float tensor of prepared images is needed; "
            "basisprune.data.PreparedBatches makes them from any data"
        )
    plain: Tensor = plain_tensors(images)
    return plain


def several(given: object) -> dict[str | int, Tensor]:
    """The tensors of a tuple, a list or a dict: by their places, or by their names in the order of these.

    Raises DataError unless all have one row for each example, in numbers that a float holds.
    """
    found = dict(sorted(given.items()) if isinstance(given, dict) else enumerate(cast("Iterable[object]", given)))
    tensors = {name: plain_tensors(each) for name, each in found.items() if each is not None}
    counts = {len(each) if isinstance(each, Tensor) and each.ndim else None for each in tensors.values()}
    if len(counts) != 1 or None in counts:
        raise DataError(f"batches: inputs {list(found)} given; tensors with one row for each example are needed")
    for name, each in tensors.items():
        is_whole = not each.is_floating_point() and each.dtype is not torch.bool
        if is_whole and each.numel() and int(each.abs().max()) > _LARGEST_WHOLE:
            raise DataError(
                f"batches: input {name!r} has whole numbers beyond {_LARGEST_WHOLE:,}, which no float holds"
            )
    return tensors


def packed(given: object) -> Tensor:
    """Several inputs of a network as one tensor (N, 1, numbers); a single one stays as it is.

    >>> packed({"step": torch.tensor([3, 4]), "image": torch.zeros(2, 1, 2, 2)}).tolist()
    [[[0.0, 0.0, 0.0, 0.0, 3.0]], [[0.0, 0.0, 0.0, 0.0, 4.0]]]
    """
    tensors = list(several(given).values())
    if len(tensors) == 1:
        return images_of(tensors[0])
    kind = next((each.dtype for each in tensors if each.is_floating_point()), torch.get_default_dtype())
    return torch.cat([each.reshape(len(each), 1, -1).to(kind) for each in tensors], dim=2)


def placed(images: Tensor, model: nn.Module) -> Tensor:
    """The images on the device and in the precision of the model, which is that of its first float parameter."""
    like = next((part for part in model.parameters() if part.is_floating_point()), None)
    return images if like is None else images.to(like.device, like.dtype)


def _labelled(batch: object) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) < 2:
        raise DataError(f"batches: (images, labels) are needed, {type(batch).__name__} given")
    return images_of(batch), plain_tensors(batch[1])


class ReadBatch(NamedTuple):
    """A batch that was read before: prepared inputs (N, ...), and what is wanted for them."""

    inputs: Tensor
    targets: object


class ReadBatches:
    """Batches of any kind, read as the loss reads them, again and again; `images` counts the inputs so far."""

    def __init__(self, batches: Iterable[object], loss: Loss) -> None:
        self.batches, self.loss, self.images = batches, loss, 0

    def __iter__(self) -> Iterator[ReadBatch]:
        for batch in self.batches:
            read = read_batch(batch, self.loss)
            self.images += len(read.inputs)
            yield read


def read_batch(batch: object, loss: Loss) -> ReadBatch:
    """The inputs and the targets of a batch, read as the loss reads them if it knows how."""
    if isinstance(batch, ReadBatch):
        return batch
    return ReadBatch(*(_labelled(batch) if callable(loss) else loss.inputs_and_targets(batch)))


def loss_on(model: nn.Module, inputs: Tensor, targets: object, loss: Loss) -> Tensor:
    """The mean loss of the model on inputs that lie where it does; the targets are brought there, as copies."""
    device = next(model.parameters()).device
    there = tree_map(lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf, targets)
    if not callable(loss):
        return loss.mean_loss(model, inputs, there)
    output = model(inputs)
    return loss(logits_of(output) if knows_tensors_only(loss) else output, there)


def logits_of(output: Any) -> Any:
    """The scores of an output that has them as `logits`, as those of transformers do; other outputs as they are."""
    found = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else output


def knows_tensors_only(loss: object) -> bool:
    """Whether a loss is one of torch's own, which is given the scores of an output and not all of it."""
    return str(getattr(getattr(loss, "func", loss), "__module__", "")).startswith("torch.")


def tensors_in(value: object) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dicts, such as a network's output, in their order."""
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def relative_difference(expected: Tensor, given: Tensor, *, least: float = 0.0) -> float:
    """Return the largest difference relative to the largest expected value or `least`; infinite if not comparable."""
    if expected.shape != given.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    difference = float((expected.double() - given.double()).abs().max())
    size = max(float(expected.double().abs().max()), least)
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)


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
