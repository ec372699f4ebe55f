"""What layers output or read on given images, and what the loss makes of it: moments, gathered in one pass."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from basisprune.errors import DataError, LayerError, ModelError, TrainingError
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import Loss, cut_graphs, hooked, images_of, loss_on, mode, placed, read_batch
from basisprune.torchkit.surgery import has_channels_last

_WIDEST = 4096
_ROWS, _ROWS_OF_CHANNEL = 4096, 4
"""Of a batch, so many rows are looked at, or so many for each channel: neighbouring positions say much the same."""


@dataclass(frozen=True)
class OutputStatistics:
    """Mean (c_o) and covariance per group (groups, c_o / groups, c_o / groups) of a layer's output, float64.

    `positions` are those that the layer reads and those that it writes for one image, over all its calls.
    """

    mean: Tensor
    covariance: Tensor
    positions: tuple[float, float] = field(default=(0.0, 0.0), kw_only=True)


@dataclass(frozen=True)
class LossStatistics(OutputStatistics):
    """With `metric`, what the loss makes of a change: G = E[sum over positions of g g^T], per group, float64.

    g is the gradient of one image's loss at one position of the output, E the mean over images. To second order, with
    the positions taken for independent, noise of covariance D in the output costs tr(G D) / 2 of the loss.
    """

    metric: Tensor


@dataclass(frozen=True)
class InputStatistics(LossStatistics):
    """The same of what a pointwise layer reads: the moments of its inputs, with W^T G W for a metric.

    `strength` is the mean diagonal of G at its output.
    """

    strength: float


@torch.no_grad()
def output_statistics(
    model: nn.Module, names: Sequence[str], batches: Iterable[object], *, optional: Collection[str] = ()
) -> dict[str, OutputStatistics]:
    """Return the mean and covariance of the output of each layer named, over all images and positions, in eval mode.

    In a distributed run every process gets what all of them saw. Raises DataError when there is no batch, LayerError
    for a layer that never ran or whose output is not finite. Layers that are `optional` are left out if they never ran.
    """
    sums = {name: _Moments(model.get_submodule(name)) for name in names}
    with hooked([each.watch() for each in sums.values()]):
        images = _run(model, batches)
    return {name: moments.result(name, images) for name, moments in sums.items() if moments.ran or name not in optional}


def loss_statistics(
    model: nn.Module,
    names: Sequence[str],
    batches: Iterable[object],
    *,
    loss: Loss = F.cross_entropy,
    gradients_at: Sequence[str] | None = None,
    optional: Collection[str] = (),
    inside: Mapping[str, Tensor] | None = None,
) -> dict[str, LossStatistics]:
    """Return mean, covariance and loss metric of the output of each layer named, from one forward and backward pass.

    `batches` are (images, labels), `loss` gives the mean over a batch. The metric is that of the layer itself, or
    of the layer at the same place of `gradients_at`. `inside` has the weights (groups, outputs, inputs) of pointwise
    layers, of which InputStatistics say the same in fewer numbers. Works in eval mode, whatever is frozen and under the
    caller's `no_grad`. Otherwise as `output_statistics`; also raises TrainingError for a loss and LayerError for a
    gradient that is not finite, and for a layer that no gradient can reach.
    """
    places, inside = names if gradients_at is None else gradients_at, inside or {}
    outputs = {name: _Moments(model.get_submodule(name), inside=name in inside) for name in names}
    gradients = {place: _GradientMoments(model.get_submodule(place), weight=inside.get(place)) for place in places}
    with hooked([*(each.watch() for each in outputs.values()), *(each.watch() for each in gradients.values())]):
        images = _run(model, batches, loss)
    found = {}
    for name, place in zip(names, places, strict=True):
        if outputs[name].ran or name not in optional:
            moments, metric = outputs[name].result(name, images), gradients[place].result(place, images)
            found[name] = LossStatistics(moments.mean, moments.covariance, metric, positions=moments.positions)
            if place in inside:
                found[name] = InputStatistics(**vars(found[name]), strength=gradients[place].strength(images))
    return found


def input_statistics(
    model: nn.Module, names: Sequence[str], batches: Iterable[object], *, loss: Loss | None = None
) -> dict[str, OutputStatistics]:
    """Return mean (c_i) and covariance per group of what each layer named reads, over all images and positions.

    With a `loss`, and labels in the batches, these are LossStatistics whose metric (c_i, 1, 1) is each channel's by
    itself: the gradient that reaches it through this layer alone, not through others that read the same. A layer
    that reads more than 4096 channels gets its variances alone, (c_i, 1, 1). Layers that never ran are left out. The
    covariances are `shrunk`: as many channels as images would explain all others, but only on these images.
    """
    with reading(model, names) as inputs, torch.set_grad_enabled(loss is not None):
        inputs.images = _run(model, batches, loss)
    return inputs.statistics(metric=loss is not None, copies=copies_of(batches))


def copies_of(batches: object) -> int:
    """How many processes went through the same batches, as far as these tell."""
    return int(getattr(batches, "copies", 1))


@contextmanager
def reading(model: nn.Module, names: Sequence[str]) -> Iterator[Inputs]:
    """Yield what the layers named read while the model runs; whoever runs it notes the number of `images`."""
    inputs = Inputs({name: model.get_submodule(name) for name in names})
    handles = [layer.register_forward_pre_hook(partial(inputs.read, name)) for name, layer in inputs.layers.items()]
    with hooked(handles):
        yield inputs


class Inputs:
    """Sums over what layers read, and over the gradients that come back; see `input_statistics`."""

    def __init__(self, layers: Mapping[str, nn.Module]) -> None:
        self.layers = layers
        self.images = 0
        self._moments = {name: _Moments(layer, widest=_WIDEST) for name, layer in layers.items()}
        self._gradients = {name: _GradientMoments(layer, alone=True) for name, layer in layers.items()}

    def read(self, name: str, layer: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        own = args[0].view_as(args[0])  # through which no gradient comes but this layer's
        self._moments[name].hook(layer, args, own)
        self._gradients[name].hook(layer, args, own)
        return (own, *args[1:])

    def statistics(self, *, metric: bool, copies: int = 1) -> dict[str, OutputStatistics]:
        """Return the statistics of each layer that ran; `copies` processes saw the same images, which count once."""
        found: dict[str, OutputStatistics] = {}
        for name, moments in self._moments.items():
            if moments.ran:
                read = moments.result(name, self.images)
                covariance = shrunk(read.covariance, Processes.here().total(moments.count) // copies)
                found[name] = OutputStatistics(read.mean, covariance)
                if metric:
                    worth = self._gradients[name].result(name, self.images)
                    found[name] = LossStatistics(read.mean, covariance, worth)
        return found


def shrunk(covariance: Tensor, count: int) -> Tensor:
    """The covariance with all correlations smaller by the share of them that chance explains, from `count` rows.

    That share is the sum of the variances of all correlations, by that of their squares (Schaefer and Strimmer, 2005).

    >>> [round(shrunk(torch.tensor([[[1.0, r], [r, 1.0]]]), 101)[0, 0, 1].item(), 3) for r in (0.05, 0.5, 1.0)]
    [0.0, 0.489, 1.0]
    """
    deviation = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    scale = torch.where(deviation > 0, 1 / deviation, 0.0)
    squares = (scale[..., None] * covariance * scale[..., None, :]).square().clamp_max(1)
    other = 1 - torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    chance = ((1 - squares).square() * other).sum((-2, -1)) / max(count - 1, 1)
    all_of_it = (squares * other).sum((-2, -1))
    share = torch.where(all_of_it > 0, chance / all_of_it, 1.0).clamp(0, 1)
    return covariance * (1 - share[..., None, None] * other)


def _run(model: nn.Module, batches: Iterable[object], loss: Loss | None = None) -> int:
    """The number of images, after all of them, or the gradients of each one's own loss, have passed all layers."""
    count = 0
    backward = nullcontext() if loss is None else _with_gradients()
    with mode(model, training=False), backward:
        for number, batch in enumerate(batches):
            if loss is None:
                images = images_of(batch)
                model(placed(images, model))
            else:
                images, labels = read_batch(batch, loss)
                # A path for gradients even where all parameters are frozen; the copy may be changed in place.
                source = placed(images, model).detach().clone().requires_grad_(True)
                value = loss_on(model, source.clone(), labels, loss)
                if not bool(value.isfinite()):
                    raise TrainingError(f"the loss of batch {number} is {value.item()}; check the model and the images")
                if not value.requires_grad:
                    raise ModelError(f"{type(model).__name__} lets no gradient through from its loss to its images")
                # In eval mode images do not mix: the gradient of the sum is at each image that of its own loss.
                torch.autograd.grad(value * len(images), source, allow_unused=True)
                cut_graphs(model)
            count += len(images)
    if count == 0:
        raise DataError("batches: no batch came; some hundreds of prepared images are needed, with labels for a loss")
    return count


