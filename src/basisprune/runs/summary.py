"""A search's outcome -> everything that is known of it, as JSON values."""

from __future__ import annotations

import base64
import io
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from basisprune.basis.layers import BasisPair
from basisprune.costs import LayerReport, ModelReport, measure
from basisprune.data import LabelledImages, Splits
from basisprune.deploy.latency import measure_latency
from basisprune.importance import taylor_scores
from basisprune.pipeline import Pipeline
from basisprune.search import Budget, Candidate, Found
from basisprune.torchkit.surgery import find_layers
from basisprune.training.intervals import wilson_interval
from basisprune.training.predict import Predictions, predict

_PACKAGES = ("basisprune", "torch", "timm", "torchvision", "accelerate", "numpy")
_CHANGED_IMAGES = 24
_FIGURE_LAYERS = 6
_SECONDS = 10.0  # that all measurements of the candidates' latency may take together


@dataclass(frozen=True)
class Outcome:
    """A search that has ended, with its networks as they are deployed, in the order of the candidates."""

    found: Found
    deployed: Sequence[nn.Module]
    pipeline: Pipeline
    budget: Budget | None

    @property
    def first(self) -> Candidate:
        """The unpruned network."""
        return self.found.candidates[0]

    @property
    def chosen(self) -> Candidate:
        """The network that was chosen."""
        return self.found.candidates[self.found.chosen]


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that decide on the outcome."""
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}


def summarise(outcome: Outcome, config: Mapping[str, Any], seed: int, command: str) -> dict[str, Any]:
    """All that is known of the outcome, as JSON values; the test images are looked at here, once."""
    found, pipeline = outcome.found, outcome.pipeline
    latencies = _latencies(outcome)
    rows = [asdict(candidate) for candidate in found.candidates]
    for index, (row, latency) in enumerate(zip(rows, latencies, strict=True)):
        row.pop("latency")
        row |= {"name": label(found.candidates[index]), "latency_ms": latency, "chosen": index == found.chosen}
    reference = {key: rows[0][key] for key in ("accuracy", "interval", "parameters", "macs", "latency_ms")}
    summary: dict[str, Any] = {
        "title": f"{config['model']}, {config['data']}",
        "command": command,
        "config": dict(config),
        "seed": seed,
        "versions": versions(),
        "device": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "created": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "headline": headline(outcome),
        "verdict": verdict(outcome),
        "interrupted": found.interrupted,
        "kept_to_budget": kept_to_budget(outcome),
        "budget": _budget(outcome.budget),
        "classes": list(pipeline.splits.classes),
        "reference": reference | {"bytes": weight_bytes(outcome.deployed[0])},
        "candidates": rows,
        "latency_by": "PyTorch" if found.candidates[0].latency is None else "the runtime of the budget",
        "layers": [asdict(layer) for layer in layer_reports(found.state.model, outcome.deployed[found.chosen])],
        "importance": _importance(found.reference.model, pipeline),
    }
    sizes = [{**rows[index], "bytes": weight_bytes(outcome.deployed[index])} for index in (0, found.chosen)]
    test = pipeline.splits.test
    if test is not None:
        prepared = pipeline.settings.train.prepared
        before, after = (predict(outcome.deployed[index], test, prepared=prepared) for index in (0, found.chosen))
        summary |= _on_test(before, after, sizes, test, pipeline.splits)
    return summary


def kept_to_budget(outcome: Outcome) -> bool:
    """Whether the chosen network is what was asked for: pruned, or small enough as it was."""
    budget = outcome.budget
    if budget is None:
        return True
    return outcome.chosen.passed and (outcome.found.chosen > 0 or not budget.is_about_accuracy)


def verdict(outcome: Outcome) -> str:
    """One plain sentence or two on what came out."""
    first, chosen = outcome.first, outcome.chosen
    early = "Stopped early; this is the best so far. " if outcome.found.interrupted else ""
    if outcome.found.chosen == 0 and kept_to_budget(outcome):
        return f"{early}The model keeps to the budget as it is. It is unpruned."
    if outcome.found.chosen == 0:
        none = "" if early else "No pruning that was tried makes it smaller and keeps to the budget. "
        return f"{early}{none}The model is unpruned."
    saved, fewer = 1 - chosen.parameters / first.parameters, 1 - chosen.macs / first.macs
    sentence = (
        f"{early}{_share(saved)} of the parameters and {_share(fewer)} of the multiply-adds removed; the accuracy on "
        f"the validation images went from {first.accuracy:.1%} to {chosen.accuracy:.1%}."
    )
    if chosen.undecided:
        low, high = chosen.drop_interval
        sentence += (
            f" The images are too few to be sure of the budget: the drop lies between {low:.1%} and {high:.1%} "
            "with 95 % confidence."
        )
    if not chosen.passed:
        sentence += " This is the smallest that was tried, and it is still larger than asked for."
    if first.interval[0] <= 1 / outcome.pipeline.splits.num_classes:
        sentence += " The unpruned model is hardly better than guessing: this means little, train it longer."
    return sentence


def headline(outcome: Outcome) -> str:
    """What came out, as short as it can be said."""
    first, chosen = outcome.first, outcome.chosen
    if outcome.found.chosen == 0:
        return verdict(outcome)
    saved, fewer = 1 - chosen.parameters / first.parameters, 1 - chosen.macs / first.macs
    price = f"for {100 * chosen.drop:.1f} points of accuracy" if chosen.drop > 0 else "at no loss of accuracy"
    early = "Stopped early: " if outcome.found.interrupted else ""
    large = "" if chosen.passed else ", and still larger than asked for"
    return f"{early}{_share(saved)} of the parameters and {_share(fewer)} of the multiply-adds removed {price}{large}"


def label(candidate: Candidate) -> str:
    """What to call a candidate: by what was removed of it."""
    if not candidate.basis_ratio and not candidate.filter_ratio:
        return "unpruned"
    ratios = {"basis": candidate.basis_ratio, "filters": candidate.filter_ratio}
    removed = ", ".join(f"{_share(ratio)} of the {name}" for name, ratio in ratios.items() if ratio)
    return removed + (", polished" if candidate.name.endswith("polished") else "")


def _share(value: float) -> str:
    """A fraction in per cent, as fine as it needs to be near 1.

    >>> _share(0.5), _share(0.9953)
    ('50%', '99.5%')
    """
    return f"{value:.0%}" if value < 0.98 else f"{value:.1%}"


def layer_reports(trained: nn.Module, deployed: nn.Module) -> list[LayerReport]:
    """The layers of the network as it was trained, with what each costs in the form that is deployed."""
    costs = {layer.name: layer for layer in measure(deployed).layers}
    rows = []
    for layer in measure(trained).layers:
        parts = [costs[name] for name in (layer.name, *_halves(layer.name)) if name in costs]
        note = layer.note or ("one conv in the deployed model" if layer.rank and len(parts) == 1 else "")
        cost = sum(part.parameters for part in parts), sum(part.macs for part in parts)
        rows.append(LayerReport(layer.name, layer.kind, layer.rank, layer.full_rank, *cost, note))
    return rows


def joined_report(model: nn.Module, shape: Sequence[int]) -> ModelReport:
    """What a network costs; the two halves of a layer that was folded are one row, with their rank."""
    report = measure(model, tuple(shape))
    by_name = {layer.name: layer for layer in report.layers}
    rows = []
    for layer in report.layers:
        stem, _, half = layer.name.rpartition(".")
        halves = [by_name[name] for name in _halves(stem) if name in by_name]
        if half not in ("basis", "scaling") or len(halves) < 2:
            rows.append(layer)
        elif half == "basis":
            cost = sum(part.parameters for part in halves), sum(part.macs for part in halves)
            rows.append(LayerReport(stem, layer.kind, *_ranks(model, stem), *cost, "split into two"))
    return replace(report, layers=tuple(rows))


def _ranks(model: nn.Module, name: str) -> tuple[int, int]:
    """The number of basis vectors of a folded pair, and the full rank of the layer that it stands for."""
    first, second = (model.get_submodule(half) for half in _halves(name))
    if isinstance(first, nn.Linear) and isinstance(second, nn.Linear):
        return first.out_features, min(first.in_features, second.out_features)
    conv: Any = first
    fan_in = conv.in_channels // conv.groups * math.prod(conv.kernel_size)
    outputs: Any = second.out_channels
    return conv.out_channels, conv.groups * min(fan_in, outputs // conv.groups)


def _halves(name: str) -> tuple[str, str]:
    return f"{name}.basis", f"{name}.scaling"


def weight_bytes(model: nn.Module) -> int:
    """How large a file of the model's weights is."""
    return len(save({name: value.contiguous().clone() for name, value in model.state_dict().items()}))


