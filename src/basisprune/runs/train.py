"""A pretrained model fine-tuned on images, without pruning: the first stage alone, with its own folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import JsonValue, TypeAdapter
from torch import nn

from basisprune.budget.certify import interval_of
from basisprune.callback import Callback, NullCallback, counted
from basisprune.costs import measure
from basisprune.data import LabelledImages
from basisprune.data.manifest import keep_images
from basisprune.deploy.bundle import save_pretrained
from basisprune.files import sealed, user_path, write_text
from basisprune.method.states import StageStore, fingerprint
from basisprune.results import Accuracy, Settings
from basisprune.runs.folder import BUNDLE, SUMMARY, OutputFolder, versions
from basisprune.runs.load import Job
from basisprune.runs.preflight import preflight
from basisprune.runs.settings import TRAIN_OPTIONS
from basisprune.torchkit.processes import Processes
from basisprune.training.checkpoint import EpochRecord
from basisprune.training.evaluation import predict
from basisprune.training.loop import fit

_COMMAND = "train"


@dataclass(frozen=True)
class TrainSummary:
    """The results of training a model; accuracies only if the data has such images."""

    command: str
    config: Settings
    seed: int
    versions: Mapping[str, str]
    classes: tuple[str, ...]
    parameters: int
    macs: int
    history: tuple[EpochRecord, ...]
    validation: Accuracy | None = None
    test: Accuracy | None = None

    def to_json(self) -> str:
        return TypeAdapter(TrainSummary).dump_json(self).decode()


def train_job(job: Job, output: Path, callback: Callback, *, command: str = "") -> TrainSummary:
    """Train the job's model and write it and the results to the output folder; a run that was killed resumes."""
    config = _noted(job)
    processes = Processes.joined()
    callback = callback if processes.is_main else NullCallback()
    folder = OutputFolder(user_path(output, "output"), _COMMAND)
    processes.on_main(lambda: check_training(job, output, callback))
    processes.agree(job.network)
    with folder.held(config, callback):
        return _run(job, folder.path, config, callback, command)


def check_training(job: Job, output: Path, callback: Callback) -> None:
    """Raise the error that `train_job` would end with, as far as it can be known; writes nothing."""
    preflight(job, OutputFolder(user_path(output, "output"), _COMMAND), _noted(job), callback)


def _run(job: Job, output: Path, config: Settings, callback: Callback, command: str) -> TrainSummary:
    training, splits = job.config.recipe.train, job.splits
    processes = Processes.here()
    processes.on_main(lambda: keep_images(output, splits, callback))
    store = StageStore(output, callback.log)
    store.claim(
        fingerprint(job.network, splits, with_head=job.config.keep_head)
    )  # the same names may refer to other weights or images
    callback.log(splits.describe())
    callback.log(f"training for {counted(training.epochs, 'epoch')}")
    trained = fit(job.network, splits.train, splits.val, training, checkpoint=output / "training.pt")
    size = measure(trained.model)
    validation, test = (_accuracy(trained.model, part) for part in (splits.val, splits.test))
    summary = TrainSummary(
        command=command,
        config=config,
        seed=job.config.seed,
        versions=versions(),
        classes=tuple(splits.classes),
        parameters=size.parameters,
        macs=size.macs,
        history=trained.history,
        validation=validation,
        test=test,
    )
    metrics = {name: asdict(part) for name, part in (("validation", validation), ("test", test)) if part is not None}

    def write() -> None:
        save_pretrained(trained.model, output / BUNDLE, classes=list(splits.classes), metrics=metrics)
        write_text(output / SUMMARY, sealed(summary.to_json()))

    processes.on_main(write)
    return summary


def _noted(job: Job) -> dict[str, JsonValue]:
    """The settings that affect training: all except those of pruning."""
    noted = {name: value for name, value in job.to_dict().items() if name in ("model", "data", *TRAIN_OPTIONS)}
    return {**noted, "recipe": {"train": asdict(job.config.recipe.train)}}


def _accuracy(model: nn.Module, data: LabelledImages | None) -> Accuracy | None:
    if data is None:
        return None
    found = predict(model, data)
    return Accuracy(found.value, interval_of(found), len(found.hits))
