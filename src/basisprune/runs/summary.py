"""A finished search -> all its results as one RunSummary."""

from __future__ import annotations

import base64
import io
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair
from basisprune.budget import Budget
from basisprune.candidates import Found, share
from basisprune.data import LabelledImages
from basisprune.deploy.latency import measure_latency
from basisprune.deploy.layer_costs import layer_reports, weight_bytes
from basisprune.importance import taylor_scores
from basisprune.pipeline import Pipeline
from basisprune.results import (
    BeforeAndAfter,
    CandidateRow,
    ChangedImage,
    Confusion,
    LayerImportance,
    Limit,
    RunSummary,
    Side,
)
from basisprune.runs.job import Job
from basisprune.runs.output import versions
from basisprune.torchkit.surgery import find_layers
from basisprune.training.intervals import wilson_interval
from basisprune.training.predict import Predictions, predict

_CHANGED_IMAGES = 24
_FIGURE_LAYERS = 6
_SECONDS = 10.0  # time limit for measuring the latency of all candidates


def summarise(job: Job, pipeline: Pipeline, found: Found, command: str) -> RunSummary:
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
    by_budget = found.candidates[0].latency_ms is not None
    test, confusion, changed = _on_test(found, pipeline, sides)
    return RunSummary(
        title=f"{job.model}, {job.data}",
        command=command,
        config=job.noted(),
        seed=job.config.seed,
        versions=versions(),
        device=f"{platform.machine()}, {torch.get_num_threads()} threads",
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        headline=headline(job, found),
        verdict=verdict(job, found),
        interrupted=found.interrupted,
        kept_to_budget=kept_to_budget(job, found),
        budget=Limit.of(job.config.goal),
        classes=tuple(pipeline.splits.classes),
        reference=sides[0],
        candidates=rows,
        latency_by="the runtime of the budget" if by_budget else "PyTorch",
        layers=tuple(layer_reports(found.state.model, found.trials[found.chosen].deployed)),
        importance=_importance(found.reference.model, pipeline),
        test=test,
        confusion=confusion,
        changed=changed,
    )


def kept_to_budget(job: Job, found: Found) -> bool:
    """Whether the chosen network meets the goal: it is pruned, or already small enough."""
    goal = job.config.goal
    if not isinstance(goal, Budget):
        return found.chosen > 0  # a run that was stopped early has not reached the ratios
    return found.candidates[found.chosen].passed and (found.chosen > 0 or not goal.is_about_accuracy)


def verdict(job: Job, found: Found) -> str:
    """The result in one or two plain sentences."""
    first, chosen = found.candidates[0], found.candidates[found.chosen]
    early = "Stopped early; this is the best result so far. " if found.interrupted else ""
    if found.chosen == 0 and kept_to_budget(job, found):
        return f"{early}The model is already within the budget. It is unpruned."
    if found.chosen == 0:
        none = "" if early else "No candidate is smaller and within the budget. "
        return f"{early}{none}The model is unpruned."
    sentence = (
        f"{early}{_saved(found)} removed; accuracy on the validation images went from {first.accuracy:.1%} to "
        f"{chosen.accuracy:.1%}."
    )
    if chosen.undecided:
        low, high = chosen.drop_interval
        sentence += (
            f" There are too few images to be sure of the budget: the drop is between {low:.1%} and {high:.1%} "
            "with 95 % confidence."
        )
    if not chosen.passed:
        sentence += " This is the smallest candidate, and it is still larger than requested."
    if first.interval[0] <= 1 / job.splits.num_classes:
        sentence += " The unpruned model is hardly better than guessing, so this means little; train it longer."
    return sentence


def headline(job: Job, found: Found) -> str:
    """The result, as briefly as possible."""
    chosen = found.candidates[found.chosen]
    if found.chosen == 0:
        return verdict(job, found)
    price = f"for {100 * chosen.drop:.1f} points of accuracy" if chosen.drop > 0 else "with no loss of accuracy"
    early = "Stopped early: " if found.interrupted else ""
    large = "" if chosen.passed else ", and still larger than requested"
    return f"{early}{_saved(found)} removed {price}{large}"


