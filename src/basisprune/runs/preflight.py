"""Everything that a run would fail at later is tried in its first seconds: names, packages, the folder, the network."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from basisprune.basis.decompose import check_layers, choose_layers
from basisprune.budget import Ratios
from basisprune.callback import Callback, NullCallback
from basisprune.data import LoaderPart, Splits, take
from basisprune.data.decode import random_numbers_kept
from basisprune.deploy.bundle import check_folder, refuse_unsaveable
from basisprune.deploy.export.onnx import ONNX, has_onnx, to_proto
from basisprune.deploy.fold import deploy
from basisprune.deploy.timing import read_table, refuse_other_table
from basisprune.errors import (
    BasisPruneError,
    BundleError,
    ConfigError,
    DataError,
    LayerError,
    ModelError,
    pass_on,
)
from basisprune.files import user_path
from basisprune.importance import score_filters
from basisprune.method.scoring import idle_convs
from basisprune.planning import plan_basis, plan_filters, traced
from basisprune.pruning import prune_filters
from basisprune.recipes import Framework, Recipe
from basisprune.results import Settings
from basisprune.runs.estimate import expected_candidates
from basisprune.runs.folder import BUNDLE, CONFIG, OutputFolder, check_place, check_space, is_text, refuse_links
from basisprune.runs.load import Job, factory_of
from basisprune.runs.network import listed
from basisprune.runs.settings import RunConfig
from basisprune.tasks import Predictions, Task
from basisprune.torchkit.moments import loss_statistics
from basisprune.torchkit.running import Loss, ReadBatch, placed, refuse_other_precisions, refuse_untrainable
from basisprune.torchkit.surgery import named_tensors
from basisprune.torchkit.watching import example_input
from basisprune.training.evaluation import floats, moved, predict, task_batches
from basisprune.training.loop import check_patience
from basisprune.training.trainable import set_trainable
from basisprune.training.trainer import require_tracker
from basisprune.transfer.model import spec_of
from basisprune.types import OUTPUT, LayerScores, Scores, dotted

MOST_IMAGES = 512
_LISTED, _IMAGES = 3, 2
_LONG = 1_000_000  # with more parameters a run is long, and a file that cannot be written should be known at once
_DEVIATIONS = 3.0  # how far above guessing an accuracy must be
_MUCH = 0.2
_LUCK = 1e-3  # how seldom an order that suits the answers may be one by chance
_PREPARED = (
    "its images were prepared in another way: pass the mean, std, size and interpolation that it was trained with"
)


def preflight(job: Job, output: OutputFolder | None, settings: Settings, callback: Callback | None = None) -> None:
    """Raise the error that the run of this job would end with, as far as it can be known; write nothing."""
    command, callback = "compress" if output is None else output.command, callback or NullCallback()
    config, prunes = job.config, command == "compress"
    refuse_untrainable(job.network, command)
    refuse_other_precisions(job.network, command)
    _check_names(job, settings)
    if config.device is not None:
        table = read_table(user_path(config.device, "device"))
        refuse_other_table(job.network, spec_of(job.network).shape, table)
    if output is not None:
        _check_output(job, output, settings, callback)
    for training in (config.recipe.train, config.recipe.finetune) if prunes else (config.recipe.train,):
        require_tracker(training)
        check_patience(training, job.splits.val)
    if prunes:
        job.pipeline(None if output is None else output.stages, NullCallback(), planned=False).check_folder()
    check_network(job, prunes=prunes, saves=output is not None, callback=callback)
    if prunes:
        _refuse_ratio(job)
    if prunes and config.is_trained and config.task.chance(job.splits.train.labels) is not None:
        refuse_guessing(job.network, job.splits, callback=callback)


# ------------------------------------------------------------------------------------------- names and places


def _check_names(job: Job, settings: Settings) -> None:
    odd = [f"{name}: {value!r}" for name, value in dotted(settings) if isinstance(value, str) and not is_text(value)]
    if odd:
        raise ConfigError.of(
            "settings", [f"{each} given, which is not UTF-8; rename it, or pass another name for it" for each in odd]
        )
    for name in job.splits.classes:
        if not is_text(name):
            raise DataError(f"the class {name!r} has a name that is not UTF-8; rename its folder")


def _check_output(job: Job, output: OutputFolder, settings: Settings, callback: Callback) -> None:
    check_place(user_path(output.path, "output"), job.data)
    output.check(settings)
    prunes = output.command == "compress"
    if prunes and (job.config.onnx or (job.config.int8 and job.config.onnx is None)):
        ONNX.require()
    check_folder(output.path / BUNDLE)
    refuse_links(output.path)
    if not (output.path / CONFIG).exists():
        check_space(job.network, expected_candidates(job.config) if prunes else 0, output.path, callback)


# ------------------------------------------------------------------------------------------- the network


@dataclass(frozen=True, eq=False)
class _Sample:
    batch: ReadBatch
    loss: Loss

    @classmethod
    def of(cls, job: Job) -> _Sample:
        network, task = job.network, job.config.task
        with random_numbers_kept():
            inputs, targets = next(iter(task_batches(job.splits.train, network, task, batch_size=_IMAGES)))
        images = placed(inputs, network)
        return cls(ReadBatch(images, moved(targets, images.device)), task)


def check_network(job: Job, *, prunes: bool, saves: bool, callback: Callback) -> None:
    """Raise the error that training, splitting, pruning, folding or saving the network would cause."""
    network, config = job.network, job.config
    for name, tensor in named_tensors(network):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise LayerError(
                name, "holds NaN or infinite values; load the weights again, or train it with a lower rate"
            )
    _try("cannot be copied", network, lambda: copy.deepcopy(network))
    sample = _Sample.of(job)
    outputs = config.task.head_size(job.splits.num_classes)
    if outputs is None:
        _check_task(network, config.task, sample.batch)
    else:
        _check_training(network, config.task, sample.batch, outputs)
    deployed = network
    if prunes:
        ratios = config.goal if isinstance(config.goal, Ratios) else None
        refuse_unprunable(network, config.recipe, config.method, ratios, sample)
        deployed = deploy(network, spec_of(network), job.splits.classes)
    if prunes and saves:
        _check_onnx(deployed, config, callback)
    if saves:
        factory = factory_of(job) if prunes else None
        try:
            try:
                refuse_unsaveable(deployed)
            except (BundleError, LayerError):
                if factory is None:
                    raise
                refuse_unsaveable(deployed, factory)
        except (BundleError, LayerError) as error:
            callback.log(f"model/ cannot be written for this network, only other formats can: {error}")


def _check_onnx(deployed: nn.Module, config: RunConfig, callback: Callback) -> None:
    """Raise ModelError if an ONNX file is asked for and cannot be made; tell where it is only usual."""
    is_long = sum(parameter.numel() for parameter in deployed.parameters()) >= _LONG
    is_asked = bool(config.onnx or config.int8)
    if config.onnx is False or not has_onnx() or not (is_asked or is_long):
        return
    try:
        to_proto(deployed, example_input(deployed, spec_of(deployed).shape))
    except ModelError as error:
        if is_asked:
            raise
        callback.log(f"model.onnx cannot be written for this network, only other formats can: {error}")


def refuse_unprunable(
    network: nn.Module, recipe: Recipe, framework: Framework, goal: Ratios | None, sample: _Sample
) -> None:
    """Raise ModelError for a network that the framework cannot prune: with layers that cannot be split, or nothing."""
    axes = {axis for move in framework.moves for axis in move.axes if goal is None or goal.of(axis) > 0}
    reasons: dict[str, str] = {}
    if "basis" in axes:
        choices = choose_layers(network, linear=recipe.linear)
        idle = dict.fromkeys(idle_convs(network, sample.batch.inputs), "it takes no part in what the network computes")
        names = [choice.name for choice in choices if choice.left_alone is None and choice.name not in idle]
        check_layers(network, names)
        if recipe.basis == "loss":
            linear = [name for name in names if isinstance(network.get_submodule(name), nn.Linear)]
            twin = copy.deepcopy(network)
            set_trainable(twin, scales=recipe.finetune.train_scales, train=recipe.finetune.train)
            score = lambda: loss_statistics(twin, names, [sample.batch], loss=sample.loss, optional=linear)  # noqa: E731
            _try("cannot be scored", network, score)
        if not names:
            kept = {choice.name: str(choice.left_alone) for choice in choices} | idle
            reasons["basis"] = f"no layer can be split ({_why(kept)})" if kept else "it has no layer to split"
    if "filters" in axes:
        coupling = traced(network)
        if not coupling.groups:
            frozen = {name: reason for name, reason in coupling.frozen.items() if reason != OUTPUT}
            reasons["filters"] = f"no filters can go ({_why(frozen)})"
        elif goal is not None:  # what is too much is too much by any scores
            _without_filters(network, recipe, goal)
    # A search prunes what can be pruned; ratios ask for all that they name.
    if reasons and (goal is not None or len(reasons) == len(axes)):
        raise ModelError(f"there is nothing to prune in {type(network).__name__}: {', and '.join(reasons.values())}")


def _why(reasons: dict[str, str]) -> str:
    lines = [f"{name or 'the network'}: {reason}" for name, reason in list(reasons.items())[:_LISTED]]
    more = f"; and {len(reasons) - _LISTED} more" if len(reasons) > _LISTED else ""
    return "; ".join(lines) + more or "there are none but those of its output"


def _refuse_ratio(job: Job) -> None:
    """Raise TooMuchError for a fraction of the basis vectors that cannot go by any scores."""
    network, recipe, goal = job.network, job.config.recipe, job.config.goal
    if not isinstance(goal, Ratios) or not goal.basis:
        return
    idle = idle_convs(network, _Sample.of(job).batch.inputs)
    if goal.filters and job.config.method.moves[0].axis != "basis" and traced(network).groups:
        network = _without_filters(network, recipe, goal)  # which go first
    scores = {
        choice.name: LayerScores(
            (1.0,) * choice.rank, int(getattr(network.get_submodule(choice.name), "groups", 1)), None, 1, 1
        )
        for choice in choose_layers(network, linear=recipe.linear)
        if choice.left_alone is None and choice.name not in idle
    }
    if scores:
        plan_basis(Scores("rank", scores), goal.basis, recipe.plan)


def _without_filters(network: nn.Module, recipe: Recipe, goal: Ratios) -> nn.Module:
    coupling = traced(network)
    scores = score_filters(network, "random", coupling.layers)
    plan = plan_filters(network, scores, goal.filters, recipe.filter_plan, coupling=coupling)
    return prune_filters(network, plan)


def _check_training(network: nn.Module, task: Task, batch: ReadBatch, classes: int) -> None:
    class_scores(network, task, batch.inputs, classes, training=False)
    scores, labels = class_scores(network, task, batch.inputs, classes, training=True), batch.targets
    if not scores.requires_grad:
        raise ModelError(
            f"{type(network).__name__} cannot be trained: its output does not depend on its weights by gradients; "
            "remove detach() or torch.no_grad() from its forward"
        )
    assert isinstance(labels, Tensor)
    _try("cannot be trained", network, lambda: F.cross_entropy(scores.float(), labels).backward())


def _check_task(network: nn.Module, task: Task, batch: ReadBatch) -> None:
    """Raise ModelError unless the task can judge the network's output, and the network learns from its loss."""
    inputs, targets = batch
    judged, taught = (_twin(network, training=training) for training in (False, True))
    with torch.random.fork_rng(devices=[]):
        with torch.no_grad():
            raw = _try("does not run in eval mode", network, lambda: judged(inputs))
            what = f"cannot be judged for the task {task.name}"
            _try(what, network, lambda: task.rows(floats(task.output(raw)), targets, len(inputs)))
        what = f"cannot be trained for the task {task.name}"
        _try(what, network, lambda: task.mean_loss(taught, inputs, targets).backward())


