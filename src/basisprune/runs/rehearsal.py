"""What a run would fail at because of its network, tried in its first seconds on copies of it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.decompose import check_layers, choose_layers
from basisprune.budget import Ratios
from basisprune.callback import Callback
from basisprune.data.decode import random_numbers_kept
from basisprune.deploy.bundle import refuse_unsaveable
from basisprune.deploy.export.onnx import has_onnx, to_proto
from basisprune.deploy.fold import deploy
from basisprune.errors import BasisPruneError, BundleError, LayerError, ModelError, pass_on
from basisprune.importance import score_filters
from basisprune.method.scoring import idle_convs
from basisprune.planning import plan_basis, plan_filters, traced
from basisprune.pruning import prune_filters
from basisprune.recipes import Framework, Recipe
from basisprune.runs.job import Job, factory_of
from basisprune.runs.settings import RunConfig
from basisprune.tasks import Task
from basisprune.torchkit.moments import loss_statistics
from basisprune.torchkit.running import Loss, ReadBatch, placed
from basisprune.torchkit.surgery import named_tensors
from basisprune.torchkit.watching import example_input
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import floats, moved, task_batches
from basisprune.training.trainable import set_trainable
from basisprune.transfer.model import spec_of
from basisprune.types import OUTPUT, Coupling, LayerScores, Scores

_LISTED, _IMAGES = 3, 2
_LONG = 1_000_000
"""From so many parameters on, a run is long enough that a file which cannot be written should be known at its start."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A batch that a network is tried on, and what its loss is."""

    batch: ReadBatch
    loss: Loss

    @classmethod
    def of(cls, job: Job) -> Sample:
        """The first batch of the training data, prepared as it will be."""
        network, task = job.network, job.config.task
        with random_numbers_kept():
            batches = task_batches(job.splits.train, network, task, batch_size=_IMAGES)
            inputs, targets = next(iter(batches))
        images = placed(inputs, network)
        return cls(ReadBatch(images, moved(targets, images.device)), task)

    @classmethod
    def of_classes(cls, network: nn.Module) -> Sample:
        """Random images of the size that the network takes, all of the first class."""
        example = example_input(network, spec_of(network).shape)
        labels = torch.zeros(len(example), dtype=torch.long, device=example.device)
        return cls(ReadBatch(example, labels), F.cross_entropy)


def rehearse(job: Job, *, prunes: bool, saves: bool, callback: Callback) -> None:
    """Raises the error that the job's network would cause later: when it is trained, split, pruned, folded or saved.

    The network is not changed. With `prunes`, it is what `compress` does with it; with `saves`, the callback is told if
    it cannot be written as a bundle.
    """
    network = job.network
    _refuse_odd_numbers(network)
    _try("cannot be copied", network, lambda: copy.deepcopy(network))
    sample = Sample.of(job)
    outputs = job.config.task.head_size(job.splits.num_classes)
    if outputs is not None:
        _check_training(network, sample.batch, outputs)
    else:
        _check_task(network, job.config.task, sample.batch)
    deployed = network
    if prunes:
        ratios = job.config.goal if isinstance(job.config.goal, Ratios) else None
        refuse_unprunable(network, job.config.recipe, job.config.method, ratios, sample)
        deployed = deploy(network, spec_of(network), job.splits.classes)
    if prunes and saves:
        _check_onnx(deployed, job.config, callback)
    if saves:
        try:
            if prunes:
                _refuse_unsaveable(deployed, factory_of(job))
            else:
                refuse_unsaveable(network)
        except (BundleError, LayerError) as error:
            callback.log(f"model/ cannot be written for this network, only other formats can: {error}")


def _check_onnx(deployed: nn.Module, config: RunConfig, callback: Callback) -> None:
    """Raises ModelError if an ONNX file is asked for and cannot be; says so where it is only usual."""
    asked = bool(config.onnx or config.int8)
    if config.onnx is False or not has_onnx():
        return
    if not asked and sum(parameter.numel() for parameter in deployed.parameters()) < _LONG:
        return
    try:
        to_proto(deployed, example_input(deployed, spec_of(deployed).shape))
    except ModelError as error:
        if asked:
            raise
        callback.log(f"model.onnx cannot be written for this network, only other formats can: {error}")


def _refuse_unsaveable(deployed: nn.Module, factory: str | None) -> None:
    """Raises the error that writing the bundle would cause: as a graph, or else by the function that builds it."""
    try:
        refuse_unsaveable(deployed)
    except (BundleError, LayerError):
        if factory is None:
            raise
        refuse_unsaveable(deployed, factory)


