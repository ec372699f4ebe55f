"""The stages of a portfolio, each a cell: a short training, a whole one, the search, and the delivery of the best."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import nn

from basisprune.budget import Budget
from basisprune.budget.certify import EQUAL
from basisprune.budget.planning import CostPlanner
from basisprune.data.roles import keep_images, manifest_of
from basisprune.deploy.export.runtime import has_onnx
from basisprune.files import read_checked, user_path, write_checked
from basisprune.listener import Listener
from basisprune.pipeline import Pipeline
from basisprune.results import FrontPoint, Portfolio, RunSummary
from basisprune.runs.certifying import ONNX_RUNTIME, PYTORCH, Certified
from basisprune.runs.compress import Compressed, certify_job
from basisprune.runs.job import Job, factory_of
from basisprune.runs.output import OutputFolder
from basisprune.runs.start import check_start
from basisprune.runs.summary import summarise
from basisprune.search import Search
from basisprune.search.candidates import ALL, Found
from basisprune.stage_store import StageStore
from basisprune.states import State
from basisprune.sweeps.cells import Backbone, Cell
from basisprune.sweeps.work import Given, job_of
from basisprune.training.intervals import wilson_interval
from basisprune.training.metrics import value_of
from basisprune.types import JsonValue

PORTFOLIO = "portfolio.json"


@dataclass(frozen=True)
class Trained(JsonValue):
    """A backbone after a training: how good it is on the validation images, and its size.

    `value` is in what the budget is counted in, `size` in what the result is to have least of. `images` is the digest
    of all images with their roles, which must be the same for all backbones.
    """

    accuracy: float
    value: float
    parameters: int
    size: float
    images: str


@dataclass(frozen=True)
class Searched(JsonValue):
    """The networks that came of a backbone, and the place of the one to recommend; None if there is none.

    `order` ranks that one among those of other backbones, the less the better: whether it is only estimated to be
    certified, then its sizes or, where the budget is one of size, its error.
    """

    points: tuple[FrontPoint, ...]
    best: int | None
    order: tuple[float, ...]
    latency_by: str
    images: str


@dataclass(frozen=True)
class PortfolioFile(JsonValue):
    """What the delivery is told of the whole portfolio."""

    portfolio: Portfolio


def probe(cell: Cell, listener: Listener, given: Given) -> None:
    """Trains a backbone for a few epochs and writes how good it is; its checkpoints go."""
    job = job_of(cell, listener, given)
    recipe = job.config.recipe
    short = replace(recipe, train=replace(recipe.train, epochs=cell.epochs))
    folder = Path(cell.root) / "probes" / f"{cell.folder.name}-{cell.epochs}"
    pipeline = Pipeline(job.network, job.splits, short, checkpoints=folder, listener=listener)
    search = Among(pipeline, job)
    _write(cell, search.trained(pipeline.dense()))
    shutil.rmtree(folder, ignore_errors=True)


def start(cell: Cell, listener: Listener, given: Given) -> None:
    """Trains a backbone by the whole recipe, in the folder of its search, and writes how good it is."""
    with _at_work(cell, listener, given) as (job, pipeline):
        search = Among(pipeline, job)
        _write(cell, search.trained(search.unpruned()))


def search(cell: Cell, listener: Listener, given: Given) -> None:
    """Searches for the smallest networks that come of a backbone, and writes what was found.

    A loss of accuracy is counted in relation to the best backbone. One that is not within the budget itself is
    compressed in relation to itself: it has its points on the front, but is not recommended.
    """
    with _at_work(cell, listener, given) as (job, pipeline):
        among, found = _found(cell, job, pipeline, listener, given)
        _write(cell, among.searched(found, cell.backbone.name))


def deliver(cell: Cell, listener: Listener, given: Given) -> None:
    """Certifies what the search from the recommended backbone found, and writes the result to the root.

    The confirming images are looked at here, for the first time, and the networks of one backbone only.
    """
    told = PortfolioFile.from_json(read_checked(Path(cell.root) / PORTFOLIO)).portfolio
    with _at_work(cell, listener, given) as (job, pipeline):
        keep_images(Path(cell.root), job.splits, listener)
        among, found = _found(cell, job, pipeline, listener, given)
        promise, certified = job.config.promised, Certified(found)
        if promise is not None:
            certified = certify_job(job, found, promise, listener, folder=Path(cell.root))
        listener.say("measuring the result")
        summary = summarise(job, pipeline, certified.found, cell.command)
        summary = _of_portfolio(summary, told, certified.found.chosen, compared=among.reference is not None)
        prepared = job.config.recipe.train.prepared
        factory = factory_of(job)
        result = Compressed(summary, certified.found, job.splits, prepared, certified.files, promise, factory=factory)
        result.delivered(Path(cell.root), onnx=job.config.onnx, int8=job.config.int8, listener=listener)


def _of_portfolio(summary: RunSummary, told: Portfolio, chosen: int, *, compared: bool) -> RunSummary:
    """The summary that tells of all backbones, with the network that is delivered marked among their points.

    If the search was `compared` with another backbone, its first candidate is that one's unpruned network.
    """
    first, *others = summary.candidates
    said = f"Started from {told.recommended}, out of {len(told.backbones)} backbones."
    recommended, place = told.recommended, chosen - compared
    if compared:
        first = replace(first, name=f"{told.reference}, {first.name}")
        said = f"{said[:-1]}, and compared with {told.reference}, unpruned."
    if place < 0:
        said = f"It is {told.reference}: what came of {recommended} does not keep to the budget on new images."
        recommended, place = told.reference, 0
    counts: dict[str, int] = {}
    points = []
    for point in told.points:
        counts[point.group] = counts.get(point.group, -1) + 1
        points.append(replace(point, chosen=point.group == recommended and counts[point.group] == place))
    return replace(
        summary,
        candidates=(first, *others),
        verdict=f"{summary.verdict} {said}",
        portfolio=replace(told, recommended=recommended, points=tuple(points)),
    )


class Among(Search):
    """The search from one backbone among several; with `best`, accuracy is compared with that network's."""

    def __init__(self, pipeline: Pipeline, job: Job, best: State | None = None) -> None:
        super().__init__(pipeline, job.config.goal, job.config.search, reference=best, promise=job.config.promised)
        self.config_of_run = job.config

    def unpruned(self) -> State:
        """The network that would be deployed without pruning."""
        self.pipeline.claim_folder()
        return self._unpruned(self.pipeline.start(self.framework))

    def run(self) -> Found:
        """All networks that were tried: the best backbone's first, then this one's, unpruned, then what comes of it."""
        own = self.unpruned()
        self._judge(self.reference or own, ALL)
        if self.reference is not None:
            self._judge(own, ALL)
        self._try_candidates(self.pipeline.start(self.framework))
        return Found(tuple(self.trials), self._best(), False, self._to_test(), timed_in=self.scale.timed_in)

    def is_within(self, state: State, best: State) -> bool:
        """Whether a network is within the budget, by the estimate, in relation to the best one."""
        assert isinstance(self.goal, Budget)
        return self._value(state) >= self.goal.least_accuracy(self._value(best)) - EQUAL

    def trained(self, state: State) -> Trained:
        """How good the network is, and how large as it would be deployed."""
        size = self.scale.size(state)
        sizes = {"params": size.parameters, "macs": size.macs, "latency": size.latency_ms or size.macs}
        metric = self.config_of_run.metric
        return Trained(
            float(state.hits.mean()),
            value_of(metric, state.answers),
            size.parameters,
            float(sizes[self._optimize]),
            manifest_of(self.pipeline.splits).digest,
        )

    def searched(self, found: Found, name: str) -> Searched:
        """The points of what was found, and the best of them, in relation to other backbones."""
        own = range(0 if self.reference is None else 1, len(found.trials))
        points = []
        for index in own:
            candidate, deployed = found.trials[index].candidate, found.trials[index].deployed
            steps = candidate.steps
            latency = self.pipeline.store.number(steps, "file", partial(self.file_milliseconds, deployed))
            hits = found.trials[index].state.hits
            interval = wilson_interval(int(hits.sum()), len(hits))
            sizes = candidate.parameters, candidate.macs, latency
            points.append(FrontPoint(name, candidate.label, candidate.accuracy, interval, *sizes))
        best, order = self._recommended(found, list(own))
        by = ONNX_RUNTIME if self.has_file else PYTORCH
        images = manifest_of(self.pipeline.splits).digest
        return Searched(tuple(points), None if best is None else best - own.start, order, by, images)

    def _recommended(self, found: Found, own: list[int]) -> tuple[int | None, tuple[float, ...]]:
        candidates = found.candidates
        assert isinstance(self.goal, Budget)
        if self.goal.is_about_accuracy:
            if self.reference is None and not self.counts:
                return None, ()
            passing = [index for index in own if candidates[index].passed]
            estimated = float(self.standard is None or self.standard.confirming is None)
            orders = {index: (estimated, *candidates[index].order(self._optimize)) for index in passing}
        else:
            small = {index: float(not candidates[index].passed) for index in own}
            orders = {
                index: (
                    small[index],
                    *((1 - candidates[index].accuracy,) if not small[index] else ()),
                    *candidates[index].order(self._optimize),
                )
                for index in own
            }
        if not orders:
            return None, ()
        best = min(orders, key=orders.__getitem__)
        return best, orders[best]

    counts: bool = True
    """Whether its networks may be recommended."""

    @property
    def has_file(self) -> bool:
        """Whether what is delivered is an ONNX file."""
        return has_onnx() if self.config_of_run.onnx is None else self.config_of_run.onnx

    def file_milliseconds(self, model: nn.Module) -> float:
        """Milliseconds per image of the file that would be delivered; of PyTorch where there is none."""
        return self.scale.measured(model, self.scale.program(model) if self.has_file else "eager")