@contextmanager
def _with_gradients() -> Iterator[None]:
    with torch.inference_mode(False), torch.enable_grad():
        yield


def _read_at_outputs(layer: nn.Module, given: Tensor) -> Tensor:
    """What a pointwise layer reads, but for the positions that its stride skips."""
    steps: tuple[int, ...] = getattr(layer, "stride", ())
    for axis, step in enumerate(steps, -len(steps)):
        if step > 1:
            given = given.index_select(axis, torch.arange(0, given.shape[axis], step, device=given.device))
    return given


def _rows(layer: nn.Module, features: Tensor) -> Tensor:
    """What a layer outputs, or its gradient, as rows (positions, channels), in single precision at least."""
    rows = features.flatten(0, -2) if has_channels_last(layer) else features.transpose(0, 1).flatten(1).mT
    return rows.to(torch.promote_types(rows.dtype, torch.float32))  # half precision cannot hold a variance


def _sampled(rows: Tensor, batch: int) -> Tensor:
    """Enough of the rows, spread evenly over images and positions; others in each batch."""
    step = len(rows) // max(_ROWS, _ROWS_OF_CHANNEL * rows.shape[1])
    if step < 2:
        return rows
    step |= 1  # an odd step meets every column of a map
    return rows[batch * 7 % step :: step]


