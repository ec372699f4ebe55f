"""Which backbone to start from: many are trained briefly, the best are compressed, and one is recommended."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, cast

import pydantic
from torch import nn

from basisprune.budget import Budget
from basisprune.budget.metrics import metric_name
from basisprune.callback import Callback, NullCallback, counted
from basisprune.data.load import Reading, Source
from basisprune.deploy.bundle import load_bundle
from basisprune.errors import BasisPruneError, CheckpointError, ConfigError, TrainingError, broken_rules
from basisprune.files import user_path
from basisprune.results import BackboneRow, Portfolio, RunSummary
from basisprune.runs.folder import BUNDLE, IN_PYTHON, SUMMARY, OutputFolder, refuse_links
from basisprune.runs.load import AnyModel, code_of, load_images
from basisprune.runs.preflight import preflight
from basisprune.runs.record import TESTS
from basisprune.runs.settings import Options, configure
from basisprune.sweeps.backbones import (
    AUTO,
    PORTFOLIO,
    Available,
    BackboneSource,
    available,
    common_size,
    on_this_machine,
)
from basisprune.sweeps.running import (
    AT_LEAST_ONE,
    Backbone,
    Kind,
    Pool,
    Run,
    Running,
    absolute,
    open_pool,
    refuse_launcher,
    run_all,
    slug,
)
from basisprune.sweeps.stages import PORTFOLIO as PORTFOLIO_FILE
from basisprune.sweeps.stages import InMemory, Searched, Trained, do_stage, job_of, reference_folder
from basisprune.sweeps.table import pareto_front
from basisprune.torchkit.imports import refuse_code

FOLDER = "backbones"
_AVAILABLE = "backbones.json"
T = TypeVar("T", Trained, Searched)
File = TypeVar("File", Trained, Searched, Portfolio, RunSummary)


@dataclass(frozen=True)
class PortfolioConfig:
    """How backbones are dropped, by successive halving.

    All train for `probe_epochs`, the better half for twice as many, until at most `keep` are left, which are
    compressed. `weights` is a folder with files of weights for timm names, such as resnet50.safetensors.
    """

    keep: int = 3
    probe_epochs: int = 1
    weights: str | Path | None = None

    def __post_init__(self) -> None:
        if faults := broken_rules(self, ("keep probe_epochs", *AT_LEAST_ONE)):
            raise ConfigError.of("PortfolioConfig", faults)

    def rounds(self, backbones: int) -> list[tuple[int, int]]:
        """Return the epochs of each round, and how many backbones are left after it.

        >>> PortfolioConfig(keep=2).rounds(9)
        [(1, 5), (2, 3), (4, 2)]
        """
        found: list[tuple[int, int]] = []
        while backbones > self.keep:
            backbones = max(math.ceil(backbones / 2), self.keep)
            found.append((self.probe_epochs << len(found), backbones))
        return found


@dataclass(frozen=True)
class Recommended:
    """The result of a portfolio: the folder, and the summary of the recommended network with the Pareto front."""

    summary: RunSummary
    folder: Path

    @property
    def model(self) -> nn.Module:
        return load_bundle(self.folder / BUNDLE).model

    @property
    def portfolio(self) -> Portfolio:
        return cast("Portfolio", self.summary.portfolio)


def compress_portfolio(
    models: str | Sequence[AnyModel],
    data: Source,
    budget: Budget | None = None,
    *,
    output: str | Path,
    plan: PortfolioConfig | None = None,
    running: Running | None = None,
    callback: Callback | None = None,
    **options: Unpack[Options],
) -> Recommended:
    """Find the smallest model within the budget, whichever of several backbones it comes from.

    All backbones are trained briefly and the less promising dropped, by the validation images; the rest are
    compressed, and the best network is certified like that of `compress`. A loss of accuracy (`max_drop`) is relative
    to the most accurate backbone, fully trained. The confirming images are used once, for the networks of the
    recommended backbone only. A run that was stopped resumes.

    Args:
        models: "auto" for a portfolio of timm models, names of timm models, or anything that `compress` starts from.
        data: Anything that `load_data` takes.
        budget: Also possible as an option, such as `max_drop=0.01`, which is the default.
        output: The folder for all results.
        plan: How many backbones are kept, and how long they train first.
        running: Processes or a Ray cluster; by default everything is done in this process.
        callback: Receives the progress.
        options: Those of `compress`.

    Returns:
        The recommended network; `summary.portfolio` has the Pareto front of accuracy, parameters and milliseconds, and
        lists the backbones that failed or whose weights are not available.

    Raises:
        ConfigError: For wrong settings.
        ModelError: If no backbone is available.
        TrainingError: If all backbones failed.

    Example: `compress_portfolio("auto", "photos", output="out", max_drop=0.01).model`
    """
    if budget is not None:
        if options.get(budget.kind) is not None:
            raise ConfigError(f"compress_portfolio: budget and {budget.kind} given; pass one of them")
        options = cast("Options", {**options, budget.kind: vars(budget)[budget.kind]})
    portfolio = _Portfolio(models, data, output, plan, running, callback, **options)
    with portfolio.folder.held(portfolio.settings, portfolio.callback):
        return Recommended(portfolio.run(), portfolio.root)


def check_portfolio(models: str | Sequence[AnyModel], data: Source, **given: Any) -> None:
    """Raise the error that `compress_portfolio` would end with, as far as it can be known without fetching weights."""
    portfolio = _Portfolio(models, data, **given)
    portfolio.folder.check(portfolio.settings)
    refuse_links(portfolio.root)
    found = on_this_machine(portfolio.names, portfolio.source)
    portfolio.set_common_size(portfolio.names)
    config, callback = portfolio.config, portfolio.callback
    size, reading = config.size, Reading(config.groups, config.strict, callback=callback)
    load_images(data, None if size is None else (size, size), config, reading)
    faults = []
    for backbone in filter(None, found.values()):
        run = portfolio.stage_run("start", backbone)
        try:
            job = job_of(run, callback, portfolio.in_memory)
            preflight(job, OutputFolder(run.folder), job.to_dict())
            return  # one that can be trained is enough
        except BasisPruneError as error:
            faults.append(f"{backbone.name}: {error}")
    if len(faults) == len(found):
        raise TrainingError.of("no backbone is left", faults)


class _PortfolioFolder(OutputFolder):
    """The output folder of a portfolio, which can resume as soon as one of its backbones can."""

    @property
    def is_begun(self) -> bool:
        return super().is_begun or (self.path / FOLDER).exists()


class _Portfolio:
    """Checked settings, and the stages; each writes its result to a file, so that nothing is repeated."""

    def __init__(
        self,
        models: str | Sequence[AnyModel],
        data: Source,
        output: str | Path,
        plan: PortfolioConfig | None = None,
        running: Running | None = None,
        callback: Callback | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.config, self.plan = configure(options), plan or PortfolioConfig()
        self.running, self.callback = running or Running(), callback or NullCallback()
        listed = PORTFOLIO if models == AUTO else [models] if isinstance(models, str) else models
        self.names = [
            str(model) if _is_named(model) else f"{type(model).__name__} {n}" for n, model in enumerate(listed, 1)
        ]
        self.data = str(data) if _is_named(data) else f"a {type(data).__name__}{IN_PYTHON}"
        unnamed = {name: model for name, model in zip(self.names, listed, strict=True) if not _is_named(model)}
        self.in_memory = InMemory(unnamed, None if _is_named(data) else data)
        refuse_launcher("compress_portfolio")
        if faults := self._faults():
            raise ConfigError.of("compress_portfolio", faults)
        refuse_code(code for name in self.names for code in code_of(name, data, None))
        self.folder = _PortfolioFolder(user_path(output, "output").resolve())
        self.root = self.folder.path
        weights = self.plan.weights
        self.settings: dict[str, pydantic.JsonValue] = {
            "model": AUTO,
            "models": None if models == AUTO else [*self.names],
            "keep": self.plan.keep,
            "probe_epochs": self.plan.probe_epochs,
            "weights_folder": None if weights is None else str(weights),
            "data": self.data,
            **self.config.to_dict(),
        }
        self.rows: dict[str, BackboneRow] = {}
        self.images: set[str] = set()

    def _faults(self) -> list[str]:
        config, metric, faults = self.config, self.config.metric, []
        if config.task.head_size(1) is None:
            faults.append(f"task: {config.task_name} given; a portfolio is for classification: pass one model")
        if config.weights is not None:
            faults.append("weights: given, which are those of one model; pass a folder of weights for several")
        if config.keep_head:
            faults.append("keep_head: given, but backbones get a head for these classes; pass one model")
        if not isinstance(config.goal, Budget):
            faults.append("basis_ratio or filter_ratio given; pass a budget, by which backbones can be compared")
        if self.running.jobs > 1 or self.running.ray_address is not None:
            in_python = [*self.in_memory.models, *(["the images"] if self.in_memory.data is not None else [])]
            in_python += [] if isinstance(metric, str) else [metric_name(metric)]
            cannot = "given in Python, which another process cannot have; pass names and paths"
            faults += [f"{each} {cannot}" for each in in_python]
        return faults

    @property
    def source(self) -> BackboneSource:
        """Where the backbones come from; raises ConfigError if the folder of weights is none."""
        weights = None if self.plan.weights is None else user_path(self.plan.weights, "weights").resolve()
        if weights is not None and not weights.is_dir():
            raise ConfigError(f"weights: {weights} is no folder; pass one with files such as resnet50.safetensors")
        return BackboneSource(weights, self.config.pretrained, self.in_memory.models)

    def set_common_size(self, names: Sequence[str]) -> None:
        self.config = replace(self.config, size=common_size(names, self.config.size))
        self.in_memory = replace(self.in_memory, config=self.config)

    def stage_run(self, kind: Kind, backbone: Backbone, *, epochs: int = 0, best: Backbone | None = None) -> Run:
        options: dict[str, pydantic.JsonValue] = {**self.config.to_dict(), "trust_code": self.config.trust_code}
        code = tuple(each for one in (backbone, best) if one for each in code_of(one.name, self.data, None))
        folder, data = self.root / FOLDER / slug(backbone.name), absolute(self.data)
        return Run(backbone.name, kind, folder, backbone, data, options, self.root, epochs, best, code)

    def run(self) -> RunSummary:
        available = self._available()
        self.rows = {name: BackboneRow(name, "missing", why) for name, why in available.missing.items()}
        left: Collection[Backbone] = available.backbones
        if self.running.ray_address is not None:  # other machines have caches of their own
            left = [replace(each, cached=False) for each in left]
        by_name = {each.name: each for each in left}
        self.set_common_size(list(by_name))
        with open_pool(self.running, self.callback, lambda run: do_stage(run, self.callback, self.in_memory)) as pool:
            for epochs, count in self.plan.rounds(len(left)):
                left = self._halve(left, epochs, count, pool)
            trained = self._stage("start", left, Trained, pool)
            for backbone, about in trained.items():
                self._record(backbone, about, self.config.recipe.train.epochs)
            best = max(trained, key=lambda each: trained[each].value)
            reference = self._reference(best)
            found = self._stage("search", trained, Searched, pool, best=reference)
            portfolio = self._recommend(found, reference)
            if odd := [name for name in (portfolio.reference, portfolio.recommended) if name not in by_name]:
                raise CheckpointError(f"{self.root / PORTFOLIO_FILE}: names {odd[0]!r}, which is none of these models")
            if not self._is_delivered(portfolio):
                portfolio.write(self.root / PORTFOLIO_FILE)
                reference = self._reference(by_name[portfolio.reference])
                run = self.stage_run("deliver", by_name[portfolio.recommended], best=reference)
                (ended,) = run_all([run], pool, self.running.retries, self.callback)
                if ended.failure is not None:
                    raise TrainingError(f"the result could not be delivered: {ended.failure.error}")
        return RunSummary.read(self.root / SUMMARY)

    def _available(self) -> Available:
        """Return the backbones that were available when the run was first started."""
        path = self.root / _AVAILABLE
        if not path.exists():
            found = available(self.names, self.source, self.callback)
            (self.root / FOLDER).mkdir(parents=True, exist_ok=True)
            found.write(path)
            return found
        known = Available.read(path)
        if others := [each.name for each in known.backbones if each.name not in self.names]:
            raise CheckpointError(f"{path}: lists {', '.join(others)}, which the settings do not; use another folder")
        return known

    def _stage(
        self,
        kind: Kind,
        backbones: Collection[Backbone],
        result: type[T],
        pool: Pool,
        *,
        epochs: int = 0,
        best: Backbone | None = None,
    ) -> dict[Backbone, T]:
        """Return the results of a stage; record the backbones that failed, and leave them out."""
        runs = [self.stage_run(kind, each, epochs=epochs, best=best) for each in backbones]
        found: dict[Backbone, T] = {}
        is_done = lambda run: _if_sound(result, run.result) is not None  # noqa: E731
        for ended in run_all(runs, pool, self.running.retries, self.callback, is_done):
            name = ended.run.name
            if ended.failure is None:
                found[ended.run.backbone] = result.read(ended.run.result)
            else:
                self.rows[name] = BackboneRow(name, "failed", ended.failure.error)
        if not found:
            faults = [f"{row.name}: {row.said}" for row in self.rows.values() if row.status == "failed"]
            raise TrainingError.of("no backbone is left", faults)
        self.images |= {about.images for about in found.values()}
        if len(self.images) > 1:
            raise CheckpointError(
                f"{self.root}: the backbones were trained on different images, which have changed since the run began; "
                "use another folder"
            )
        return found

    def _halve(self, backbones: Collection[Backbone], epochs: int, count: int, pool: Pool) -> list[Backbone]:
        """Return the backbones that are best after a short training, in their order."""
        found = self._stage("probe", backbones, Trained, pool, epochs=epochs)
        kept = best_first(found)[:count]
        for backbone, about in found.items():
            why = "" if backbone in kept else "others were more accurate, or equally accurate and smaller"
            self._record(backbone, about, epochs, why)
            how = "dropped" if why else "kept"
            self.callback.log(f"{backbone.name}: {about.accuracy:.1%} after {counted(epochs, 'epoch')}, {how}")
        return [backbone for backbone in found if backbone in kept]

    def _record(self, backbone: Backbone, about: Trained, epochs: int, why_dropped: str = "") -> None:
        status: Literal["dropped", "compressed"] = "dropped" if why_dropped else "compressed"
        name = backbone.name
        self.rows[name] = BackboneRow(name, status, why_dropped, epochs, about.accuracy, about.parameters)

    def _reference(self, best: Backbone) -> Backbone | None:
        """Copy the trained network that accuracies are compared with, which may be another when a run resumes."""
        if cast("Budget", self.config.goal).max_drop is None:
            return None
        copy = reference_folder(self.root, best)
        if not copy.exists():
            partial = copy.with_name(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(self.root / FOLDER / copy.name, partial, ignore=shutil.ignore_patterns(".*"))
            partial.rename(copy)
        return best

    def _recommend(self, found: Mapping[Backbone, Searched], reference: Backbone | None) -> Portfolio:
        """Choose the network to deliver; keep an earlier choice that was tested on the confirming images."""
        able = {each: about for each, about in found.items() if about.best is not None}
        if not able:
            raise TrainingError("the search from the most accurate backbone failed, so that nothing can be recommended")
        chosen = min(able, key=lambda each: able[each].order)
        points = [
            replace(point, chosen=each == chosen and index == about.best)
            for each, about in found.items()
            for index, point in enumerate(about.points)
        ]
        portfolio = Portfolio(
            reference=(reference or chosen).name,
            recommended=chosen.name,
            backbones=tuple(self.rows.values()),
            points=pareto_front(points),
            latency_by=found[chosen].latency_by,
        )
        before = _if_sound(Portfolio, self.root / PORTFOLIO_FILE) if (self.root / TESTS).exists() else None
        if before is None or (before.recommended, before.reference) == (portfolio.recommended, portfolio.reference):
            return portfolio
        self.callback.log(
            f"{portfolio.recommended} would be recommended now, but the confirming images have been used for "
            f"{before.recommended}, which stays; use another folder for a new choice"
        )
        return before

    def _is_delivered(self, portfolio: Portfolio) -> bool:
        summary = _if_sound(RunSummary, self.root / SUMMARY)
        if summary is None or summary.interrupted or _if_sound(Portfolio, self.root / PORTFOLIO_FILE) != portfolio:
            return False
        return all(summary.config.get(name) == getattr(self.config, name) for name in ("onnx", "int8"))


def best_first(trained: Mapping[Backbone, Trained]) -> list[Backbone]:
    """Sort backbones, the most accurate first, and of two that are equally accurate the smaller."""
    return sorted(trained, key=lambda each: (-trained[each].value, trained[each].size))


def _if_sound(kind: type[File], path: Path) -> File | None:
    try:
        return kind.read(path)
    except CheckpointError:
        return None


def _is_named(source: object) -> bool:
    return isinstance(source, str | os.PathLike)
