"""One call: the smallest model within the budget, step by step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Unpack, cast

from basisprune.budget import Budget
from basisprune.callback import Callback, NullCallback
from basisprune.data import Loaders
from basisprune.data.load import Source
from basisprune.data.manifest import keep_images
from basisprune.errors import ConfigError
from basisprune.files import user_path
from basisprune.method.pipeline import Pipeline
from basisprune.results import RunSummary
from basisprune.runs.certify import Certified, certifiable_here, certify_found
from basisprune.runs.deliver import Compressed, deliver
from basisprune.runs.folder import OutputFolder, is_repeatable, refuse_links, settings_of
from basisprune.runs.load import AnyModel, Job, factory_of, prepare_job
from basisprune.runs.preflight import preflight
from basisprune.runs.settings import OPTIONS, Options, configure
from basisprune.runs.summary import summarise
from basisprune.search import Search
from basisprune.search.candidates import SearchResult
from basisprune.torchkit.imports import only_code
from basisprune.torchkit.processes import Processes

_OF_ANYBODY = ("hf:", "hf-hub:", "hf_hub:")  # names of what is fetched from anybody's repository
__all__ = ["Compressed", "certify_run", "compress", "run_job"]


def compress(
    model: AnyModel,
    data: Source | Loaders,
    budget: Budget | None = None,
    *,
    output: str | Path | None = None,
    labels: str | Path | None = None,
    callback: Callback | None = None,
    **options: Unpack[Options],
) -> Compressed:
    """Return the smallest model within the budget, by default 1% accuracy (`max_drop=0.01`).

    Candidates are judged on the validation images; a budget of accuracy is then certified on images held out from
    training and search, and `summary.certificate` says whether it could be. The test images are used once, at the end.
    With `basis_ratio` or `filter_ratio`, the fractions of basis vectors and filters to remove, there is no search.

    Args:
        model: A transfer model, the folder of a saved one, or anything that `transfer_model` takes. With `keep_head`,
            your own network, or a factory or name with `weights`, trained for these classes: it is not trained again,
            and is the baseline for the budget (docs/own_model.md).
        data: Anything that `load_data` takes. With `Loaders`, the model is a network that is ready for them, and stays
            whole; with `task`, it may be for anything (see `Task`).
        budget: What may be lost, or how large the result may be; one of the options may say it instead.
        output: A folder. Every candidate is saved there, and a run that was killed resumes and gives the same result;
            at the end it contains everything that `Compressed.save` writes. What it lacks is in `summary.not_written`.
        labels: A CSV file with labels of images that had none. With `unlabelled`, images without labels confirm the
            budget. Only those on which the networks differ need a label: `output` then has a page that asks for them,
            and the same call with the file certifies.
        callback: Receives each step.
        **options: Those of the command line (docs/command-line.md); fractions are written as 0.01, and `metric`,
            `task`, `recipe` and `search` may be objects.

    Raises:
        ConfigError: Options are invalid; it lists all faults.
        CheckpointError: `output` belongs to a run with other settings; it lists the differences.
    """
    if listener := cast("dict[str, Callback | None]", options).pop("listener", None):
        warnings.warn("compress(listener=) goes: use callback=", DeprecationWarning, stacklevel=3)
        callback = callback or listener
    if budget is not None:
        if options.get(budget.kind) is not None:
            raise ConfigError(f"compress: budget and {budget.kind} given; pass one of them")
        options = cast("Options", {**options, budget.kind: vars(budget)[budget.kind]})
    folder = None if output is None else user_path(output, "output")
    job = prepare_job(model, data, configure(options), output=folder, callback=callback)
    job = replace(job, labels=None if labels is None else user_path(labels, "labels"))
    return run_job(job, output=folder, callback=callback or NullCallback())


def certify_run(
    folder: str | Path, labels: str | Path, *, trust_code: bool = False, callback: Callback | None = None
) -> Compressed:
    """Return the result of a finished run with labels for images that had none, and write it to the run's folder.

    Nothing is trained again, and images or networks that have changed since are refused. `labels` is a CSV file of
    images and classes, as the run's label.html makes it. Code that the run's settings name is imported only with
    `trust_code`.

    Raises ConfigError for a run without such images, or of a network that was given in Python: pass `labels` to
    `compress` there. Raises DataError for labels that do not fit.
    """
    path = user_path(folder, "run")
    refuse_links(path)
    if not settings_of(path).get("unlabelled"):
        raise ConfigError(
            f"{path}: its run has no images without labels to certify on; repeat it with --unlabelled in another folder"
        )
    return repeat_run(path, labels, trust_code=trust_code, callback=callback)


def repeat_run(
    path: Path, labels: str | Path | None = None, *, trust_code: bool = False, callback: Callback | None = None
) -> Compressed:
    """Repeat the run in a folder from what it has stored; its settings cannot vouch for the code that they name."""
    refuse_links(path)
    settings = settings_of(path)
    if not is_repeatable(settings):
        raise ConfigError(f"{path}: its model or data were given in Python; repeat that call of compress with labels=")
    model, data = (str(settings.get(name)) for name in ("model", "data"))
    fetched = [name for name in (model, data, str(settings.get("unlabelled"))) if name.startswith(_OF_ANYBODY)]
    if fetched and not trust_code:
        raise ConfigError(
            f"{path}: its run names {fetched[0]!r}, which would be fetched; if it is yours, pass trust_code=True "
            "(--trust-code)"
        )
    given = {name: value for name, value in settings.items() if name in OPTIONS} | {"trust_code": trust_code}
    with only_code(None if trust_code else ()):
        return compress(model, data, output=path, labels=labels, callback=callback, **cast("Options", given))


def run_job(job: Job, *, output: Path | None, callback: Callback, command: str = "") -> Compressed:
    """Check, train, search, certify, export and report; `command` is recorded in the result.

    Under `accelerate launch` or `torchrun`, all processes call it and get the same result. They train and score
    together; the main one alone certifies and writes.
    """
    processes = Processes.joined()
    callback = callback if processes.is_main else NullCallback()
    folder = None if output is None else OutputFolder(user_path(output, "output"))
    processes.on_main(lambda: preflight(job, folder, job.to_dict(), callback))
    processes.agree(job.network)
    with nullcontext() if folder is None else folder.held(job.to_dict(), callback):
        pipeline = _set_up(job, folder, callback)
        found = Search(pipeline, job.config.goal, job.config.search, promise=job.config.guarantee).run()
        return _on_main(job, found, lambda: conclude(job, pipeline, found, folder, command))


def _set_up(job: Job, folder: OutputFolder | None, callback: Callback) -> Pipeline:
    """Record the images, say what can be certified, and return the pipeline, which trains what the search asks for."""
    if folder is not None:
        path = folder.path
        Processes.here().on_main(lambda: keep_images(path, job.splits, callback))
    callback.log(job.splits.describe())
    if job.config.guarantee is not None:
        callback.log(certifiable_here(job.config.guarantee, job.splits))
    return job.pipeline(None if folder is None else folder.stages, callback)


def conclude(
    job: Job,
    pipeline: Pipeline,
    found: SearchResult,
    folder: OutputFolder | None,
    command: str = "",
    amend: Callable[[RunSummary, SearchResult], RunSummary] = lambda summary, _found: summary,
) -> Compressed:
    """Certify what was found, measure it and, with a folder, write it; `amend` may change the summary before that."""
    config, callback, path = job.config, pipeline.notify, None if folder is None else folder.path
    certified = Certified(found) if config.guarantee is None else certify_found(job, found, callback, path)
    callback.log("measuring the result")
    summary = amend(summarise(job, pipeline, certified.found, command), certified.found)
    result = _result(job, summary, certified)
    if path is None:
        return result
    return replace(result, summary=deliver(result, path, callback, onnx=config.onnx, int8=config.int8))


def _result(job: Job, summary: RunSummary, certified: Certified) -> Compressed:
    config = job.config
    return Compressed(
        summary, certified.found, job.splits, certified.files, config.guarantee, config.task, factory_of(job)
    )


def _on_main(job: Job, found: SearchResult, work: Callable[[], Compressed]) -> Compressed:
    """Do the work in the main process; the others get its summary, with the networks that they have too."""
    mine: list[Compressed] = []

    def done() -> bytes:
        mine.append(work())
        return mine[0].summary.to_json().encode()

    summary = RunSummary.from_json(Processes.here().from_main(done))
    if mine:
        return mine[0]
    rows = list(zip(found.trials, summary.candidates, strict=True))
    trials = tuple(replace(trial, candidate=replace(trial.candidate, passed=row.passed)) for trial, row in rows)
    chosen = next(index for index, row in enumerate(summary.candidates) if row.chosen)
    found = replace(found, trials=trials, chosen=chosen, certificate=summary.certificate)
    return _result(job, summary, Certified(found))
