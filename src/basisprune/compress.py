"""One call: the smallest model within the accuracy you can lose."""

from __future__ import annotations

import base64
import io
import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from basisprune.checkpoint import write_text
from basisprune.config import Recipe, find_recipe
from basisprune.data import LabelledImages, PreparedBatches, Splits, load_data
from basisprune.errors import ConfigError, MissingExtraError
from basisprune.importance import taylor_scores
from basisprune.importance.taylor import basis_pairs
from basisprune.measure import measure
from basisprune.pipeline import Pipeline
from basisprune.predict import Predictions, predict
from basisprune.search import Budget, Candidate, Found, Search, SearchConfig, wilson_interval
from basisprune.transfer import transfer_model

_CHANGED_IMAGES = 24
_FIGURE_LAYERS = 6


@dataclass(frozen=True)
class Compressed:
    """The smallest model that was found; `history` are all candidates, `summary` is everything as JSON values."""

    model: nn.Module
    history: tuple[Candidate, ...]
    chosen: Candidate
    summary: Mapping[str, Any]

    def report(self, path: str | Path) -> Path:
        """Writes the report, one self-contained HTML file."""
        from basisprune.report.html import write_report

        return write_report(self.summary, path)


def compress(
    model: str | nn.Module,
    data: Any,
    budget: Budget | None = None,
    *,
    max_drop: float | None = None,
    recipe: str | Recipe = "quick",
    search: SearchConfig | None = None,
    input_size: int | None = None,
    pretrained: bool = True,
    output: str | Path | None = None,
    seed: int = 0,
    command: str = "",
    say: Callable[[str], None] = lambda _: None,
) -> Compressed:
    """The smallest model within the budget, by default 1 % accuracy (`max_drop=0.01`).

    `model` is a transfer model, or what `transfer_model` takes; `data` is anything that `load_data` takes. The
    validation images judge, and the test images are touched once, at the end. With `output`, a folder, every
    candidate is kept there, and a run that was killed goes on and ends with the same answer; the folder then
    holds `summary.json` and `report.html` too.
    """
    if budget is not None and max_drop is not None:
        raise ConfigError("compress: both budget and max_drop given; pass one of them")
    if budget is None:
        budget = Budget(max_drop=0.01 if max_drop is None else max_drop)
    settings = _seeded(find_recipe(recipe), seed)
    torch.manual_seed(seed)
    if isinstance(model, str) or not hasattr(model, "input_spec"):
        splits = load_data(data, size=None if input_size is None else (input_size, input_size), seed=seed)
        fresh = isinstance(model, str) and pretrained and ":" not in model
        model = transfer_model(model, splits.num_classes, pretrained=fresh, input_size=input_size)
    else:
        splits = load_data(data, seed=seed)
    folder = None if output is None else Path(output)
    checkpoints = None if folder is None else folder / "candidates"
    pipeline = Pipeline(model, splits, settings, checkpoints=checkpoints, say=say)
    found = Search(pipeline, budget, search).run()
    summary = _summary(found, pipeline, budget, search or SearchConfig(), seed, command)
    result = Compressed(found.state.model, found.candidates, found.candidates[found.chosen], summary)
    if folder is not None:
        write_text(folder / "summary.json", json.dumps(summary) + "\n")
        try:
            result.report(folder / "report.html")
        except MissingExtraError as error:
            say(f"report.html is not written: {error}; everything that it would show is in summary.json")
    return result


def _seeded(recipe: Recipe, seed: int) -> Recipe:
    return replace(recipe, train=replace(recipe.train, seed=seed), finetune=replace(recipe.finetune, seed=seed))


