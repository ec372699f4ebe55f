"""What a run would fail at in its last minute, tried in its first: names, packages, folders, space, the network."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from torch import nn

from basisprune.callback import Callback, NullCallback
from basisprune.deploy.bundle import check_folder
from basisprune.deploy.export.onnx import ONNX
from basisprune.deploy.timing import read_table, refuse_other_table
from basisprune.errors import CheckpointError, ConfigError, DataError
from basisprune.files import user_path
from basisprune.results import Settings
from basisprune.runs.estimate import expected_candidates
from basisprune.runs.given import refuse_guessing
from basisprune.runs.job import Job
from basisprune.runs.output import BUNDLE, CONFIG, OutputFolder, refuse_links
from basisprune.runs.rehearsal import refuse_ratio, rehearse
from basisprune.runs.settings import RunConfig
from basisprune.torchkit.kinds import refuse_other_precisions, refuse_untrainable
from basisprune.torchkit.surgery import named_tensors
from basisprune.training.loop import check_patience
from basisprune.training.trainer import require_tracker
from basisprune.transfer.model import spec_of
from basisprune.types import dotted

# In sizes of the network: what a checkpoint takes, with the state of its optimizer, and what the results take, which
# are complete before they replace older ones.
_CHECKPOINT, _RESULTS = 3, 4


def check_start(job: Job, output: OutputFolder | None, settings: Settings, callback: Callback | None = None) -> None:
    """Raises the error that the run of this job would end with, as far as it can be known; writes nothing.

    `settings` are what the folder would note. The callback is told if the disk may become full.
    """
    command = "compress" if output is None else output.command
    refuse_untrainable(job.network, command)
    refuse_other_precisions(job.network, command)
    _check_names(job, settings)
    _check_device(job)
    if output is not None:
        _check_output(job, output, settings, callback)
    callback, prunes = callback or NullCallback(), command == "compress"
    for config in (job.config.recipe.train, job.config.recipe.finetune) if prunes else (job.config.recipe.train,):
        require_tracker(config)
        check_patience(config, job.splits.val)
    if prunes:
        job.pipeline(None if output is None else output.stages, NullCallback(), planned=False).check_folder()
    rehearse(job, prunes=prunes, saves=output is not None, callback=callback)
    if prunes:
        refuse_ratio(job)
    if prunes and job.config.is_trained and job.config.task.chance(job.splits.train.labels) is not None:
        refuse_guessing(job.network, job.splits, callback=callback)


def _check_output(job: Job, output: OutputFolder, settings: Settings, callback: Callback | None) -> None:
    """Raises the error that the folder, or what is to be written into it, would cause."""
    _check_place(output.path, job.data)
    output.check(settings)
    if output.command == "compress":
        check_packages(job.config)
    check_folder(output.path / BUNDLE)
    refuse_links(output.path)
    if not (output.path / CONFIG).exists():
        candidates = expected_candidates(job.config) if output.command == "compress" else 0
        _check_space(job.network, candidates, output.path, callback or NullCallback())


def check_packages(config: RunConfig) -> None:
    """Raises MissingExtraError where ONNX is asked for and not installed."""
    if config.onnx or (config.int8 and config.onnx is None):
        ONNX.require()


def _check_device(job: Job) -> None:
    """Raises an error for a file of times that cannot be read, or is for another network or input size."""
    if job.config.device is not None:
        table = read_table(user_path(job.config.device, "device"))
        refuse_other_table(job.network, spec_of(job.network).shape, table)


def _check_names(job: Job, settings: Settings) -> None:
    """Raises an error for names that cannot be written into a file."""
    odd = [f"{name}: {value!r}" for name, value in dotted(settings) if isinstance(value, str) and not _is_text(value)]
    if odd:
        raise ConfigError.of(
            "settings", [f"{each} given, which is not UTF-8; rename it, or pass another name for it" for each in odd]
        )
    _refuse_classes(job.splits.classes)


def _refuse_classes(classes: Iterable[str]) -> None:
    for name in classes:
        if not _is_text(name):
            raise DataError(f"the class {name!r} has a name that is not UTF-8; rename its folder")


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_place(output: Path, data: str) -> None:
    """Raises ConfigError for a folder that cannot be written to, or that lies in that of the images."""
    path = user_path(output, "output")
    if not _is_text(str(path)):
        raise ConfigError(f"output: {str(path)!r} given, which is not UTF-8; use another name")
    images = _folder_of(data)
    if images is not None and path.resolve().is_relative_to(images):
        raise ConfigError(
            f"output: {path} lies in the folder of the images, {data}, where the next start would take it for a class; "
            "use a folder elsewhere"
        )
    there = _nearest(path)
    if not there.is_dir():
        raise CheckpointError(f"{path}: {there} is a file; pass a new or empty folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"output: {path} cannot be written to: {there} is read-only for you; use another folder")


def _folder_of(data: str) -> Path | None:
    try:
        folder = Path(data).expanduser()
        return folder.resolve() if folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # a name that is not a path
        return None


def _nearest(path: Path) -> Path:
    """The path, or the innermost folder around it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def _check_space(network: nn.Module, candidates: int, output: Path, callback: Callback) -> None:
    """Raises ConfigError if the disk cannot hold even one candidate; says so if it may become full."""
    size = sum(tensor.nbytes for _, tensor in named_tensors(network))
    free = shutil.disk_usage(_nearest(output)).free
    least, most = ((_CHECKPOINT * (1 + count) + _RESULTS) * size for count in (min(candidates, 1), candidates))
    if free < least:
        raise ConfigError(
            f"output: the disk of {output} has {free:,} bytes left, and this run needs at least {least:,}; free some, "
            "or use a folder on another disk"
        )
    if free < most:
        callback.log(f"the disk of {output} has {free:,} bytes left, and this run may need up to {most:,}")
