"""HRank: the average rank of a filter's feature maps (Lin et al., 2020), in batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from basisprune.errors import DataError
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.running import images_of, mode, placed
from basisprune.torchkit.surgery import has_channels_last

_aten = torch.ops.aten
_ACTIVATIONS = frozenset(
    {_aten.relu, _aten.relu_, _aten.hardtanh, _aten.hardtanh_, _aten.silu, _aten.silu_, _aten.gelu}
    | {_aten.hardswish, _aten.hardswish_, _aten.leaky_relu, _aten.leaky_relu_, _aten.elu, _aten.elu_}
    | {_aten.mish, _aten.mish_, _aten.sigmoid, _aten.tanh, _aten._prelu_kernel, _aten.softplus}
)
# What keeps channels in their place between a layer and its activation.
_CARRIERS = frozenset(
    {_aten.native_batch_norm, _aten._native_batch_norm_legit, _aten._native_batch_norm_legit_no_training}
    | {_aten.cudnn_batch_norm, _aten._batch_norm_with_update, _aten._batch_norm_no_update, _aten.add, _aten.add_}
    | {_aten.native_group_norm, _aten.native_layer_norm, _aten.mul, _aten.mul_, _aten.native_dropout, _aten.clone}
)
_ELIMINATION_LIMIT = 64
_CHUNK = 2**19  # numbers, so that they stay in the cache


def mean_ranks(model: nn.Module, layers: Sequence[str], batches: Iterable[object], _seed: int = 0) -> dict[str, Tensor]:
    """For each layer the mean rank, (c_o), of each channel's map behind the activation, in eval mode.

    The map is taken where the layer's output, by way of norms, additions and multiplications, meets its
    activation; of a layer that meets none before the next one, right behind the last of those.
    """
    totals: dict[str, Tensor] = {}
    count = 0

    def add(names: frozenset[str], maps: Tensor) -> None:
        ranks = matrix_ranks(maps.permute(2, 3, 0, 1).flatten(2)).view(maps.shape[:2]).sum(0, dtype=torch.float64)
        for name in names:
            totals[name] = totals.get(name, torch.zeros_like(ranks)) + ranks

    with torch.no_grad(), mode(model, training=False):
        for batch in batches:
            pictures = placed(images_of(batch), model)
            with _FeatureMaps(model, layers, add) as taps:
                model(pictures)
                taps.flush()
            count += len(pictures)
    if count == 0:
        raise DataError("batches: no batch came; give the validation data")
    missing = [name for name in layers if name not in totals]
    if missing:
        raise DataError(f"{missing[0]}: never ran on the given images; leave it out")
    processes = Processes.here()
    images = processes.total(count)
    return {name: processes.sum(totals[name]) / images for name in layers}


def matrix_ranks(maps: Tensor) -> Tensor:
    """The rank of each of the matrices (h, w, M), by elimination of all of them at once.

    Like `torch.linalg.matrix_rank`, up to the tolerance, but quicker: with thousands of small maps, a
    decomposition of each is mostly overhead. Large maps are given to it.
    """
    if min(maps.shape[:2]) > _ELIMINATION_LIMIT:
        ranks: Tensor = torch.linalg.matrix_rank(maps.permute(2, 0, 1).float())
        return ranks
    wide = maps if maps.shape[0] <= maps.shape[1] else maps.transpose(0, 1)
    at_once = max(1, _CHUNK // wide[..., 0].numel())
    return torch.cat([_eliminate(chunk.float()) for chunk in wide.split(at_once, dim=2)])


def _eliminate(matrices: Tensor) -> Tensor:
    """The ranks (M) of matrices (h, w, M): rows reduced by those above, their largest entries as pivots."""
    left = matrices.clone(memory_format=torch.contiguous_format)
    height, width, count = left.shape
    tolerance = left.abs().amax((0, 1)) * (32 * width * torch.finfo(left.dtype).eps)
    ranks = torch.zeros(count, dtype=torch.int64, device=left.device)
    for step in range(height):
        row = left[step]
        largest, place = row.abs().max(0)
        independent = largest > tolerance
        ranks += independent
        if step + 1 < height:
            pivot = row.gather(0, place[None])
            unit = torch.where(independent, row / pivot, 0.0)
            below = left[step + 1 :]
            column = below.gather(1, place.expand(height - step - 1, 1, -1))
            below.addcmul_(column, unit, value=-1)
    return ranks


class _FeatureMaps(TorchDispatchMode):
    """Follows the layers' outputs to their activations while the model runs, and hands the maps on."""

    def __init__(self, model: nn.Module, layers: Sequence[str], use: Callable[[frozenset[str], Tensor], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.use = use
        self.names = WeakTensorKeyDictionary()
        self.waiting: dict[str, Tensor] = {}
        self.handles = [model.get_submodule(name).register_forward_hook(self._hook(name)) for name in layers]

    def _hook(self, name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, _args: object, output: Tensor) -> None:
            if has_channels_last(layer):
                self.use(frozenset({name}), _as_maps(output.movedim(-1, 1)))
            else:
                self._carry(frozenset({name}), output)

        return hook

    def _carry(self, names: frozenset[str], tensor: Tensor) -> None:
        self.names[tensor] = names
        for name in names:
            self.waiting[name] = tensor

    def __torch_dispatch__(
        self,
        func: OpOverload[..., object],
        _types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        tensors = [arg for arg in args if isinstance(arg, Tensor) and arg in self.names]
        output = result[0] if isinstance(result, tuple) else result
        if not tensors or not isinstance(output, Tensor):
            return result
        names = frozenset().union(*(self.names[tensor] for tensor in tensors if tensor.shape == output.shape))
        packet = func.overloadpacket
        if names and packet in _ACTIVATIONS:
            fresh = frozenset(name for name in names if name in self.waiting)
            if fresh:
                self.use(fresh, _as_maps(output))
            for name in fresh:
                del self.waiting[name]
        elif names and packet in _CARRIERS:
            self._carry(names & self.waiting.keys(), output)
        return result

    def flush(self) -> None:
        """Hands on the maps of layers that met no activation."""
        shared: dict[int, set[str]] = {}
        for name, tensor in self.waiting.items():
            shared.setdefault(id(tensor), set()).add(name)
        for names in shared.values():
            self.use(frozenset(names), _as_maps(self.waiting[next(iter(names))]))
        self.waiting.clear()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self.handles:
            handle.remove()


def _as_maps(features: Tensor) -> Tensor:
    """(N, C, *) as matrices (N, C, h, w): a row of values is a 1 x w map, volumes are laid out flat."""
    if features.dim() < 4:
        return features.flatten(2).unsqueeze(2) if features.dim() == 3 else features[:, :, None, None]
    return features.flatten(2, -2)