def _products(rows: Tensor, groups: int) -> Tensor:
    """The sum over rows of x x^T for the part x of each group: (groups, c / groups, c / groups)."""
    if rows.shape[1] == groups:
        return rows.square().sum(0)[:, None, None]
    grouped = rows.unflatten(1, (groups, -1)).transpose(0, 1)
    with torch.autocast(rows.device.type, enabled=False):
        products: Tensor = grouped.mT @ grouped
    return products


class _Moments:
    """Running moments of a layer's output, in float64, shifted by its first batch's mean so that nothing cancels.

    Of more than `widest` channels no two are compared. `inside`, they are those of what a pointwise layer reads.
    """

    def __init__(self, layer: nn.Module, *, widest: int | None = None, inside: bool = False) -> None:
        self.layer, self.widest, self.inside = layer, widest, inside
        self.groups: int = getattr(layer, "groups", 1)
        self.batches = self.count = self.written = self.read = 0
        self.shift: Tensor | None = None

    @property
    def ran(self) -> bool:
        return self.shift is not None

    def watch(self) -> RemovableHandle:
        return self.layer.register_forward_hook(self.hook)

    def hook(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        given = args[0] if args else output
        rows = _rows(layer, (_read_at_outputs(layer, given) if self.inside else output).detach())
        self.read += given.numel() // max(given.shape[-1 if has_channels_last(layer) else 1], 1)
        self.written += len(rows)
        rows, self.batches = _sampled(rows, self.batches), self.batches + 1
        if self.shift is None:
            self.shift = rows.mean(0)
            self.first = torch.zeros_like(self.shift, dtype=torch.float64)
            if self.widest is not None and rows.shape[1] > self.widest:
                self.groups = rows.shape[1]
            per_group = rows.shape[1] // self.groups
            self.second = self.first.new_zeros(self.groups, per_group, per_group)
        centred = rows - self.shift
        self.first += centred.sum(0, dtype=torch.float64)
        self.second += _products(centred, self.groups)
        self.count += len(rows)

    def result(self, name: str, images: int) -> OutputStatistics:
        if self.shift is None:
            raise LayerError(name, "never ran on the given images; add it to ignored_layers of decompose")
        if not bool(self.second.isfinite().all()):
            raise LayerError(name, "outputs NaN or infinite values on the given images; check images and weights")
        mean = self.first / self.count
        grouped = mean.view(self.groups, -1, 1)
        covariance, mean = self.second / self.count - grouped @ grouped.mT, mean + self.shift
        processes = Processes.here()
        if processes.count > 1:
            part = self.count / processes.total(self.count)
            mine, mean = mean, processes.sum(part * mean)
            shift = (mine - mean).view(self.groups, -1, 1)
            covariance = processes.sum(part * (covariance + shift @ shift.mT))
        seen = max(processes.total(images), 1)
        reads, writes = (processes.total(count) / seen for count in (self.read, self.written))
        return OutputStatistics(mean, covariance, positions=(reads, writes))


class _GradientMoments:
    """The running sum of g g^T, with g the gradient at a layer's output; if `alone`, each channel is its own group.

    With the `weight` (groups, outputs, inputs) of a pointwise layer, g is what comes back through it.
    """

    def __init__(self, layer: nn.Module, *, alone: bool = False, weight: Tensor | None = None) -> None:
        self.layer, self.alone, self.weight = layer, alone, weight
        self.groups: int = getattr(layer, "groups", 1)
        self.sum: Tensor | None = None
        self.squares, self.batches, self.reached = 0.0, 0, False

    def watch(self) -> RemovableHandle:
        return self.layer.register_forward_hook(self.hook)

    def hook(self, layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG002
        if self.sum is None:
            channels = output.shape[-1 if has_channels_last(layer) else 1]
            if self.weight is not None:
                channels = self.groups * self.weight.shape[2]
            self.groups = channels if self.alone else self.groups
            width = channels // self.groups
            self.sum = torch.zeros(self.groups, width, width, dtype=torch.float64, device=output.device)
        if output.requires_grad:
            self.reached = True
            output.register_hook(self._add)

    def _add(self, gradient: Tensor) -> None:
        assert self.sum is not None
        rows = _rows(self.layer, gradient.detach())
        few, self.batches = _sampled(rows, self.batches), self.batches + 1
        times = len(rows) / max(len(few), 1)
        if self.weight is not None:
            self.squares += times * few.square().sum().item() / few.shape[1]
            few = torch.einsum("ngo,goi->ngi", few.unflatten(1, (self.groups, -1)), self.weight.to(few)).flatten(1)
        self.sum += times * _products(few, self.groups)

    def strength(self, images: int) -> float:
        """The mean over channels of the squared gradient at the layer's output, summed over positions."""
        processes = Processes.here()
        return float(processes.sum(torch.tensor(self.squares, dtype=torch.float64))) / processes.total(images)

    def result(self, name: str, images: int) -> Tensor:
        if self.sum is None:
            raise LayerError(name, "never ran on the given images; add it to ignored_layers of decompose")
        if not self.reached:
            raise LayerError(name, "no gradient can reach it, as it runs under no_grad; add it to ignored_layers")
        if not bool(self.sum.isfinite().all()):
            raise LayerError(name, "the gradient of the loss there is NaN or infinite; check images and weights")
        processes = Processes.here()
        return processes.sum(self.sum) / processes.total(images)
