"""What people use instead, as functions model -> smaller model: torch-pruning, FastNAS, L1, HRank, truncated SVD."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any

import torch
import torch.nn.functional as F
import torch_pruning
from timm.layers import BatchNormAct2d, Conv2dSame
from torch import Tensor, nn

from basisprune import (
    PlanConfig,
    decompose,
    plan_basis,
    plan_filters,
    prune_basis,
    prune_filters,
    score_filters,
    trace_coupling,
)
from basisprune.basis.layers import basis_pairs
from basisprune.training.trainable import find_classifiers
from basisprune.transfer.model import spec_of
from basisprune.types import LayerScores, Scores

Batches = Iterable[tuple[Tensor, Tensor]]
BLOCK = 8
"""All methods keep multiples of so many channels where they can: ONNX Runtime is faster with those."""

SPARSE_RATE, SPARSE_REG = 1e-2, 5e-4
"""Rate of SGD and strength of the regularisation, from torch-pruning's own benchmark of its group norm pruner."""


FASTNAS_JUDGES, FASTNAS_CALIBRATES = 96, 48
"""Validation images that FastNAS scores each width of each layer on, and training images that it renews norms with."""


def by_magnitude(model: nn.Module, ratio: float, *, across: bool = True) -> nn.Module:
    """The model without the fraction `ratio` of its channels, by torch-pruning's magnitudes of groups.

    `across` layers, or of each layer alike.
    """
    kind, importance = torch_pruning.pruner.BasePruner, torch_pruning.importance.MagnitudeImportance()
    pruned = _learning_copy(model)
    _pruner(pruned, kind, importance, ratio, across=across).step()
    return pruned