def _saved(found: Found) -> str:
    first, chosen = found.candidates[0], found.candidates[found.chosen]
    saved, fewer = 1 - chosen.parameters / first.parameters, 1 - chosen.macs / first.macs
    return f"{share(saved)} of the parameters and {share(fewer)} of the multiply-adds"


def _side(row: CandidateRow, deployed: nn.Module) -> Side:
    return Side(row.accuracy, row.interval, row.parameters, row.macs, row.latency_ms, weight_bytes(deployed))


def _latencies(found: Found, pipeline: Pipeline) -> list[float]:
    """The milliseconds per image of each candidate; those from the search if it measured them."""
    known = [candidate.latency_ms for candidate in found.candidates]
    if all(value is not None for value in known):
        return [float(value) for value in known if value is not None]
    models = {str(index): trial.deployed for index, trial in enumerate(found.trials)}
    shape = pipeline.spec.shape
    repeats = rounds(models, shape, seconds=_SECONDS)
    report = measure_latency(models, shape, batch_sizes=(1,), backends=("eager",), repeats=repeats)
    return [1000 * row.seconds for row in report.rows]


def rounds(models: Mapping[str, nn.Module], shape: Sequence[int], *, images: int = 1, seconds: float) -> int:
    """How many rounds of `images` through each model fit into this many seconds: 3 to 20."""
    one = measure_latency(dict([next(iter(models.items()))]), shape, batch_sizes=(1,), backends=("eager",), repeats=2)
    return max(3, min(20, round(seconds / (one.rows[0].seconds * len(models) * images))))


def _importance(model: nn.Module, pipeline: Pipeline) -> dict[str, LayerImportance]:
    """Scales and Taylor scores of a few layers of the unpruned network, in singular-value order."""
    pairs = dict(find_layers(model, BasisPair))
    if not pairs:
        return {}
    scores = taylor_scores(model, pipeline.scoring_batches())
    names = list(pairs)
    places = np.unique(np.linspace(0, len(names) - 1, min(_FIGURE_LAYERS, len(names))).round().astype(int))
    return {
        name: LayerImportance(
            tuple(pairs[name].scaling.scale.detach().double().cpu().tolist()), scores.layers[name].values
        )
        for name in (names[place] for place in places)
    }


def _on_test(
    found: Found, pipeline: Pipeline, sides: Sequence[Side]
) -> tuple[BeforeAndAfter | None, Confusion | None, tuple[ChangedImage, ...]]:
    splits = pipeline.splits
    if splits.test is None:
        return None, None, ()
    prepared = pipeline.settings.train.prepared
    networks = [found.trials[index].deployed for index in (0, found.chosen)]
    before, after = (predict(network, splits.test, prepared=prepared) for network in networks)
    rows = [_judged(side, predictions) for side, predictions in zip(sides, (before, after), strict=True)]
    matrices = (_matrix(predictions, splits.num_classes) for predictions in (before, after))
    return BeforeAndAfter(*rows), Confusion(*matrices), _changed(before, after, splits.test, splits.classes)


def _judged(side: Side, predictions: Predictions) -> Side:
    hits = predictions.hits
    interval = wilson_interval(int(hits.sum()), len(hits))
    return Side(float(hits.mean()), interval, side.parameters, side.macs, side.latency_ms, side.bytes)


def _matrix(predictions: Predictions, classes: int) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, predictions.confusion(classes)))


def _changed(
    before: Predictions, after: Predictions, test: LabelledImages, classes: Sequence[str]
) -> tuple[ChangedImage, ...]:
    """Some of the images that the two networks classify differently."""
    places = np.flatnonzero(before.classes != after.classes)[:_CHANGED_IMAGES].tolist()
    return tuple(
        ChangedImage(
            _as_png(test[index][0]),
            classes[before.labels[index]],
            classes[before.classes[index]],
            classes[after.classes[index]],
        )
        for index in places
    )


def picture_of(image: Tensor) -> Image.Image:
    """An image (C, H, W) of a dataset as a PIL image."""
    pixels = image if image.dtype == torch.uint8 else (image.clamp(0, 1) * 255).to(torch.uint8)
    array = pixels.permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def _as_png(image: Tensor) -> str:
    """A thumbnail as a data URL."""
    picture = picture_of(image)
    picture.thumbnail((64, 64))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
