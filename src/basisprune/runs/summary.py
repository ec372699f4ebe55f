"""A finished search -> all its results as one RunSummary."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair
from basisprune.budget import Budget, Goal
from basisprune.budget.certify import Certificate, interval_of
from basisprune.budget.metrics import ClassMetric, in_points, in_words, value_of
from basisprune.budget.planning import CostPlanner
from basisprune.budget.proportions import Paired
from basisprune.costs import layer_reports, weight_bytes
from basisprune.data import LabelledImages, LoaderPart
from basisprune.deploy.latency import measure_latency
from basisprune.importance import taylor_scores
from basisprune.method.pipeline import Pipeline
from basisprune.results import (
    BeforeAndAfter,
    CandidateRow,
    ChangedImage,
    ClassLoss,
    ClassLosses,
    Confusion,
    Errors,
    LayerImportance,
    Limit,
    RunSummary,
    ShownMask,
    Side,
)
from basisprune.runs.certify import ONNX_RUNTIME, PYTORCH
from basisprune.runs.folder import versions
from basisprune.runs.load import Job
from basisprune.runs.pictures import picture_of, picture_url, shown_errors, shown_masks
from basisprune.search.candidates import SearchResult, share_of
from basisprune.tasks import Predictions, Task
from basisprune.tasks.classification import Bools
from basisprune.torchkit.surgery import find_layers

_CHANGED_IMAGES = 24
_FIGURE_LAYERS = 6
_SECONDS = 10.0  # time limit for measuring the latency of all candidates


def summarise(job: Job, pipeline: Pipeline, found: SearchResult, command: str) -> RunSummary:
    """All results of a search; the test images are used here, once."""
    latencies = _latencies(found, pipeline)
    rows = tuple(
        CandidateRow(
            **{**vars(trial.candidate), "latency_ms": latency},
            name=trial.candidate.label,
            chosen=index == found.chosen,
        )
        for index, (trial, latency) in enumerate(zip(found.trials, latencies, strict=True))
    )
    sides = tuple(_side(rows[index], found.trials[index].deployed) for index in (0, found.chosen))
    shown = _shown(job, found, pipeline, sides)
    return RunSummary(
        title=f"{job.model}, {job.data}",
        command=command,
        config=job.to_dict(),
        seed=job.config.seed,
        versions=versions(),
        device=f"{platform.machine()}, {torch.get_num_threads()} threads",
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        headline=headline(job, found),
        verdict=" ".join([verdict(job, found), *warnings(shown.losses)]),
        interrupted=found.interrupted,
        kept_to_budget=kept_to_budget(job, found),
        budget=Limit.of(job.config.goal),
        classes=tuple(pipeline.splits.classes),
        reference=sides[0],
        candidates=rows,
        latency_by=latency_by(found, pipeline.planner),
        layers=tuple(layer_reports(found.state.model, found.trials[found.chosen].deployed)),
        importance=_importance(pipeline.start(job.config.method).model, pipeline),
        test=shown.test,
        confusion=shown.confusion,
        changed=shown.changed,
        certificate=found.certificate,
        class_losses=shown.losses,
        require_certified=job.config.require_certified,
        task=job.config.task.name,
        metric=job.config.task.metric_name,
        metric_is_share=job.config.task.is_share,
        masks=shown.masks,
        errors=shown.errors,
    )


@dataclass(frozen=True)
class Shown:
    """What was seen on images that were not trained on, as far as it suits the task."""

    test: BeforeAndAfter | None = None
    confusion: Confusion | None = None
    changed: tuple[ChangedImage, ...] = ()
    losses: ClassLosses | None = None
    masks: tuple[ShownMask, ...] = ()
    errors: Errors | None = None


def _shown(job: Job, found: SearchResult, pipeline: Pipeline, sides: Sequence[Side]) -> Shown:
    part, images = _held_out(found, pipeline)
    networks = [found.trials[index].deployed for index in (0, found.chosen)]
    before, after = (pipeline.outcomes(network, images) for network in networks)
    rows = [
        replace(side, accuracy=each.value, interval=interval_of(each))
        for side, each in zip(sides, (before, after), strict=True)
    ]
    test, classes = BeforeAndAfter(*rows) if part == "test" else None, pipeline.splits.classes
    if isinstance(before, Predictions) and isinstance(after, Predictions):
        seen = HeldOut(part, images, before, after)
        return Shown(
            test=test,
            confusion=None if test is None else Confusion(*(_matrix(each, len(classes)) for each in (before, after))),
            changed=_changed(before, after, images, classes),
            losses=class_losses(seen, classes, job.config.goal, _class_metric(job)),
        )
    return Shown(
        test=test,
        masks=shown_masks(pipeline.task, networks, images),
        errors=shown_errors(part, before, after),
    )


def _class_metric(job: Job) -> ClassMetric:
    metric = job.config.metric
    return "accuracy" if isinstance(metric, Task) else metric


def kept_to_budget(job: Job, found: SearchResult) -> bool:
    """Whether the chosen network meets the goal: it is pruned, or already small enough."""
    goal = job.config.goal
    if not isinstance(goal, Budget):
        return found.chosen > 0  # a run that was stopped early has not reached the ratios
    return found.candidates[found.chosen].passed and (found.chosen > 0 or not goal.is_about_accuracy)


def verdict(job: Job, found: SearchResult) -> str:
    """The result in one or two plain sentences."""
    first, chosen = found.candidates[0], found.candidates[found.chosen]
    early = "Stopped early; this is the best result so far. " if found.interrupted else ""
    if found.chosen == 0 and kept_to_budget(job, found):
        return f"{early}The model is already within the budget. It is unpruned."
    if found.chosen == 0:
        none = "" if early else "No candidate is smaller and within the budget. "
        return f"{early}{none}The model is unpruned."
    metric, (before, after), images = _measured(job, found)
    values = f"{_as_text(job, before)} to {_as_text(job, after)}"
    sentence = f"{early}{_saved(found)} removed; {metric} on {images} went from {values}."
    if found.certificate is not None:
        sentence += f" {promised(job, found.certificate)}"
    if not chosen.passed:
        sentence += " This is the smallest candidate, and it is still larger than requested."
    guess = _largest_share(job)
    if guess is None:
        return sentence
    if first.interval[0] <= guess:
        sentence += (
            f" The unpruned model is hardly better than always answering the largest class ({guess:.0%}), so this "
            "means little; train it longer."
        )
    elif chosen.interval[0] <= guess:
        sentence += f" The pruned model is hardly better than always answering the largest class ({guess:.0%})."
    return sentence


def promised(job: Job, certificate: Certificate) -> str:
    """What is certified of the budget, or why it is only estimated, in a sentence."""
    if not certificate.certified:
        return f"This is estimated, not certified: {certificate.reason}."
    sure = f"{100 * certificate.confidence:.3g}% confidence"
    tested = certificate.tested_on(job.config.task.examples)
    unseen = " that nothing had seen" if certificate.labelled is None else ""
    return f"Certified with {sure}, on {tested}{unseen}: {_promised(job)}."


def _promised(job: Job) -> str:
    """What a certified result keeps to, in words."""
    limit, metric = Limit.of(job.config.goal), in_words(job.config.metric)
    value = limit.value or 0.0
    if not job.config.task.is_share:
        most = "a loss of at most" if limit.kind == "max_drop" else "at least"
        return f"{most} {_as_text(job, value)} {'of ' if limit.kind == 'max_drop' else ''}{metric}"
    if limit.kind == "max_drop":
        return f"a loss of at most {in_points(value)} of {metric}"
    return f"at least {value:.1%} {metric}"


def _as_text(job: Job, value: float) -> str:
    """A value of the metric."""
    return job.config.task.format(value)


def _largest_share(job: Job) -> float | None:
    """The share of the largest class among the images that judge, the accuracy of always answering it; None without."""
    return job.config.task.chance((job.splits.val or job.splits.train).labels)


@dataclass(frozen=True)
class HeldOut:
    """Images that were not trained on, and what the unpruned and the chosen network say of them."""

    part: str
    images: LabelledImages
    before: Predictions
    after: Predictions


def _held_out(found: SearchResult, pipeline: Pipeline) -> tuple[str, LabelledImages]:
    """The test images, with the name of their part; without any, the confirming ones or those that searched.

    Of a run that was stopped, only the last: it may go on, and the others are looked at once, at its end.
    """
    splits = pipeline.splits
    confirm = None if splits.confirm is None or not splits.confirm.labelled else splits.confirm
    parts = {"val": splits.val} if found.interrupted else {"test": splits.test, "confirm": confirm}
    parts |= {"val": splits.val}
    return next((name, images) for name, images in parts.items() if images is not None)


def class_losses(seen: HeldOut, classes: Sequence[str], goal: Goal, metric: ClassMetric = "accuracy") -> ClassLosses:
    """What each class lost.

    A class that lost more than the whole may, or does where the budget is about size, is marked if chance does not
    explain it: at a level of 5% for all classes together.
    """
    labels, before, after = seen.before.labels, seen.before.hits, seen.after.hits
    allowed = Paired.of(before, after).drop
    if isinstance(goal, Budget) and goal.is_about_accuracy:
        value = value_of(metric, seen.before)
        allowed = value - goal.least_accuracy(value)
    counts = np.bincount(labels, minlength=len(classes))
    rows = [
        _class_loss(name, before[labels == label], after[labels == label], allowed, int((counts > 0).sum()))
        for label, name in enumerate(classes)
        if counts[label]
    ]
    return ClassLosses(seen.part, float(counts.max() / len(labels)), tuple(rows))


def _class_loss(name: str, before: Bools, after: Bools, allowed: float, classes: int) -> ClassLoss:
    pair = Paired.of(before, after)
    chance = Paired(pair.won, pair.lost, pair.images).p_value(-max(allowed, 0.0))
    values = float(before.mean()), float(after.mean())
    return ClassLoss(name, len(before), *values, pair.interval(), beyond=chance <= 0.05 / classes)


def warnings(losses: ClassLosses | None) -> list[str]:
    """A sentence if classes lost more than the budget, beyond chance."""
    if losses is None or not losses.beyond:
        return []
    some = ", ".join(f"{each.name!r} from {each.before:.0%} to {each.after:.0%}" for each in losses.beyond[:3])
    rest = f" and {len(losses.beyond) - 3} more" if len(losses.beyond) > 3 else ""
    return [f"Warning: classes lose more than the whole may: {some}{rest}; see metric=worst-class or balanced."]


def headline(job: Job, found: SearchResult) -> str:
    """The result, as briefly as possible."""
    chosen = found.candidates[found.chosen]
    if found.chosen == 0:
        return verdict(job, found)
    early = "Stopped early: " if found.interrupted else ""
    if found.certificate is not None and found.certificate.certified:
        return f"{early}{_saved(found)} removed, certified: {_promised(job)}"
    metric, (before, after), _ = _measured(job, found)
    lost = before - after
    said = f"{100 * lost:.1f} points" if job.config.task.is_share else _as_text(job, lost)
    price = f"for {said} of {metric}" if lost > 0 else f"with no loss of {metric}"
    large = "" if chosen.passed else ", and still larger than requested"
    return f"{early}{_saved(found)} removed {price}{large}"


def _measured(job: Job, found: SearchResult) -> tuple[str, tuple[float, float], str]:
    """The metric, its values before and after, and the images they are from: the confirming ones if any judged."""
    known = found.certificate is not None and found.certificate.labelled is None  # otherwise only what is lost is
    tests = found.certificate.tests if found.certificate is not None and known else ()
    test = next((test for test in reversed(tests) if test.index == found.chosen), None)
    if test is not None:
        return in_words(job.config.metric), (test.before, test.after), "the confirming images"
    first, chosen = found.candidates[0], found.candidates[found.chosen]
    if first.score is not None and chosen.score is not None:
        return in_words(job.config.metric), (first.score, chosen.score), "the validation images"
    return job.config.task.metric_name, (first.accuracy, chosen.accuracy), "the validation images"


def _saved(found: SearchResult) -> str:
    first, chosen = found.candidates[0], found.candidates[found.chosen]
    saved, fewer = 1 - chosen.parameters / first.parameters, 1 - chosen.macs / first.macs
    return f"{share_of(saved)} of the parameters and {share_of(fewer)} of the multiply-adds"


def _side(row: CandidateRow, deployed: nn.Module) -> Side:
    return Side(row.accuracy, row.interval, row.parameters, row.macs, row.latency_ms, weight_bytes(deployed))


def _latencies(found: SearchResult, pipeline: Pipeline) -> list[float]:
    """The milliseconds per image of each candidate; those from the search if it measured them."""
    known = [candidate.latency_ms for candidate in found.candidates]
    if all(value is not None for value in known):
        return [float(value) for value in known if value is not None]
    models = {str(index): trial.deployed for index, trial in enumerate(found.trials)}
    shape = pipeline.spec.shape
    repeats = rounds(models, shape, seconds=_SECONDS)
    report = measure_latency(models, shape, batch_sizes=(1,), backends=("eager",), repeats=repeats)
    return [1000 * row.seconds for row in report.rows]


def latency_by(found: SearchResult, planner: CostPlanner | None) -> str:
    """What the latencies of the candidates are of: a program on this machine, or another device."""
    if any(candidate.latency_ms is None for candidate in found.candidates):
        return PYTORCH
    if planner is not None and planner.elsewhere and planner.table is not None:
        return planner.table.device
    return ONNX_RUNTIME if found.timed_in == "onnxruntime" else PYTORCH


def rounds(models: Mapping[str, nn.Module], shape: Sequence[int], *, images: int = 1, seconds: float) -> int:
    """How many rounds of `images` through each model fit into this many seconds: 3 to 20."""
    one = measure_latency(dict([next(iter(models.items()))]), shape, batch_sizes=(1,), backends=("eager",), repeats=2)
    return max(3, min(20, round(seconds / (one.rows[0].seconds * len(models) * images))))


def _importance(model: nn.Module, pipeline: Pipeline) -> dict[str, LayerImportance]:
    """Scales and Taylor scores of a few layers of the unpruned network, in singular-value order."""
    pairs = dict(find_layers(model, BasisPair))
    if not pairs:
        return {}
    scores = taylor_scores(model, pipeline.scoring.batches(), loss=pipeline.task)
    names = list(pairs)
    places = np.unique(np.linspace(0, len(names) - 1, min(_FIGURE_LAYERS, len(names))).round().astype(int))
    return {
        name: LayerImportance(
            tuple(pairs[name].scaling.scale.detach().double().cpu().tolist()), scores.layers[name].values
        )
        for name in (names[place] for place in places)
    }


def _matrix(predictions: Predictions, classes: int) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, predictions.confusion(classes)))


def _changed(
    before: Predictions, after: Predictions, test: LabelledImages, classes: Sequence[str]
) -> tuple[ChangedImage, ...]:
    """Some of the images that the two networks classify differently; first those that are wrong only now.

    None of somebody's own loader, whose inputs may be anything.
    """
    if isinstance(test, LoaderPart):
        return ()
    changed = np.flatnonzero(before.classes != after.classes)
    lost = before.hits[changed] & ~after.hits[changed]
    places = np.concatenate([changed[lost], changed[~lost]])[:_CHANGED_IMAGES].tolist()
    return tuple(
        ChangedImage(
            _as_png(test[index][0]),
            classes[before.labels[index]],
            classes[before.classes[index]],
            classes[after.classes[index]],
        )
        for index in places
    )


def _as_png(image: Tensor) -> str:
    """A thumbnail as a data URL."""
    return picture_url(picture_of(image), 64, Image.Resampling.BICUBIC)
