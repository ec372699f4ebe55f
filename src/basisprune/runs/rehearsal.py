"""What a run would fail at because of its network, tried in its first seconds on copies of it."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.decompose import check_layers, choose_layers
from basisprune.budget import Ratios
from basisprune.deploy.bundle import refuse_unsaveable
from basisprune.deploy.fold import deploy
from basisprune.errors import BasisPruneError, BundleError, LayerError, ModelError
from basisprune.frameworks import Framework
from basisprune.importance import score_filters
from basisprune.listener import Listener
from basisprune.plan import plan_filters, traced
from basisprune.recipes import Recipe
from basisprune.runs.job import Job
from basisprune.scoring import idle_convs
from basisprune.torchkit.moments import loss_statistics
from basisprune.torchkit.surgery import named_tensors
from basisprune.torchkit.watching import example_input
from basisprune.training.config import TrainConfig
from basisprune.training.trainable import set_trainable
from basisprune.transfer.model import spec_of
from basisprune.types import OUTPUT, Coupling

_LISTED = 3


def rehearse(job: Job, *, prunes: bool, saves: bool, listener: Listener) -> None:
    """Raises the error that the job's network would cause later: when it is trained, split, pruned, folded or saved.

    The network is not changed. With `prunes`, it is what `compress` does with it; with `saves`, the listener hears if
    it cannot be written as a bundle.
    """
    network = job.network
    _refuse_odd_numbers(network)
    _try("cannot be copied", network, lambda: copy.deepcopy(network))
    _check_training(network, job.splits.num_classes)
    deployed = network
    if prunes:
        goal = job.config.goal
        refuse_unprunable(network, job.config.recipe, job.config.framework, goal if isinstance(goal, Ratios) else None)
        deployed = deploy(network, spec_of(network), job.splits.classes)
    if saves:
        try:
            refuse_unsaveable(deployed)
        except (BundleError, LayerError) as error:
            listener.say(f"model/ cannot be written for this network, only other formats can: {error}")


def refuse_unprunable(network: nn.Module, recipe: Recipe, framework: Framework, goal: Ratios | None = None) -> None:
    """Raises ModelError for a network that the framework cannot prune: with layers that cannot be split, or nothing.

    >>> from basisprune.frameworks import find_framework
    >>> from basisprune.recipes import find_recipe
    >>> from basisprune.types import InputSpec
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    >>> net.input_spec = InputSpec((2, 2), (0.5,) * 3, (0.5,) * 3)
    >>> refuse_unprunable(net, find_recipe("paper"), find_framework("basis"))
    Traceback (most recent call last):
    basisprune.errors.ModelError: there is nothing to prune in Sequential: it has no conv or linear layer to split
    """
    axes = {axis for move in framework.moves for axis in move.axes if goal is None or goal.of(axis) > 0}
    reasons: dict[str, str] = {}
    if "basis" in axes:
        choices = choose_layers(network, linear=recipe.linear)
        example = example_input(network, spec_of(network).shape)
        idle = dict.fromkeys(idle_convs(network, example), "it takes no part in what the network computes")
        names = [choice.name for choice in choices if choice.left_alone is None and choice.name not in idle]
        check_layers(network, names)
        if recipe.basis == "loss":
            _check_statistics(network, names, example, recipe.finetune)
        if not names:
            kept = {choice.name: str(choice.left_alone) for choice in choices} | idle
            told = f"no layer can be split ({_told(kept)})" if kept else "it has no conv or linear layer to split"
            reasons["basis"] = told
    if "filters" in axes:
        coupling = traced(network)
        if not coupling.groups:
            reasons["filters"] = f"no filters can go ({_told(_frozen(coupling))})"
        elif goal is not None:  # what is too much is too much by any scores
            scores = score_filters(network, "random", coupling.layers)
            plan_filters(network, scores, goal.filters, recipe.filter_plan, coupling=coupling)
    # A search prunes what can be pruned; ratios ask for all that they name.
    if reasons and (goal is not None or len(reasons) == len(axes)):
        raise ModelError(f"there is nothing to prune in {type(network).__name__}: {', and '.join(reasons.values())}")


def _check_statistics(network: nn.Module, names: list[str], example: Tensor, tuning: TrainConfig) -> None:
    """Raises LayerError or ModelError where it cannot be told what the network's layers do to the loss."""
    linear = [name for name in names if isinstance(network.get_submodule(name), nn.Linear)]
    batches = [(example, torch.zeros(len(example), dtype=torch.long))]
    twin = copy.deepcopy(network)
    set_trainable(twin, scales=tuning.train_scales, train=tuning.train)
    _try("cannot be scored", network, lambda: loss_statistics(twin, names, batches, optional=linear))


def _frozen(coupling: Coupling) -> dict[str, str]:
    return {name: reason for name, reason in coupling.frozen.items() if reason != OUTPUT}


def _told(reasons: dict[str, str]) -> str:
    listed = [f"{name or 'the network'}: {reason}" for name, reason in list(reasons.items())[:_LISTED]]
    more = f"; and {len(reasons) - _LISTED} more" if len(reasons) > _LISTED else ""
    return "; ".join(listed) + more or "there are none but those of its output"


def _refuse_odd_numbers(network: nn.Module) -> None:
    for name, tensor in named_tensors(network):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise LayerError(
                name, "holds NaN or infinite values; load the weights again, or train it with a lower rate"
            )


def _check_training(network: nn.Module, classes: int) -> None:
    """Raises ModelError unless the network gives scores of the classes in both modes, and can learn."""
    example = example_input(network, spec_of(network).shape)
    labels = torch.zeros(len(example), dtype=torch.long, device=example.device)
    _scores(network, example, classes, training=False)
    scores = _scores(network, example, classes, training=True)
    if not scores.requires_grad:
        raise ModelError(
            f"{type(network).__name__} cannot be trained: its output does not depend on its weights by gradients; "
            "remove detach() or torch.no_grad() from its forward"
        )
    _try("cannot be trained", network, lambda: F.cross_entropy(scores.float(), labels).backward())


def _scores(network: nn.Module, example: Tensor, classes: int, *, training: bool) -> Tensor:
    """What a copy of the network outputs in that mode; raises ModelError for anything but scores of the classes."""
    words = "train" if training else "eval"
    twin = copy.deepcopy(network).train(training)
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    with torch.random.fork_rng(devices=[]):
        scores = _try(f"does not run in {words} mode", network, lambda: twin(example))
    if isinstance(scores, Tensor) and tuple(scores.shape) == (len(example), classes):
        return scores
    given = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
    raise ModelError(
        f"{type(network).__name__} returns {given} in {words} mode for {len(example)} images; one tensor of scores "
        f"{(len(example), classes)} is needed: switch its other outputs off"
    )


def _try(what: str, network: nn.Module, work: Callable[[], object]) -> object:
    try:
        return work()
    except BasisPruneError:
        raise
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{type(network).__name__} {what}: {type(error).__name__}: {said[0]}") from error