def _twin(network: nn.Module, *, training: bool) -> nn.Module:
    """Copy the network into that mode, with gradients for all of its weights."""
    twin = copy.deepcopy(network).train(training)
    for parameter in twin.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return twin


def class_scores(network: nn.Module, task: Task, example: Tensor, classes: int, *, training: bool) -> Tensor:
    """Return what a copy of the network outputs in that mode; raise ModelError for anything but class scores."""
    words, twin = "train" if training else "eval", _twin(network, training=training)
    with torch.random.fork_rng(devices=[]):
        scores = task.output(_try(f"does not run in {words} mode", network, lambda: twin(example)))
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
        first, *_ = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelError(f"{type(network).__name__} {what}: {type(error).__name__}: {first}") from error


# ------------------------------------------------------------------------------------------- a trained network


def refuse_guessing(network: nn.Module, splits: Splits, *, callback: Callback) -> None:
    """Raise ModelError if a network that keeps its head does no better than chance on the validation images.

    Its classes or its preparation are most likely others. If another order suits much better, the callback is told.
    """
    images = splits.val or splits.train
    step = max(1, math.ceil(len(images) / MOST_IMAGES))
    if step > 1 and not isinstance(images, LoaderPart):
        images = take(images, range(0, len(images), step))
    found, classes = Answers.of(predict(network, images), splits.num_classes), listed(splits.classes)
    right, reordered = f"{found.accuracy:.1%}", "" if found.reordered is None else f"{found.reordered:.1%}"
    if found.is_guessing:
        why = f"either its classes are not in the order of the data ({classes}, sorted by name), or {_PREPARED}"
        if found.fits_another_order:
            why = (
                f"with its classes in another order it would get {reordered}: it must have them as the data, which "
                f"has them sorted by name: {classes}. Reorder the rows of its last layer; if the order is right, "
                f"{_PREPARED}"
            )
        raise ModelError(
            f"keep_head: the network gets {right} of {len(images)} validation images right, and guessing gets "
            f"{found.chance:.1%}; {why}, or pass tune_first (--tune-first) to train it on your images before it is "
            "pruned"
        )
    if found.fits_another_order:
        callback.log(
            f"warning: the network gets {right} of the validation images right, and would get {reordered} with its "
            f"classes in another order; check that it has them as the data: {classes}"
        )


