"""The stages of a portfolio, each a run: a short training, a whole one, the search, and the delivery of the best."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

from basisprune.budget import Budget
from basisprune.budget.certify import EQUAL
from basisprune.budget.metrics import value_of
from basisprune.callback import Callback
from basisprune.data.load import Source
from basisprune.data.manifest import keep_images, manifest_of
from basisprune.deploy.export.onnx import has_onnx
from basisprune.deploy.latency import Backend
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import State
from basisprune.results import FrontPoint, Portfolio, RunSummary
from basisprune.runs.certify import ONNX_RUNTIME, PYTORCH
from basisprune.runs.compress import conclude
from basisprune.runs.folder import OutputFolder
from basisprune.runs.load import AnyModel, Job
from basisprune.runs.preflight import preflight
from basisprune.runs.settings import Options, RunConfig, configure
from basisprune.search import Search
from basisprune.search.candidates import ALL, SearchResult
from basisprune.sweeps.backbones import start_from
from basisprune.sweeps.running import Backbone, Run, slug
from basisprune.types import JsonValue

PORTFOLIO = "portfolio.json"


@dataclass(frozen=True)
class InMemory:
    """What was given in Python and has no name: models by theirs, images, settings."""

    models: Mapping[str, AnyModel] = field(default_factory=dict)
    data: Source | None = None
    config: RunConfig | None = None


@dataclass(frozen=True)
class Trained(JsonValue):
    """A backbone after a training: its accuracy, its `value` in the metric of the budget, and what it costs.

    `images` is the digest of all images with their roles, which must be the same for all backbones.
    """

    accuracy: float
    value: float
    parameters: int
    size: float
    images: str


@dataclass(frozen=True)
class Searched(JsonValue):
    """The networks found from a backbone, and the index of the one to recommend; None if there is none.

    `order` ranks that one among those of other backbones: certified before estimated, then by its cost.
    """

    points: tuple[FrontPoint, ...]
    best: int | None
    order: tuple[float, ...]
    latency_by: str
    images: str


def do_stage(run: Run, callback: Callback, in_memory: InMemory | None = None) -> None:
    """Do one stage of a portfolio, from where it was stopped."""
    stages = {"probe": probe, "start": start, "search": search, "deliver": deliver}
    stages[run.kind](run, callback, in_memory or InMemory())


def job_of(run: Run, callback: Callback, in_memory: InMemory | None = None) -> Job:
    """Prepare the network, images and settings of a run."""
    given = in_memory or InMemory()
    config = given.config or configure(cast("Options", run.options))
    data = run.data if given.data is None else given.data
    return start_from(run.backbone, given.models.get(run.backbone.name), data, config, run.folder, callback)


def probe(run: Run, callback: Callback, in_memory: InMemory) -> None:
    """Train a backbone for a few epochs and write how good it is; remove its checkpoints."""
    job = job_of(run, callback, in_memory)
    recipe = job.config.recipe
    short = replace(recipe, train=replace(recipe.train, epochs=run.epochs))
    folder = run.root / "probes" / f"{run.folder.name}-{run.epochs}"
    short_job = replace(job, config=replace(job.config, recipe=short))
    pipeline = short_job.pipeline(folder, callback, planned=False)
    BackboneSearch(pipeline, job).trained(pipeline.dense()).write(run.result)
    shutil.rmtree(folder, ignore_errors=True)


def start(run: Run, callback: Callback, in_memory: InMemory) -> None:
    """Train a backbone by the whole recipe, in the folder of its search, and write how good it is."""
    with _prepared(run, callback, in_memory) as (job, pipeline):
        found = BackboneSearch(pipeline, job)
        found.trained(found.unpruned()).write(run.result)


def search(run: Run, callback: Callback, in_memory: InMemory) -> None:
    """Search for the smallest networks that start from a backbone, relative to the best one, and write them.

    A backbone that exceeds the budget unpruned is compressed relative to itself, for the Pareto front only.
    """
    with _prepared(run, callback, in_memory) as (job, pipeline):
        own = _searched(run, job, pipeline, callback, in_memory)
        own.searched(own.run(), run.backbone.name).write(run.result)


def deliver(run: Run, callback: Callback, in_memory: InMemory) -> None:
    """Certify the networks of the recommended backbone, by images that no other stage uses, and write the result."""
    portfolio = Portfolio.read(run.root / PORTFOLIO)
    with _prepared(run, callback, in_memory) as (job, pipeline):
        keep_images(run.root, job.splits, callback)
        own = _searched(run, job, pipeline, callback, in_memory)
        amend = partial(_with_portfolio, portfolio=portfolio, is_compared=own.reference is not None)
        conclude(job, pipeline, own.run(), OutputFolder(run.root), amend=amend)


def _with_portfolio(
    summary: RunSummary, result: SearchResult, *, portfolio: Portfolio, is_compared: bool
) -> RunSummary:
    """Add the portfolio to the summary; if `is_compared`, its first candidate is the best backbone, unpruned."""
    first, *others = summary.candidates
    recommended, reference, place = portfolio.recommended, portfolio.reference, result.chosen - is_compared
    message = f"Started from {recommended}, out of {len(portfolio.backbones)} backbones"
    if is_compared:
        first = replace(first, name=f"{reference}, {first.name}")
        message += f", and compared with {reference}, unpruned"
    if place < 0:
        message = f"It is {reference}: the networks from {recommended} exceed the budget on new images"
        recommended, place = reference, 0
    own = [point for point in portfolio.points if point.group == recommended]
    delivered = next(iter(own[place:]), None)
    points = tuple(replace(point, chosen=point is delivered) for point in portfolio.points)
    return replace(
        summary,
        candidates=(first, *others),
        verdict=f"{summary.verdict} {message}.",
        portfolio=replace(portfolio, recommended=recommended, points=points),
    )


class BackboneSearch(Search):
    """The search from one backbone among several; accuracy is relative to the `best` one, if it is given."""

    eligible = True
    """Whether its networks may be recommended."""

    def __init__(self, pipeline: Pipeline, job: Job, best: State | None = None) -> None:
        config = job.config
        super().__init__(pipeline, config.goal, config.search, reference=best, promise=config.guarantee)
        self.metric = config.metric
        self.has_file = has_onnx() if config.onnx is None else config.onnx

    def unpruned(self) -> State:
        self.pipeline.claim_folder()
        return self._unpruned(self.pipeline.start(self.framework))

    def run(self) -> SearchResult:
        """Try the best backbone's network first, then this one's, unpruned, then those made from it."""
        own = self.unpruned()
        self.judge(self.reference or own, ALL)
        if self.reference is not None:
            self.judge(own, ALL)
        self._try_candidates(self.pipeline.start(self.framework))
        return self._result()

    def is_within(self, state: State, best: State) -> bool:
        """Whether a network is estimated to be within the budget, relative to the best one."""
        return self.value(state) >= self._budget.least_accuracy(self.value(best)) - EQUAL

    def trained(self, state: State) -> Trained:
        size = self.scale.size(state)
        sizes = {"params": size.parameters, "macs": size.macs, "latency": size.latency_ms or size.macs}
        accuracy, value = state.outcomes.value, value_of(self.metric, state.outcomes)
        return Trained(accuracy, value, size.parameters, float(sizes[self.optimize]), self._images)

    def searched(self, found: SearchResult, name: str) -> Searched:
        own = found.trials[0 if self.reference is None else 1 :]
        points, orders = [], {}
        for place, trial in enumerate(own):
            candidate = trial.candidate
            # Of the ONNX file that would be delivered; of PyTorch where there is none.
            backend: Backend = self.scale.program(trial.deployed) if self.has_file else "eager"
            measure = partial(self.scale.measured, trial.deployed, backend)
            latency = self.pipeline.store.number(candidate.steps, "file", measure)
            sizes = candidate.parameters, candidate.macs, latency
            points.append(FrontPoint(name, candidate.label, candidate.accuracy, candidate.interval, *sizes))
            order = candidate.order(self.optimize)
            if not self._budget.is_about_accuracy:
                failed = not candidate.passed
                orders[place] = (float(failed), *(() if failed else (1 - candidate.accuracy,)), *order)
            elif candidate.passed and self.eligible:
                is_estimate = self.standard is None or self.standard.confirming is None
                orders[place] = (float(is_estimate), *order)
        best = min(orders, key=orders.__getitem__, default=None)
        program = ONNX_RUNTIME if self.has_file else PYTORCH
        return Searched(tuple(points), best, () if best is None else orders[best], program, self._images)

    @property
    def _budget(self) -> Budget:
        return cast("Budget", self.goal)  # portfolios refuse ratios

    @property
    def _images(self) -> str:
        return manifest_of(self.pipeline.splits).digest


def _searched(run: Run, job: Job, pipeline: Pipeline, callback: Callback, in_memory: InMemory) -> BackboneSearch:
    """Prepare the search from the run's backbone, relative to the best one if it may be recommended."""
    best, own = run.best, BackboneSearch(pipeline, job)
    if best is None or best.name == run.backbone.name:
        return own
    other = replace(run, backbone=best, folder=reference_folder(run.root, best))
    other_job = job_of(other, callback, in_memory)
    reference = BackboneSearch(other_job.pipeline(OutputFolder(other.folder).stages, callback), other_job).unpruned()
    if own.is_within(own.unpruned(), reference):
        return BackboneSearch(pipeline, job, reference)
    callback.log(f"{run.backbone.name} exceeds the budget itself, and is compressed for the Pareto front only")
    own.eligible = False
    return own


def reference_folder(root: Path, best: Backbone) -> Path:
    """Where the trained network of the best backbone is copied to, which all others read while it is searched."""
    return root / "reference" / slug(best.name)


@contextmanager
def _prepared(run: Run, callback: Callback, in_memory: InMemory) -> Iterator[tuple[Job, Pipeline]]:
    """Yield the job and its pipeline, and lock the folder of the backbone."""
    job, folder = job_of(run, callback, in_memory), OutputFolder(run.folder)
    preflight(job, folder, job.to_dict(), callback)
    with folder.held(job.to_dict(), callback):
        keep_images(folder.path, job.splits, callback)
        yield job, job.pipeline(folder.stages, callback)
