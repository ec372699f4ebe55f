"""One call: the smallest model within the accuracy you can lose."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from basisprune.costs import measure
from basisprune.data import Splits, load_data
from basisprune.deploy.bundle import load_bundle
from basisprune.deploy.fold import deploy
from basisprune.errors import ConfigError, ModelError
from basisprune.pipeline import Pipeline, State
from basisprune.recipes import Recipe
from basisprune.runs.deliver import deliver
from basisprune.runs.settings import IN_PYTHON, ResultFolder, recipe_of, search_of
from basisprune.runs.summary import Outcome, summarise, versions
from basisprune.search import Axis, Budget, Candidate, Found, Search, SearchConfig, moves_of
from basisprune.transfer.model import TransferModel, transfer_model

Say = Callable[[str], None]


@dataclass(frozen=True)
class Compressed:
    """The smallest model that was found, in plain layers, ready to use.

    `history` are all candidates, the first being the unpruned network; `summary` is everything as JSON values.
    `original` is the unpruned network in the same form, and `trained` the chosen one before it was folded, which
    can be trained further.
    """

    model: nn.Module
    history: tuple[Candidate, ...]
    chosen: Candidate
    summary: Mapping[str, Any]
    original: nn.Module
    trained: nn.Module
    state: State
    data: Splits

    def report(self, path: str | Path) -> Path:
        """Writes the report, one self-contained HTML file."""
        from basisprune.report.html import write_report

        return write_report(self.summary, path)

    def save(
        self, folder: str | Path, *, onnx: bool | None = None, int8: bool = False, say: Say = lambda _: None
    ) -> Path:
        """Writes the result into a folder: summary, report, and the model as a bundle and as ONNX.

        `onnx` is by default whether the packages for it are installed; `int8` adds a quantised file. Raises
        CheckpointError for a folder that holds another result.
        """
        ResultFolder(Path(folder)).claim(self.summary["config"], self.summary["versions"])
        deliver(self, Path(folder), onnx=onnx, int8=int8, say=say)
        return Path(folder)


def compress(
    model: str | nn.Module,
    data: Any,
    budget: Budget | None = None,
    *,
    max_drop: float | None = None,
    ratios: tuple[float, float] | None = None,
    recipe: str | Mapping[str, Any] | Recipe = "quick",
    search: SearchConfig | Mapping[str, Any] | None = None,
    input_size: int | None = None,
    pretrained: bool = True,
    output: str | Path | None = None,
    onnx: bool | None = None,
    int8: bool = False,
    seed: int = 0,
    about: Mapping[str, Any] | None = None,
    command: str = "",
    say: Say = lambda _: None,
    watch: Callable[[Candidate], None] = lambda _: None,
) -> Compressed:
    """The smallest model within the budget, by default 1 % accuracy (`max_drop=0.01`).

    `model` is a transfer model, a folder of one that was saved, or what `transfer_model` takes; `data` is anything
    that `load_data` takes. The validation images judge, and the test images are touched once, at the end. With
    `ratios`, the fractions of basis vectors and filters to remove, nothing is searched.

    With `output`, a folder, every candidate is kept there, and a run that was killed goes on and ends with the
    same answer; at the end the folder holds all that `Compressed.save` writes. `about` and `command` are noted
    there and in the report. `say` gets a line for each step, `watch` each candidate.

    Raises CheckpointError, with the differences, for an `output` that belongs to a run with other settings.
    """
    budget = _one_budget(budget, max_drop, ratios)
    settings, plan = _seeded(recipe_of(recipe), seed), search_of(search)
    chosen = _noted(budget, ratios) | {"size": input_size, "pretrained": pretrained, "seed": seed}
    chosen |= {"onnx": onnx, "int8": int8}
    config: dict[str, Any] = {"model": _called(model), "data": _called(data)} | chosen | dict(about or {})
    config |= {"recipe": asdict(settings), "search": asdict(plan)}
    network, splits = starting_point(model, data, input_size=input_size, pretrained=pretrained, seed=seed)
    folder = None if output is None else Path(output)
    if folder is not None:
        for line in ResultFolder(folder).claim(config, versions()):
            say(f"{folder} was begun with another version, and goes on with this one: {line}")
    say(splits.describe())
    checkpoints = None if folder is None else folder / "candidates"
    pipeline = Pipeline(network, splits, settings, checkpoints=checkpoints, say=say)
    searching = Search(pipeline, budget or Budget(max_drop=0.0), plan, watch=watch)
    found = searching.run() if ratios is None else fixed(pipeline, plan, ratios, watch)
    states = searching.states if ratios is None else [found.reference, found.state]
    say("measuring what was found")
    deployed = [deploy(state.model, pipeline.spec, splits.classes) for state in states]
    outcome = Outcome(found, deployed, pipeline, budget)
    result = _result(outcome, summarise(outcome, config, seed, command))
    if folder is None:
        return result
    return replace(result, summary=deliver(result, folder, onnx=onnx, int8=int8, say=say))


def _result(outcome: Outcome, summary: Mapping[str, Any]) -> Compressed:
    return Compressed(
        model=outcome.deployed[outcome.found.chosen],
        history=outcome.found.candidates,
        chosen=outcome.chosen,
        summary=summary,
        original=outcome.deployed[0],
        trained=outcome.found.state.model,
        state=outcome.found.state,
        data=outcome.pipeline.splits,
    )


def starting_point(
    model: str | nn.Module,
    data: Any,
    *,
    input_size: int | None = None,
    pretrained: bool = True,
    seed: int = 0,
    **loading: Any,
) -> tuple[nn.Module, Splits]:
    """The network to start from, with its classes, and the images as it wants them; `loading` goes to `load_data`.

    Raises ConfigError for an `input_size` that a model which was trained before does not have.
    """
    torch.manual_seed(seed)
    size = None if input_size is None else (input_size, input_size)
    if isinstance(model, str) and Path(model).is_dir():
        model = load_bundle(model).model
        if not isinstance(model, TransferModel):
            raise ModelError("this bundle is folded, for use only; start from the one that `basisprune train` writes")
    if isinstance(model, nn.Module) and hasattr(model, "input_spec"):
        spec: Any = model.input_spec
        if size not in (None, spec.size):
            height, width = spec.size
            raise ConfigError(f"size: {input_size} given, but the model takes {height}x{width} images; leave it out")
        return model, load_data(data, size=spec.size, seed=seed, **loading)
    splits = load_data(data, size=size, seed=seed, **loading)
    by_name = isinstance(model, str) and ":" not in model
    network = transfer_model(model, splits.num_classes, pretrained=pretrained and by_name, input_size=input_size)
    wanted = network.input_spec.size
    if isinstance(data, str | os.PathLike) and size is None and wanted != (224, 224):
        splits = load_data(data, size=wanted, seed=seed, **loading)  # image files are resized as they are read
    return network, splits


def fixed(
    pipeline: Pipeline, plan: SearchConfig, ratios: tuple[float, float], watch: Callable[[Candidate], None]
) -> Found:
    """The network of the given ratios beside the unpruned one, as if a search had found it."""
    reference = pipeline.decomposed() if plan.framework.startswith("basis") else pipeline.dense()
    unpruned: dict[Axis, float] = {"basis": 1.0, "filters": 1.0}
    state, kept = reference, dict(unpruned)
    for move in moves_of(pipeline, plan.framework):
        ratio = ratios[0] if move.axis == "basis" else ratios[1]
        if ratio > 0:
            state, kept[move.axis] = move.prune(state, ratio, None), 1 - ratio
    candidates = []
    for each, left in ((reference, unpruned), (state, kept)):
        size = measure(deploy(each.model, pipeline.spec, pipeline.splits.classes))
        candidates.append(Candidate.of(each, reference, left, parameters=size.parameters, macs=size.macs))
        watch(candidates[-1])
    return Found(tuple(candidates), 1, state, reference)


def _one_budget(budget: Budget | None, max_drop: float | None, ratios: tuple[float, float] | None) -> Budget | None:
    """What to keep to, None for fixed ratios; raises ConfigError where several are given."""
    given = [value for value in (budget, max_drop, ratios) if value is not None]
    if len(given) > 1:
        raise ConfigError("compress: several of budget, max_drop and ratios given; pass one of them")
    if ratios is not None:
        faults = [
            f"{name}: {ratio} given; a fraction removed, 0 <= {name} < 1, is needed"
            for name, ratio in zip(("basis_ratio", "filter_ratio"), ratios, strict=True)
            if not 0 <= ratio < 1
        ]
        if faults:
            raise ConfigError.of("compress", faults)
        return None
    return budget or Budget(max_drop=0.01 if max_drop is None else max_drop)


def _noted(budget: Budget | None, ratios: tuple[float, float] | None) -> dict[str, Any]:
    """The budget or the ratios as they are named on the command line."""
    if budget is None:
        return dict(zip(("basis_ratio", "filter_ratio"), ratios or (), strict=True))
    return {name: value for name, value in vars(budget).items() if value is not None}


def _called(given: object) -> str:
    """What to call a model or data in the settings."""
    return str(given) if isinstance(given, str | os.PathLike) else f"a {type(given).__name__}{IN_PYTHON}"


def _seeded(recipe: Recipe, seed: int) -> Recipe:
    return replace(recipe, train=replace(recipe.train, seed=seed), finetune=replace(recipe.finetune, seed=seed))
