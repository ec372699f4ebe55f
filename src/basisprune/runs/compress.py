"""One call: the smallest model within the budget."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack, cast

from torch import nn

from basisprune.budget import Budget
from basisprune.budget.certify import AcceptanceRule, Guarantee
from basisprune.callback import Callback, NullCallback
from basisprune.data import Loaders, Splits
from basisprune.data.load import Source
from basisprune.data.manifest import keep_images
from basisprune.deploy.export.onnx import has_onnx
from basisprune.errors import BundleError, ConfigError
from basisprune.files import user_path
from basisprune.method.pipeline import Pipeline
from basisprune.method.states import State
from basisprune.report.html import write_report
from basisprune.results import RunSummary
from basisprune.runs.certifying import NO_FILES, Certified, Certifier, Files, certifiable_here
from basisprune.runs.deliver import Delivery, deliver
from basisprune.runs.exporting import Exporter
from basisprune.runs.job import Job, ModelSource, factory_of, prepare_job
from basisprune.runs.output import OutputFolder, is_repeatable, refuse_links, settings_of
from basisprune.runs.preflight import preflight
from basisprune.runs.settings import OPTIONS, Options, configure
from basisprune.runs.summary import summarise
from basisprune.search import Search
from basisprune.search.candidates import Candidate, SearchResult
from basisprune.tasks import CLASSIFICATION, Task
from basisprune.torchkit.processes import Processes


@dataclass(frozen=True)
class Compressed:
    """The smallest model found, in plain layers and ready to use; `summary` has all results."""

    summary: RunSummary
    found: SearchResult
    data: Splits
    files: Files = NO_FILES
    promise: Guarantee | None = None
    task: Task = CLASSIFICATION
    factory: str | None = None

    @property
    def model(self) -> nn.Module:
        """The chosen network, in plain layers."""
        return self.found.trials[self.found.chosen].deployed

    @property
    def original(self) -> nn.Module:
        """The unpruned network, in the same form."""
        return self.found.trials[0].deployed

    @property
    def trained(self) -> nn.Module:
        """The chosen network before folding, which can be trained further."""
        return self.state.model

    @property
    def state(self) -> State:
        """The chosen network with the steps and plans that led to it."""
        return self.found.state

    @property
    def history(self) -> tuple[Candidate, ...]:
        """All candidates, the first being the unpruned network."""
        return self.found.candidates

    @property
    def chosen(self) -> Candidate:
        """The candidate that was chosen."""
        return self.found.candidates[self.found.chosen]

    def report(self, path: str | Path) -> Path:
        """Writes the report, one self-contained HTML file."""
        return write_report(self.summary, path)

    def save(
        self, folder: str | Path, *, onnx: bool | None = None, int8: bool = False, callback: Callback | None = None
    ) -> Path:
        """Writes the result into a folder: summary, report, and the model as a bundle and as ONNX.

        By default, ONNX is written if its packages are installed; `int8` adds a quantised file. Raises
        CheckpointError if the folder contains another result, and BundleError, after summary and report are written,
        if the network could be written in no form that can be used.
        """
        callback, path = callback or NullCallback(), user_path(folder, "save")
        OutputFolder(path).claim(self.summary.config, callback)
        keep_images(path, self.data, callback)
        told = deliver(self.summary, self._delivery(onnx=onnx, int8=int8), path, callback)
        if told.is_undelivered:
            raise BundleError(f"{path}: {told.verdict}")
        return path

    def delivered(self, folder: Path, *, onnx: bool | None, int8: bool, callback: Callback) -> Compressed:
        """The same result, with its files written to the folder and described in its summary."""
        return replace(self, summary=deliver(self.summary, self._delivery(onnx=onnx, int8=int8), folder, callback))

    def _delivery(self, *, onnx: bool | None, int8: bool) -> Delivery:
        standard = None if self.promise is None else AcceptanceRule(self.promise)
        return Delivery(
            self.model,
            self.original,
            self.state.plans,
            self.data,
            onnx,
            int8,
            self.files,
            standard,
            interrupted=self.found.interrupted,
            task=self.task,
            factory=self.factory,
        )


def compress(
    model: ModelSource,
    data: Source | Loaders,
    budget: Budget | None = None,
    *,
    output: str | Path | None = None,
    labels: str | Path | None = None,
    callback: Callback | None = None,
    **options: Unpack[Options],
) -> Compressed:
    """The smallest model within the budget, by default 1 % accuracy (`max_drop=0.01`).

    `model` is a transfer model, the folder of a saved one, or anything that `transfer_model` takes; `data` is anything
    that `load_data` takes. With `Loaders` of your own, the model is a network that is ready for them, and stays whole;
    with `task`, it may be for anything (see `Task`). Candidates are judged on the validation images; a budget of
    accuracy is then certified on images that nothing has looked at before, with `confidence`, and
    `summary.certificate` says whether it could be. The test images are used once, at the end. The options are those of
    the command line (docs/command-line.md); fractions are written as 0.01, and `metric`, `task`, `recipe` and `search`
    may be objects.
    With `basis_ratio` or `filter_ratio`, the fractions of basis vectors and filters to remove, there is no search.

    With `keep_head`, `model` is your own network, or a factory or name with `weights`, trained for these classes: it
    is not trained anew, and the budget is counted from what it is (docs/own_model.md).

    With `unlabelled`, images without labels confirm the budget. Only those on which the networks differ need a label:
    `output` then has a page that asks for them, and the same call with the file `labels` certifies.

    With `output`, a folder, every candidate is saved there, and a run that was killed resumes and gives the same
    result; at the end the folder contains everything that `Compressed.save` writes. What it lacks is in
    `summary.not_written`, and `summary.is_undelivered` says whether that is every form of the network. `callback` is
    notified of each step.

    Raises ConfigError that lists all invalid options, and CheckpointError, with the differences, if `output` belongs
    to a run with other settings.
    """
    if budget is not None:
        if options.get(budget.kind) is not None:
            raise ConfigError(f"compress: budget and {budget.kind} given; pass one of them")
        options = cast("Options", {**options, budget.kind: vars(budget)[budget.kind]})
    folder = None if output is None else user_path(output, "output")
    job = prepare_job(model, data, configure(options), output=folder, callback=callback)
    job = replace(job, labels=None if labels is None else user_path(labels, "labels"))
    return run_job(job, output=folder, callback=callback or NullCallback())


def certify_run(folder: str | Path, labels: str | Path, *, callback: Callback | None = None) -> Compressed:
    """Return the result of a finished run with labels for images that had none, and write it to the run's folder.

    The run is repeated from what it has stored: nothing is trained again, and images or networks that have changed
    since are refused. `labels` is a CSV file of images and classes, as the run's label.html makes it.

    Raises ConfigError for a run without such images, or of a network that was given in Python: pass `labels` to
    `compress` there. Raises DataError for labels that do not fit.
    """
    path = user_path(folder, "run")
    refuse_links(path)
    settings = settings_of(path)
    if not settings.get("unlabelled"):
        raise ConfigError(
            f"{path}: its run has no images without labels to certify on; repeat it with --unlabelled in another folder"
        )
    model, data = (str(settings.get(name)) for name in ("model", "data"))
    if not is_repeatable(settings):
        raise ConfigError(f"{path}: its model or data were given in Python; repeat that call of compress with labels=")
    given = {name: value for name, value in settings.items() if name in OPTIONS}
    return compress(model, data, output=path, labels=labels, callback=callback, **cast("Options", given))


def run_job(job: Job, *, output: Path | None, callback: Callback, command: str = "") -> Compressed:
    """The result of a job, for both `compress` and the command line; `command` is recorded in it.

    Under `accelerate launch` or `torchrun`, all processes call it and get the same result. They train and score
    together; the main one alone certifies and writes.
    """
    processes = Processes.joined()
    callback = callback if processes.is_main else NullCallback()
    folder = None if output is None else OutputFolder(user_path(output, "output"))
    processes.on_main(lambda: preflight(job, folder, job.to_dict(), callback))
    processes.agree(job.network)
    with nullcontext() if folder is None else folder.held(job.to_dict(), callback):
        return _run(job, folder, callback, command)


def _run(job: Job, folder: OutputFolder | None, callback: Callback, command: str) -> Compressed:
    processes = Processes.here()
    if folder is not None:
        path = folder.path
        processes.on_main(lambda: keep_images(path, job.splits, callback))
    callback.log(job.splits.describe())
    config, promise = job.config, job.config.guarantee
    if promise is not None:
        callback.log(certifiable_here(promise, job.splits))
    pipeline = job.pipeline(None if folder is None else folder.stages, callback)
    found = Search(pipeline, config.goal, config.search, promise=promise).run()
    mine: list[Compressed] = []

    def conclude() -> bytes:
        mine.append(_concluded(job, pipeline, found, folder, command))
        return mine[0].summary.to_json().encode()

    told = processes.from_main(conclude)
    return mine[0] if mine else _as_told(RunSummary.from_json(told), job, found)


def _concluded(
    job: Job, pipeline: Pipeline, found: SearchResult, folder: OutputFolder | None, command: str
) -> Compressed:
    """The result of the search: certified, measured and, with a folder, written."""
    config, promise, callback = job.config, job.config.guarantee, pipeline.notify
    certified = Certified(found)
    if promise is not None:
        certified = certify_job(job, found, promise, callback, folder=None if folder is None else folder.path)
    found = certified.found
    callback.log("measuring the result")
    summary = summarise(job, pipeline, found, command)
    result = Compressed(
        summary,
        found,
        job.splits,
        certified.files,
        promise,
        config.task,
        factory_of(job),
    )
    if folder is None:
        return result
    return result.delivered(folder.path, onnx=config.onnx, int8=config.int8, callback=callback)


def _as_told(summary: RunSummary, job: Job, found: SearchResult) -> Compressed:
    """The result that the main process came to, with the networks that this one has too."""
    rows = list(zip(found.trials, summary.candidates, strict=True))
    trials = tuple(replace(trial, candidate=replace(trial.candidate, passed=row.passed)) for trial, row in rows)
    chosen = next(index for index, row in enumerate(summary.candidates) if row.chosen)
    found = replace(found, trials=trials, chosen=chosen, certificate=summary.certificate)
    config = job.config
    return Compressed(
        summary,
        found,
        job.splits,
        promise=config.guarantee,
        task=config.task,
        factory=factory_of(job),
    )


def certify_job(
    job: Job, found: SearchResult, promise: Guarantee, callback: Callback, *, folder: Path | None = None
) -> Certified:
    """The search with its certificate; by ONNX Runtime if the run writes an ONNX file."""
    config = job.config
    onnx = folder is not None and (has_onnx() if config.onnx is None else config.onnx)
    exporter = Exporter(job.splits, config.task)
    certifier = Certifier(
        promise, job.splits, exporter, callback, onnx, onnx and config.int8, folder, job.labels, config.seed
    )
    return certifier.run(found)
