"""What every run of a network needs: its mode and hooks temporarily, images and labels, tensors and how they differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from basisprune.errors import DataError

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
    """Detach tensors that modules keep in plain attributes, such as a table of biases or a list of outputs, in place.

    With gradients enabled, such a tensor holds on to a graph that the next backward pass would run into, and that no
    copy can be made of.
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
    found: dict[Any, Any] = dict(sorted(given.items())) if isinstance(given, dict) else dict(enumerate(given))  # type: ignore[arg-type]
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
    """Batches of any kind, read as the loss reads them; can be gone through as often as they can.

    `images` is how many inputs came so far.
    """

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
    """The largest difference in relation to the largest expected value, or to `least` if that is larger.

    Infinite for another shape, and for values that are not finite.
    """
    if expected.shape != given.shape:
        return math.inf
    if expected.numel() == 0:
        return 0.0
    difference = float((expected.double() - given.double()).abs().max())
    size = max(float(expected.double().abs().max()), least)
    if not math.isfinite(difference):
        return math.inf
    return difference / size if size else (math.inf if difference else 0.0)