def by_taylor(
    model: nn.Module,
    ratio: float,
    batches: Batches,
    *,
    across: bool = True,
    steps: int = 1,
    tune: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """The model without the fraction `ratio` of its channels, by torch-pruning's Taylor importance of groups.

    `across` layers, or of each layer alike. With several `steps`, equally much goes in each, and `tune` trains the
    network in place between them.
    """
    kind, importance = torch_pruning.pruner.BasePruner, torch_pruning.importance.TaylorImportance()
    pruned = _learning_copy(model)
    pruner = _pruner(pruned, kind, importance, ratio, across=across, iterative_steps=steps)
    for step in range(steps):
        if step and tune is not None:
            tune(pruned)
            pruned.eval().requires_grad_(True)
        for images, labels in batches:
            F.cross_entropy(pruned(images), labels).backward()
        pruner.step()
        pruned.zero_grad(set_to_none=True)
    return pruned


class GroupNorm:
    """torch-pruning's group norm pruner (DepGraph): weak groups are pressed to zero by training, then go."""

    def __init__(self, model: nn.Module, ratio: float) -> None:
        self.model = copy.deepcopy(model).to(memory_format=torch.channels_last).requires_grad_(True)
        importance = torch_pruning.importance.GroupMagnitudeImportance()
        self.pruner = _pruner(
            self.model.eval(), torch_pruning.pruner.GroupNormPruner, importance, ratio, reg=SPARSE_REG
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), SPARSE_RATE, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> None:
        """One step of the training that makes groups sparse."""
        self.model.train()
        F.cross_entropy(self.model(images), labels).backward()
        self.pruner.regularize(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def pruned(self) -> nn.Module:
        """The model without its weakest groups."""
        self.model.eval()
        self.pruner.step()
        self.model.zero_grad(set_to_none=True)
        return self.model


def by_filters(model: nn.Module, method: str, ratio: float, batches: Batches) -> nn.Module:
    """The model without the fraction `ratio` of its filters, by one of the paper's scores."""
    coupling = trace_coupling(model, torch.zeros(2, *spec_of(model).shape))
    scores = score_filters(model, method, coupling.layers, batches)
    config = PlanConfig(normalise="max", round_to=BLOCK)
    return prune_filters(model, plan_filters(model, scores, ratio, config, coupling=coupling))


def by_singular_values(model: nn.Module, ratio: float) -> nn.Module:
    """The model with every conv split by its singular values and without the fraction `ratio` of all of them.

    Each is taken in relation to the largest of its layer; nothing is made up for.
    """
    split = decompose(model, basis="weights", scale_init=1.0)
    plan = plan_basis(singular_values(split), ratio, PlanConfig(normalise="max", round_to=BLOCK))
    return prune_basis(split, plan, compensate="none")


def singular_values(model: nn.Module) -> Scores:
    """The singular values of every conv that was split by them and not scaled."""
    layers = {
        name: LayerScores(tuple(pair.scaling.weight.detach().double().flatten(2).norm(dim=(0, 2)).tolist()))
        for name, pair in basis_pairs(model).items()
    }
    return Scores("singular values", layers)


def by_fastnas(model: nn.Module, ratio: float, batches: Batches, judges: Batches) -> nn.Module:
    """The model without the fraction `ratio` of its multiply-adds, by NVIDIA's FastNAS.

    It scores each layer at each width on the `judges`, with norms renewed on the `batches`.
    """
    try:
        prune = import_module("modelopt.torch.prune").prune
        import_module("torchprofile")  # it counts multiply-adds with it
    except ImportError as error:
        raise SystemExit(f"fastnas: {error}; pip install nvidia-modelopt torchprofile==0.0.4") from error
    searched = traceable(model).to(memory_format=torch.contiguous_format).requires_grad_(True)
    shown = list(judges)

    def accuracy(network: nn.Module) -> float:
        with torch.no_grad():
            hits = [network(images).argmax(1) == labels for images, labels in shown]
        return float(torch.cat(hits).float().mean())

    config = {
        "data_loader": [images for images, _ in batches],
        "collect_func": lambda images: images,
        "score_func": accuracy,
        "verbose": False,
    }
    with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        constraints = {"flops": f"{100 * (1 - ratio):g}%"}
        pruned, _ = prune(searched, "fastnas", constraints, torch.zeros(1, *spec_of(model).shape), config)
    found: nn.Module = pruned.eval()
    return found


def traceable(model: nn.Module) -> nn.Module:
    """Return a copy with the same outputs in which FastNAS finds what to prune, for images of the model's size.

    timm's norms that contain their activation become a norm and an activation; convs that work out their padding in
    each call become one that pads by a constant, and a conv.
    """
    copied = copy.deepcopy(model).eval()
    sides: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {}

    def note(name: str, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        (height, width), (below, beside) = inputs[0].shape[-2:], output.shape[-2:]
        sides[name] = (height, below), (width, beside)

    convs = {name: module for name, module in copied.named_modules() if isinstance(module, Conv2dSame)}
    hooks = [
        conv.register_forward_hook(lambda _, inputs, output, name=name: note(name, inputs, output))
        for name, conv in convs.items()
    ]
    copied(torch.zeros(1, *spec_of(model).shape))
    for hook in hooks:
        hook.remove()
    for name, conv in convs.items():
        copied.set_submodule(name, _padded(conv, *sides[name]))
    for name, module in list(copied.named_modules()):
        if isinstance(module, BatchNormAct2d):
            norm = nn.BatchNorm2d(module.num_features, module.eps, module.momentum)
            norm.load_state_dict(module.state_dict())
            copied.set_submodule(name, nn.Sequential(norm, module.drop, module.act))
    return copied.eval()


def _padded(conv: Any, *sides: tuple[int, int]) -> nn.Module:
    """The conv behind a constant padding; `sides` are the heights of its inputs and outputs, then the widths."""
    channels, bias = (conv.in_channels, conv.out_channels), conv.bias is not None
    plain = nn.Conv2d(*channels, conv.kernel_size, conv.stride, 0, conv.dilation, conv.groups, bias=bias)
    plain.load_state_dict(conv.state_dict())
    pads: list[int] = []
    for axis, (before, after) in enumerate(sides):
        reach = (after - 1) * conv.stride[axis] + conv.dilation[axis] * (conv.kernel_size[axis] - 1) + 1
        missing = max(0, reach - before)
        pads = [missing // 2, missing - missing // 2, *pads]  # the last axis comes first
    return nn.Sequential(nn.ZeroPad2d((pads[0], pads[1], pads[2], pads[3])), plain)


def _learning_copy(model: nn.Module) -> nn.Module:
    """A copy of the model whose weights all have gradients."""
    return copy.deepcopy(model).eval().requires_grad_(True)


def _pruner(
    model: nn.Module,
    kind: Callable[..., torch_pruning.pruner.BasePruner],
    importance: object,
    ratio: float,
    *,
    across: bool = True,
    **more: float,
) -> Any:
    return kind(
        model,
        torch.zeros(1, *spec_of(model).shape),
        importance=importance,
        global_pruning=across,
        pruning_ratio=ratio,
        ignored_layers=find_classifiers(model),
        round_to=BLOCK,
        **more,
    )