def _budget(budget: Budget | None) -> dict[str, Any]:
    if budget is None:
        return {"kind": "fixed", "value": None}
    kind, value = next((name, value) for name, value in vars(budget).items() if value is not None)
    return {"kind": kind, "value": value}


def _latencies(outcome: Outcome) -> list[float]:
    """The milliseconds for one image of each candidate, side by side; those of the search where it took them."""
    known = [candidate.latency for candidate in outcome.found.candidates]
    if all(value is not None for value in known):
        return [float(value) for value in known if value is not None]
    models = {str(index): model for index, model in enumerate(outcome.deployed)}
    shape = outcome.pipeline.spec.shape
    repeats = rounds(models, shape, seconds=_SECONDS)
    report = measure_latency(models, shape, batch_sizes=(1,), backends=("eager",), repeats=repeats)
    return [1000 * row.seconds for row in report.rows]


def rounds(models: Mapping[str, nn.Module], shape: Sequence[int], *, images: int = 1, seconds: float) -> int:
    """How many rounds of `images` through each of the models fit into so many seconds: 3 to 20."""
    one = measure_latency(dict([next(iter(models.items()))]), shape, batch_sizes=(1,), backends=("eager",), repeats=2)
    return max(3, min(20, round(seconds / (one.rows[0].seconds * len(models) * images))))


