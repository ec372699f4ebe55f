"""What is done in a cell, whoever runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

from basisprune.data.load import Source
from basisprune.errors import BasisPruneError
from basisprune.files import unsealed
from basisprune.listener import Listener
from basisprune.results import RunSummary
from basisprune.runs.adapt import adapt, check_adapting
from basisprune.runs.compress import run_job
from basisprune.runs.job import Job, ModelSource
from basisprune.runs.options import Options, RunConfig, configure
from basisprune.runs.output import SUMMARY, OutputFolder
from basisprune.runs.start import check_start
from basisprune.sweeps.backbones import AUTO, start_from
from basisprune.sweeps.cells import Cell, Kind


@dataclass(frozen=True)
class Given:
    """What was handed over in Python and has no name: models by theirs, images, settings."""

    models: Mapping[str, ModelSource] = field(default_factory=dict)
    data: Source | None = None
    config: RunConfig | None = None


NOTHING = Given()


def perform(cell: Cell, listener: Listener, given: Given = NOTHING) -> None:
    """Does the cell in its folder; one that was stopped goes on. Raises whatever goes wrong."""
    from basisprune.sweeps import stages

    kinds: dict[Kind, Callable[[Cell, Listener, Given], None]] = {
        "compress": _compress,
        "train": _train,
        "probe": stages.probe,
        "start": stages.start,
        "search": stages.search,
        "deliver": stages.deliver,
    }
    kinds[cell.kind](cell, listener, given)


def job_of(cell: Cell, listener: Listener, given: Given = NOTHING) -> Job:
    """The network, images and settings of a cell, ready to run."""
    config = given.config or configure(cast("Options", cell.options))
    data = cell.data if given.data is None else given.data
    return start_from(cell.backbone, given.models.get(cell.backbone.name), data, config, listener)


def _compress(cell: Cell, listener: Listener, given: Given) -> None:
    if cell.backbone.name == AUTO:
        from basisprune.sweeps.portfolio import compress_portfolio

        options = cast("Options", cell.options)
        compress_portfolio(AUTO, cell.data, output=cell.folder, listener=listener, **options)
        return
    result = run_job(job_of(cell, listener, given), output=cell.folder, listener=listener, command=cell.command)
    if result.summary.interrupted:
        raise KeyboardInterrupt


def _train(cell: Cell, listener: Listener, given: Given) -> None:
    adapt(job_of(cell, listener, given), cell.folder, listener, command=cell.command)


def check_cell(cell: Cell, listener: Listener) -> None:
    """Raise the error that the cell would end with, as far as it can be known; writes nothing."""
    if cell.backbone.name == AUTO:
        from basisprune.sweeps.portfolio import check_portfolio

        options = cast("Options", cell.options)
        check_portfolio(AUTO, cell.data, output=cell.folder, listener=listener, **options)
        return
    job = job_of(cell, listener)
    if cell.kind == "train":
        check_adapting(job, cell.folder, listener)
    else:
        check_start(job, OutputFolder(cell.folder), job.noted(), listener)


def is_done(cell: Cell) -> bool:
    """Whether the result of a whole run or training is in its folder, sound and not that of a run stopped early."""
    path = cell.folder / SUMMARY
    try:
        if cell.kind == "train":
            return bool(unsealed(path.read_bytes()))
        return not RunSummary.read(path).interrupted
    except (OSError, ValueError, BasisPruneError):
        return False