@dataclass(frozen=True)
class Answers:
    """The share of right answers, that of answers as frequent by chance, and that with classes called otherwise.

    `reordered` is None where two classes would be called the same, or where luck may have found the order.
    """

    images: int
    accuracy: float
    chance: float
    reordered: float | None = None

    @classmethod
    def of(cls, said: Predictions, classes: int) -> Answers:
        """Count the answers of these predictions.

        >>> said = Predictions(np.array([1, 2, 0] * 9), np.ones(27), np.array([0, 1, 2] * 9))
        >>> answers = Answers.of(said, 3)
        >>> answers.accuracy, round(answers.chance, 3), answers.reordered, answers.is_guessing
        (0.0, 0.333, 1.0, True)
        """
        counts: npt.NDArray[np.int64] = np.zeros((classes, classes), dtype=np.int64)  # answers x labels
        np.add.at(counts, (np.asarray(said.classes), np.asarray(said.labels)), 1)
        total = int(counts.sum())
        shares = counts / max(total, 1)
        meant = counts.argmax(axis=1)
        given = counts.sum(axis=1) > 0
        is_order = len(set(meant[given].tolist())) == int(given.sum())
        right = float(shares[np.arange(classes), meant].sum())
        chance = float(shares.sum(axis=1) @ shares.sum(axis=0))
        is_known = is_order and not _may_be_luck(right, counts)
        return cls(total, float(np.trace(shares)), chance, right if is_known else None)

    @property
    def is_guessing(self) -> bool:
        deviation = math.sqrt(self.chance * (1 - self.chance) / max(self.images, 1))
        # So few images that even all of them right would be no more than luck decide nothing.
        if self.chance + _DEVIATIONS * deviation >= 1:
            return self.accuracy < self.chance
        return self.accuracy <= self.chance + min(_DEVIATIONS * deviation, (1 - self.chance) / 2)

    @property
    def fits_another_order(self) -> bool:
        """Whether the answers would be much better with the classes in another order."""
        return self.reordered is not None and self.reordered > self.accuracy + _MUCH


def _may_be_luck(right: float, counts: npt.NDArray[np.int64]) -> bool:
    """Whether some order may make this share of answers right although they know nothing of the images.

    One order does with a chance of at most exp(-n KL(right, p)), p the share of the largest class (Chernoff).
    """
    classes, images = len(counts), int(counts.sum())
    if images == 0:
        return True
    said, most = int((counts.sum(axis=1) > 0).sum()), float(counts.sum(axis=0).max()) / images
    if right <= most or most == 1:
        return True
    divergence = right * math.log(right / most)
    if right < 1:
        divergence += (1 - right) * math.log((1 - right) / (1 - most))
    orders = math.lgamma(classes + 1) - math.lgamma(classes - said + 1)
    return images * divergence < orders - math.log(_LUCK)