def _found(cell: Cell, job: Job, pipeline: Pipeline, listener: Listener, given: Given) -> tuple[Among, Found]:
    """The search from the cell's backbone, in relation to the best one if it may be recommended."""
    alone = Among(pipeline, job)
    best = cell.best
    if best is not None and best.name != cell.backbone.name and _is_relative(job):
        reference = _state_of(replace(cell, backbone=best), listener, given)
        if alone.is_within(alone.unpruned(), reference):
            alone = Among(pipeline, job, reference)
        else:
            alone.counts = False
            listener.say(f"{cell.backbone.name} is not within the budget itself, and is compressed for the front only")
    return alone, alone.run()


def _is_relative(job: Job) -> bool:
    """Whether the budget is a loss of accuracy, in relation to something."""
    return isinstance(job.config.goal, Budget) and job.config.goal.max_drop is not None


def _state_of(cell: Cell, listener: Listener, given: Given) -> State:
    """The unpruned network of a backbone that has been trained, from its checkpoints."""
    job = job_of(cell, listener, given)
    return Among(_pipeline(job, OutputFolder(cell.folder), listener), job).unpruned()


@contextmanager
def _at_work(cell: Cell, listener: Listener, given: Given) -> Iterator[tuple[Job, Pipeline]]:
    """The job and its pipeline; the folder of the backbone is nobody else's meanwhile."""
    job, folder = job_of(cell, listener, given), OutputFolder(cell.folder)
    check_start(job, folder, job.noted(), listener)
    with folder.held(job.noted(), listener):
        keep_images(folder.path, job.splits, listener)
        yield job, _pipeline(job, folder, listener)


def _pipeline(job: Job, folder: OutputFolder, listener: Listener) -> Pipeline:
    config = job.config
    device = None if config.device is None else user_path(config.device, "device")
    keep = StageStore(folder.stages, listener.say).times
    planner = CostPlanner.of(config.optimize, device, job.network, listener.say, keep)
    return Pipeline(
        job.network, job.splits, config.recipe, checkpoints=folder.stages, listener=listener, planner=planner
    )


def _write(cell: Cell, result: Trained | Searched) -> None:
    write_checked(cell.result, result.to_json().encode())


def reference_of(backbone: Backbone, root: Path) -> Backbone:
    """The backbone with a copy of its trained network in the root, which all others can read while it is searched.

    A run that resumes may find another one to be the best, because its training failed before.
    """
    copy = root / "reference" / Path(backbone.folder).name
    if not copy.exists():
        partial = copy.with_name(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(backbone.folder, partial, ignore=shutil.ignore_patterns(".*"))
        partial.rename(copy)
    return replace(backbone, folder=str(copy))
