"""Which backbone to start from: many are trained briefly, the best are compressed, and one is recommended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar, Unpack, cast

import pydantic
from torch import nn

from basisprune.budget import Budget
from basisprune.data.load import Source
from basisprune.data.reading import Reading
from basisprune.deploy.bundle import load_bundle
from basisprune.errors import BasisPruneError, CheckpointError, ConfigError, TrainingError
from basisprune.files import read_checked, user_path, write_checked
from basisprune.listener import Listener, Silence, counted
from basisprune.results import BackboneRow, Portfolio, RunSummary
from basisprune.runs.job import ModelSource, code_of, load_images
from basisprune.runs.options import Options, RunConfig, configure
from basisprune.runs.output import BUNDLE, IN_PYTHON, SUMMARY, OutputFolder, refuse_links
from basisprune.runs.start import check_start
from basisprune.runs.tested import TESTS
from basisprune.sweeps.backbones import AUTO, PORTFOLIO, at_hand, available, common_size, start_from
from basisprune.sweeps.cells import Backbone, Cell, Kind, absolute, slug
from basisprune.sweeps.front import with_front
from basisprune.sweeps.halving import Halving, Probed, best_of
from basisprune.sweeps.pools import Here, Processes
from basisprune.sweeps.ray_pool import OnRay
from basisprune.sweeps.running import Pool, Running, closing, run_cells, started_by_a_launcher
from basisprune.sweeps.stages import PORTFOLIO as TOLD
from basisprune.sweeps.stages import PortfolioFile, Searched, Trained, reference_of
from basisprune.sweeps.work import Given, perform
from basisprune.torchkit.references import refuse_code
from basisprune.training.metrics import metric_name
from basisprune.types import JsonValue

FOLDER = "backbones"
_KNOWN = "backbones.json"
T = TypeVar("T", bound=JsonValue)


@dataclass(frozen=True)
class PortfolioConfig:
    """How a portfolio is gone through: the epochs of the first, short training, and how many are compressed.

    All train for `probe_epochs`, the better half goes on with twice as many, until at most `keep` are left. `weights`
    is a folder with files of weights for timm names, such as resnet50.safetensors.
    """

    keep: int = 3
    probe_epochs: int = 1
    weights: str | Path | None = None

    @property
    def halving(self) -> Halving:
        """How backbones are dropped; raises ConfigError for numbers below 1."""
        return Halving(self.probe_epochs, self.keep)


@dataclass(frozen=True)
class Recommended:
    """The result of a portfolio: the summary of the recommended network, which has the front too, and the folder."""

    summary: RunSummary
    folder: Path

    @property
    def model(self) -> nn.Module:
        """The recommended network, in plain layers."""
        return load_bundle(self.folder / BUNDLE).model

    @property
    def portfolio(self) -> Portfolio:
        """All backbones, and the networks that came of them."""
        assert self.summary.portfolio is not None
        return self.summary.portfolio


@dataclass(frozen=True)
class _Known(JsonValue):
    """The backbones of a run, found out when it was first started."""

    backbones: tuple[Backbone, ...]
    missing: dict[str, str]


@dataclass(frozen=True)
class _PortfolioFolder(OutputFolder):
    """The output folder of a portfolio, which has something to go on from as soon as a backbone has."""

    @property
    def is_begun(self) -> bool:
        """Whether anything was stored."""
        return super().is_begun or (self.path / FOLDER).exists()


def compress_portfolio(
    models: str | Sequence[ModelSource],
    data: Source,
    budget: Budget | None = None,
    *,
    output: str | Path,
    plan: PortfolioConfig | None = None,
    running: Running | None = None,
    listener: Listener | None = None,
    **options: Unpack[Options],
) -> Recommended:
    """The smallest model within the budget, whichever of several backbones it comes from.

    `models` is "auto" for a portfolio of timm models, small and large, or the names of some; in Python also anything
    else that `compress` starts from. All are trained briefly and the less promising dropped, by the validation images;
    the rest are compressed. Then one front of accuracy against parameters and milliseconds is there for all, in
    `summary.portfolio`, and the recommended network is certified like that of `compress`.

    A loss of accuracy (`max_drop`) is counted in relation to the most accurate backbone, fully trained. The confirming
    images are looked at once, for the networks of the recommended backbone only. Weights that are neither on this
    machine nor to be had are reported, and their backbones left out. A run that was stopped goes on, in `output`.

    Raises ConfigError for wrong settings, ModelError if no backbone can be had, and TrainingError if all have failed.
    """
    if budget is not None:
        if options.get(budget.kind) is not None:
            raise ConfigError(f"compress_portfolio: budget and {budget.kind} given; pass one of them")
        options = cast("Options", {**options, budget.kind: vars(budget)[budget.kind]})
    running, plan = running or Running(), plan or PortfolioConfig()
    ready = _Ready.of(models, data, output, plan, running, options)
    hears, halving = listener or Silence(), plan.halving
    config, given, folder = ready.config, ready.given, ready.folder
    with folder.held(ready.settings, hears):
        known = _known(ready, plan, hears)
        if running.ray_address is not None:  # other machines have caches of their own
            known = replace(known, backbones=tuple(replace(each, cached=False) for each in known.backbones))
        config = replace(config, size=common_size(known.backbones, config.size))
        coordinator = _Coordinator(folder.path, absolute(_called(data)), config, halving, hears, running.retries)
        with closing(_pool(running, replace(given, config=config), hears)) as pool:
            summary = coordinator.run(known, pool)
    return Recommended(summary, folder.path)


def check_portfolio(
    models: str | Sequence[ModelSource],
    data: Source,
    *,
    output: str | Path,
    plan: PortfolioConfig | None = None,
    running: Running | None = None,
    listener: Listener | None = None,
    **options: Unpack[Options],
) -> None:
    """Raise the error that `compress_portfolio` would end with, as far as it can be known; write and fetch nothing.

    Where the weights of all backbones are to be fetched, only the settings, the folder and the images are looked at.
    """
    plan, hears = plan or PortfolioConfig(), listener or Silence()
    ready = _Ready.of(models, data, output, plan, running or Running(), options)
    given, root = ready.given, ready.folder.path / FOLDER
    ready.folder.check(ready.settings)
    refuse_links(ready.folder.path)
    weights, pretrained = _weights_of(plan), ready.config.pretrained
    found = at_hand(ready.names, root, weights=weights, pretrained=pretrained, given=given.models)
    every = [backbone or Backbone(name, str(root / slug(name))) for name, backbone in found.items()]
    size = common_size(every, ready.config.size)
    config = replace(ready.config, size=size)
    reading = Reading(config.groups, config.strict, listener=hears)
    load_images(data, None if size is None else (size, size), config, reading)
    faults = []
    for backbone in filter(None, found.values()):
        try:
            job = start_from(backbone, given.models.get(backbone.name), data, config, hears)
            check_start(job, OutputFolder(Path(backbone.folder)), job.noted())
        except BasisPruneError as error:
            faults.append(f"{backbone.name}: {error}")
        else:
            return  # the run goes on with those that can be trained
    if len(faults) == len(found):
        raise TrainingError.of("no backbone is left", faults)


@dataclass(frozen=True)
class _Ready:
    """A portfolio whose settings were checked, and the folder that it belongs into."""

    config: RunConfig
    given: Given
    names: list[str]
    folder: _PortfolioFolder
    settings: dict[str, pydantic.JsonValue]

    @classmethod
    def of(
        cls,
        models: str | Sequence[ModelSource],
        data: Source,
        output: str | Path,
        plan: PortfolioConfig,
        running: Running,
        options: Options,
    ) -> _Ready:
        """The portfolio of these settings; raises the error for those that are wrong."""
        config = configure(options)
        given, names = _named(models, data, config, running)
        refuse_code(code for name in names for code in code_of(name, data, None))
        folder = _PortfolioFolder(user_path(output, "output").resolve())
        return cls(config, given, names, folder, _noted(models, data, config, plan))


class _Coordinator:
    """Goes through the stages of a portfolio; what each has found is in files, so that nothing is done twice."""

    def __init__(
        self, root: Path, data: str, config: RunConfig, halving: Halving, listener: Listener, retries: int
    ) -> None:
        self.root, self.data, self.config, self.halving = root, data, config, halving
        self.listener, self.retries = listener, retries
        self.rows: dict[str, BackboneRow] = {}
        self.images: set[str] = set()

    def run(self, known: _Known, pool: Pool) -> RunSummary:
        """The summary of the recommended network."""
        for name, why in known.missing.items():
            self.rows[name] = BackboneRow(name, "missing", why)
        left = list(known.backbones)
        for epochs, count in self.halving.rungs(len(left)):
            left = self._halved(left, epochs, count, pool)
        trained = self._stage("start", left, Trained, pool)
        best = max(trained, key=lambda each: trained[each].value)
        relative = isinstance(self.config.goal, Budget) and self.config.goal.max_drop is not None
        reference = reference_of(best, self.root) if relative else None
        epochs = self.config.recipe.train.epochs
        for each, about in trained.items():
            self.rows[each.name] = BackboneRow(each.name, "compressed", "", epochs, about.accuracy, about.parameters)
        found = self._stage("search", list(trained), Searched, pool, best=reference)
        told = self._recommended(found, best if relative else None)
        by_name = {each.name: each for each in known.backbones}
        chosen = by_name[told.recommended]
        if relative:
            reference = reference_of(by_name[told.reference], self.root)
        return self._delivered(told, self._cell("deliver", chosen, best=reference), pool)

    def _halved(self, left: list[Backbone], epochs: int, count: int, pool: Pool) -> list[Backbone]:
        """The backbones that go on after a short training."""
        found = self._stage("probe", left, Trained, pool, epochs=epochs)
        probed = [Probed(each.name, about.value, about.size) for each, about in found.items()]
        going = best_of(probed, count)
        for each, about in found.items():
            said = "" if each.name in going else "others were more accurate, or equally accurate and smaller"
            status = "compressed" if each.name in going else "dropped"
            row = BackboneRow(each.name, status, said, epochs, about.accuracy, about.parameters)  # type: ignore[arg-type]
            self.rows[each.name] = row
            after = f"{about.accuracy:.1%} after {counted(epochs, 'epoch')}"
            self.listener.say(f"{each.name}: {after}, {'dropped' if said else 'goes on'}")
        return [each for each in found if each.name in going]

    def _stage(
        self,
        kind: Kind,
        backbones: Sequence[Backbone],
        result: type[T],
        pool: Pool,
        *,
        epochs: int = 0,
        best: Backbone | None = None,
    ) -> dict[Backbone, T]:
        """What a stage found for each backbone; those that failed are left out, and recorded."""
        cells = [self._cell(kind, each, epochs=epochs, best=best) for each in backbones]
        found: dict[Backbone, T] = {}
        for outcome in run_cells(cells, pool, self.retries, self.listener, done=lambda cell: _has(cell, result)):
            cell, name = outcome.cell, outcome.cell.backbone.name
            if outcome.failure is None:
                found[cell.backbone] = result.from_json(read_checked(cell.result))
            else:
                self.rows[name] = BackboneRow(name, "failed", outcome.failure.error)
        if not found:
            faults = [f"{row.name}: {row.said}" for row in self.rows.values() if row.status == "failed"]
            raise TrainingError.of("no backbone is left", faults)
        self.images |= {about.images for about in found.values()}  # type: ignore[attr-defined]
        if len(self.images) > 1:
            raise CheckpointError(
                f"{self.root}: the backbones were trained on different images, which have changed since the run began; "
                "use another folder"
            )
        return found

    def _cell(self, kind: Kind, backbone: Backbone, *, epochs: int = 0, best: Backbone | None = None) -> Cell:
        options: dict[str, pydantic.JsonValue] = {**self.config.noted(), "trust_code": self.config.trust_code}
        code = tuple(each for one in (backbone, best) if one for each in code_of(one.name, self.data, None))
        return Cell(backbone.name, kind, backbone, self.data, options, str(self.root), epochs, best, code=code)

    def _recommended(self, found: dict[Backbone, Searched], best: Backbone | None) -> Portfolio:
        """All that was found, with the network to deliver; the one that confirming images were looked at for stays."""
        able = {each: about for each, about in found.items() if about.best is not None}
        if not able:
            raise TrainingError("the search from the most accurate backbone failed, so that nothing can be recommended")
        chosen = min(able, key=lambda each: able[each].order)
        points = [
            replace(point, chosen=each == chosen and index == about.best)
            for each, about in found.items()
            for index, point in enumerate(about.points)
        ]
        told = Portfolio(
            reference=(best or chosen).name,
            recommended=chosen.name,
            backbones=tuple(self.rows.values()),
            points=with_front(points),
            latency_by=next(iter(found.values())).latency_by,
        )
        earlier = _decided(self.root)
        if earlier is None or (earlier.recommended, earlier.reference) == (told.recommended, told.reference):
            return told
        self.listener.say(
            f"{told.recommended} would be recommended now, but the confirming images have been looked at for "
            f"{earlier.recommended}, which stays; use another folder for a new choice"
        )
        return earlier

    def _delivered(self, told: Portfolio, cell: Cell, pool: Pool) -> RunSummary:
        if not _is_delivered(self.root, self.config, told):
            write_checked(self.root / TOLD, PortfolioFile(told).to_json().encode())
            (outcome,) = run_cells([cell], pool, self.retries, self.listener)
            if outcome.failure is not None:
                raise TrainingError(f"the result could not be delivered: {outcome.failure.error}")
        return RunSummary.read(self.root / SUMMARY)


def _has(cell: Cell, result: type[JsonValue]) -> bool:
    """Whether the stage of a backbone was done before."""
    try:
        return bool(result.from_json(read_checked(cell.result)))
    except (OSError, BasisPruneError):
        return False


def _decided(root: Path) -> Portfolio | None:
    """What an earlier start has recommended and tested on the confirming images; None if it has not come so far."""
    try:
        return PortfolioFile.from_json(read_checked(root / TOLD)).portfolio if (root / TESTS).exists() else None
    except (OSError, BasisPruneError):
        return None


def _is_delivered(root: Path, config: RunConfig, told: Portfolio) -> bool:
    """Whether the result is there, with the same files as are asked for now."""
    try:
        old, before = RunSummary.read(root / SUMMARY), PortfolioFile.from_json(read_checked(root / TOLD)).portfolio
    except (OSError, BasisPruneError):
        return False
    same = all(old.config.get(name) == getattr(config, name) for name in ("onnx", "int8"))
    return same and not old.interrupted and before == told


def _named(
    models: str | Sequence[ModelSource], data: Source, config: RunConfig, running: Running
) -> tuple[Given, list[str]]:
    """What has no name, and the names of all models; raises ConfigError if another process would need the former."""
    listed = [models] if isinstance(models, str) and models != AUTO else models
    if listed == AUTO:
        listed = PORTFOLIO
    names = [_model_name(model, place) for place, model in enumerate(listed)]
    called = zip(names, listed, strict=True)
    unnamed = {name: model for name, model in called if not isinstance(model, str | os.PathLike)}
    is_named = isinstance(data, str | os.PathLike)
    faults = _of_one_model(config)
    if not isinstance(config.goal, Budget):
        faults.append("basis_ratio or filter_ratio given; pass a budget, by which backbones can be compared")
    faults += started_by_a_launcher()
    if running.jobs > 1 or running.ray_address is not None:
        what = [*unnamed, *([] if is_named else ["the images"])]
        what += [] if isinstance(config.metric, str) else [metric_name(config.metric)]
        faults += [f"{each} given in Python, which another process cannot have; pass names and paths" for each in what]
    if faults:
        raise ConfigError.of("compress_portfolio", faults)
    return Given(unnamed, None if is_named else data), names


def _of_one_model(config: RunConfig) -> list[str]:
    """Faults for settings that only one model can have."""
    faults = []
    if not config.task.is_classification:
        faults.append(f"task: {config.task_name} given; only classifiers are chosen from: pass one model")
    if config.weights is not None:
        faults.append("weights: given, which are those of one model; pass a folder of weights for several")
    if config.keep_head:
        faults.append("keep_head: given, but backbones get a head for these classes; pass one model to keep its own")
    return faults


def _model_name(model: ModelSource, place: int) -> str:
    if isinstance(model, str | os.PathLike):
        return str(model)
    return f"{type(model).__name__} {place + 1}"


def _called(data: Source) -> str:
    return str(data) if isinstance(data, str | os.PathLike) else f"a {type(data).__name__}{IN_PYTHON}"


def _noted(
    models: str | Sequence[ModelSource], data: Source, config: RunConfig, plan: PortfolioConfig
) -> dict[str, pydantic.JsonValue]:
    """All settings as JSON values, under the names that they have on the command line."""
    listed: list[pydantic.JsonValue] | None = None
    if models != AUTO:
        given = [models] if isinstance(models, str) else models
        listed = [_model_name(model, place) for place, model in enumerate(given)]
    chosen: dict[str, pydantic.JsonValue] = {
        "model": AUTO,
        "models": listed,
        "keep": plan.keep,
        "probe_epochs": plan.probe_epochs,
        "weights_folder": None if plan.weights is None else str(plan.weights),
    }
    return {**chosen, "data": _called(data), **config.noted()}


def _known(ready: _Ready, plan: PortfolioConfig, listener: Listener) -> _Known:
    """The backbones of the run: those that were available when it was first started."""
    root, given = ready.folder.path, ready.given
    path = root / _KNOWN
    if path.exists():
        known = _Known.from_json(read_checked(path))
        if others := [each.name for each in known.backbones if each.name not in ready.names]:
            raise CheckpointError(f"{path}: lists {', '.join(others)}, which nobody asked for; use another folder")
        here = (replace(each, folder=str(root / FOLDER / slug(each.name))) for each in known.backbones)
        return replace(known, backbones=tuple(here))  # wherever the folder has been moved to
    weights, pretrained = _weights_of(plan), ready.config.pretrained
    found = available(ready.names, root / FOLDER, listener, weights=weights, pretrained=pretrained, given=given.models)
    known = _Known(found.backbones, found.missing)
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    write_checked(path, known.to_json().encode())
    return known


def _weights_of(plan: PortfolioConfig) -> Path | None:
    """The folder with files of weights; raises ConfigError if it is none."""
    weights = None if plan.weights is None else user_path(plan.weights, "weights").resolve()
    if weights is not None and not weights.is_dir():
        raise ConfigError(f"weights: {weights} is no folder; pass one with files such as resnet50.safetensors")
    return weights


def _pool(running: Running, given: Given, listener: Listener) -> Pool:
    """Where the cells run: on Ray, in processes of their own or, one after the other, here."""
    if running.ray_address is not None:
        return OnRay(running)
    return Processes(running) if running.jobs > 1 else Here(lambda cell: perform(cell, listener, given))