def _summary(
    found: Found, pipeline: Pipeline, budget: Budget, search: SearchConfig, seed: int, command: str
) -> dict[str, Any]:
    chosen = found.candidates[found.chosen]
    first = found.candidates[0]
    kind, value = next((name, value) for name, value in vars(budget).items() if value is not None)
    report = measure(found.state.model)
    packages = ("basisprune", "torch", "timm", "torchvision", "accelerate", "numpy")
    summary: dict[str, Any] = {
        "title": "basisprune",
        "command": command,
        "config": {"recipe": asdict(pipeline.settings), "search": asdict(search), "budget": asdict(budget)},
        "seed": seed,
        "versions": {"python": platform.python_version()} | {name: version(name) for name in packages},
        "device": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "verdict": verdict(first, chosen),
        "budget": {"kind": kind, "value": value},
        "classes": list(pipeline.splits.classes),
        "reference": {key: getattr(first, key) for key in ("accuracy", "interval", "parameters", "macs")},
        "candidates": [
            asdict(candidate) | {"chosen": index == found.chosen} for index, candidate in enumerate(found.candidates)
        ],
        "layers": [asdict(layer) for layer in report.layers],
        "importance": _importance(found, pipeline),
    }
    test = pipeline.splits.test
    if test is not None:
        prepared = pipeline.settings.train.prepared
        before = predict(found.reference.model, test, prepared=prepared)
        after = predict(found.state.model, test, prepared=prepared)
        summary |= _on_test(before, after, first, chosen, test, pipeline.splits)
    return summary


def verdict(first: Candidate, chosen: Candidate) -> str:
    """One plain sentence on what came out."""
    if chosen is first or chosen.name == first.name:
        return "No pruning keeps to the budget: even the mildest that was tried loses too much. The model is unpruned."
    saved = 1 - chosen.parameters / first.parameters
    fewer = 1 - chosen.macs / first.macs
    sentence = (
        f"{saved:.0%} of the parameters and {fewer:.0%} of the multiply-adds removed; the accuracy on the validation "
        f"images went from {first.accuracy:.1%} to {chosen.accuracy:.1%}."
    )
    if chosen.undecided:
        low, high = chosen.drop_interval
        sentence += (
            f" The images are too few to be sure of the budget: the drop lies between {low:.1%} and {high:.1%} "
            "with 95 % confidence."
        )
    if not chosen.passed:
        sentence += " This is the smallest that was tried, and it is still larger than asked for."
    return sentence


def _importance(found: Found, pipeline: Pipeline) -> dict[str, dict[str, list[float]]]:
    """Scales and Taylor scores of a few layers of the unpruned network, in the order of the singular values."""
    scores = taylor_scores(found.reference.model, PreparedBatches(pipeline.val, pipeline.spec, limit=512, shuffle=True))
    pairs = basis_pairs(found.reference.model)
    names = list(pairs)
    places = np.unique(np.linspace(0, len(names) - 1, min(_FIGURE_LAYERS, len(names))).round().astype(int))
    return {
        names[place]: {
            "scales": pairs[names[place]].scaling.scale.detach().double().cpu().tolist(),
            "taylor": list(scores.layers[names[place]].values),
        }
        for place in places
    }


def _on_test(
    before: Predictions,
    after: Predictions,
    first: Candidate,
    chosen: Candidate,
    test: LabelledImages,
    splits: Splits,
) -> dict[str, Any]:
    def row(predictions: Predictions, candidate: Candidate) -> dict[str, Any]:
        hits = predictions.hits
        return {
            "accuracy": float(hits.mean()),
            "interval": wilson_interval(int(hits.sum()), len(hits)),
            "parameters": candidate.parameters,
            "macs": candidate.macs,
        }

    changed = np.flatnonzero(before.classes != after.classes)[:_CHANGED_IMAGES].tolist()
    return {
        "test": {"before": row(before, first), "after": row(after, chosen)},
        "confusion": {
            "before": before.confusion(splits.num_classes),
            "after": after.confusion(splits.num_classes),
        },
        "changed": [
            {
                "image": _as_png(test[index][0]),
                "label": splits.classes[before.labels[index]],
                "before": splits.classes[before.classes[index]],
                "after": splits.classes[after.classes[index]],
            }
            for index in changed
        ],
    }


def _as_png(image: torch.Tensor) -> str:
    """A small picture (C, H, W) as a data address."""
    pixels = image if image.dtype == torch.uint8 else (image.clamp(0, 1) * 255).to(torch.uint8)
    array = pixels.permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    picture.thumbnail((64, 64))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