def _importance(model: nn.Module, pipeline: Pipeline) -> dict[str, dict[str, list[float]]]:
    """Scales and Taylor scores of a few layers of the unpruned network, in the order of the singular values."""
    pairs = dict(find_layers(model, BasisPair))
    if not pairs:
        return {}
    scores = taylor_scores(model, pipeline.scoring_batches())
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
    sizes: Sequence[Mapping[str, Any]],
    test: LabelledImages,
    splits: Splits,
) -> dict[str, Any]:
    def row(predictions: Predictions, size: Mapping[str, Any]) -> dict[str, Any]:
        hits = predictions.hits
        accuracy = {"accuracy": float(hits.mean()), "interval": wilson_interval(int(hits.sum()), len(hits))}
        return accuracy | {key: size[key] for key in ("parameters", "macs", "latency_ms", "bytes")}

    changed = np.flatnonzero(before.classes != after.classes)[:_CHANGED_IMAGES].tolist()
    return {
        "test": {"before": row(before, sizes[0]), "after": row(after, sizes[1])},
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


def picture_of(image: Tensor) -> Image.Image:
    """An image (C, H, W) of a dataset as a picture."""
    pixels = image if image.dtype == torch.uint8 else (image.clamp(0, 1) * 255).to(torch.uint8)
    array = pixels.permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


def _as_png(image: Tensor) -> str:
    """A small picture as a data address."""
    picture = picture_of(image)
    picture.thumbnail((64, 64))
    buffer = io.BytesIO()
    picture.save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