def refuse_unprunable(
    network: nn.Module,
    recipe: Recipe,
    framework: Framework,
    goal: Ratios | None = None,
    sample: Sample | None = None,
) -> None:
    """Raises ModelError for a network that the framework cannot prune: with layers that cannot be split, or nothing.

    Without a sample, the network is tried as a classifier.

    >>> from basisprune.recipes import find_framework
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
        sample = sample or Sample.of_classes(network)
        idle = dict.fromkeys(idle_convs(network, sample.batch.inputs), "it takes no part in what the network computes")
        names = [choice.name for choice in choices if choice.left_alone is None and choice.name not in idle]
        check_layers(network, names)
        if recipe.basis == "loss":
            _check_statistics(network, names, sample, recipe.finetune)
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


def refuse_ratio(job: Job) -> None:
    """Raise TooMuchError for a fraction of the basis vectors that cannot go by any scores."""
    network, recipe, goal = job.network, job.config.recipe, job.config.goal
    if not isinstance(goal, Ratios) or not goal.basis:
        return
    idle = idle_convs(network, Sample.of(job).batch.inputs)
    thinned = _thinned(network, recipe, job.config.method, goal)
    scores = {
        choice.name: LayerScores((1.0,) * choice.rank, _groups(thinned.get_submodule(choice.name)), None, 1, 1)
        for choice in choose_layers(thinned, linear=recipe.linear)
        if choice.left_alone is None and choice.name not in idle
    }
    if scores:
        plan_basis(Scores("rank", scores), goal.basis, recipe.plan)


def _groups(layer: nn.Module) -> int:
    return int(getattr(layer, "groups", 1))


def _thinned(network: nn.Module, recipe: Recipe, framework: Framework, goal: Ratios) -> nn.Module:
    """The network as it is when its basis vectors are removed: without filters, if they go first."""
    if not goal.filters or framework.moves[0].axis == "basis":
        return network
    coupling = traced(network)
    if not coupling.groups:
        return network
    scores = score_filters(network, "random", coupling.layers)
    plan = plan_filters(network, scores, goal.filters, recipe.filter_plan, coupling=coupling)
    return prune_filters(network, plan)


def _check_statistics(network: nn.Module, names: list[str], sample: Sample, tuning: TrainConfig) -> None:
    """Raises LayerError or ModelError where it cannot be told what the network's layers do to the loss."""
    linear = [name for name in names if isinstance(network.get_submodule(name), nn.Linear)]
    twin = copy.deepcopy(network)
    set_trainable(twin, scales=tuning.train_scales, train=tuning.train)
    _try(
        "cannot be scored",
        network,
        lambda: loss_statistics(twin, names, [sample.batch], loss=sample.loss, optional=linear),
    )


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


def _check_training(network: nn.Module, batch: ReadBatch, classes: int) -> None:
    """Raises ModelError unless the network gives scores of the classes in both modes, and can learn."""
    _scores(network, batch.inputs, classes, training=False)
    scores = _scores(network, batch.inputs, classes, training=True)
    if not scores.requires_grad:
        raise ModelError(
            f"{type(network).__name__} cannot be trained: its output does not depend on its weights by gradients; "
            "remove detach() or torch.no_grad() from its forward"
        )
    labels = batch.targets
    assert isinstance(labels, Tensor)
    _try("cannot be trained", network, lambda: F.cross_entropy(scores.float(), labels).backward())


def _check_task(network: nn.Module, task: Task, batch: ReadBatch) -> None:
    """Raises ModelError unless the task can judge the network's output, and the network learns from its loss."""
    inputs, targets = batch
    judged, taught = (_twin(network, training=training) for training in (False, True))
    with torch.random.fork_rng(devices=[]):
        with torch.no_grad():
            raw = _try("does not run in eval mode", network, lambda: judged(inputs))
            for_task = f"cannot be judged for the task {task.name}"
            _try(for_task, network, lambda: task.rows(floats(task.output(raw)), targets, len(inputs)))
        for_task = f"cannot be trained for the task {task.name}"
        _try(for_task, network, lambda: task.mean_loss(taught, inputs, targets).backward())


def _twin(network: nn.Module, *, training: bool) -> nn.Module:
    """A copy of the network in that mode, with gradients for all of its weights."""
    twin = copy.deepcopy(network).train(training)
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return twin


def _scores(network: nn.Module, example: Tensor, classes: int, *, training: bool) -> Tensor:
    """What a copy of the network outputs in that mode; raises ModelError for anything but scores of the classes."""
    words, twin = "train" if training else "eval", _twin(network, training=training)
    with torch.random.fork_rng(devices=[]):
        scores = _try(f"does not run in {words} mode", network, lambda: twin(example))
    if isinstance(scores, Tensor) and tuple(scores.shape) == (len(example), classes):
        return scores
    if isinstance(scores, Tensor) and scores.ndim == 2 and len(scores) == len(example):
        raise ModelError(
            f"{type(network).__name__} distinguishes {scores.shape[1]} classes, and the data has {classes}; build it "
            f"for {classes} classes (transfer_model(..., num_classes={classes})), or pass the data that it is for"
        )
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
        pass_on(error)
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{type(network).__name__} {what}: {type(error).__name__}: {said[0]}") from error
