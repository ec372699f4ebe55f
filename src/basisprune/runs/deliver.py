"""A result -> the files in its folder: the model in all its forms, the report and, last, the summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from accelerate import PartialState
from pydantic import JsonValue
from torch import nn

from basisprune.budget.certify import Standard, Status
from basisprune.data import Splits
from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.export import evaluate_onnx
from basisprune.deploy.export.onnx import ONNX_RUNTIME
from basisprune.deploy.export.runtime import has_onnx
from basisprune.deploy.export.runtimes import RUNTIMES
from basisprune.deploy.export.speed import measure_files
from basisprune.deploy.export.writing import INT8_STEM, STEM
from basisprune.deploy.latency import LatencyReport, measure_latency
from basisprune.errors import BasisPruneError, CheckpointError, MissingExtraError
from basisprune.files import atomic, file_digest
from basisprune.listener import Listener
from basisprune.report.html import write_report
from basisprune.results import DeliveredFile, RunSummary
from basisprune.runs.certifying import NO_FILES, Files
from basisprune.runs.exporting import Exporter
from basisprune.runs.output import BUNDLE, CHECKSUMS, INT8, ONNX, REPORT, SUMMARY
from basisprune.runs.summary import rounds
from basisprune.states import Plan
from basisprune.training.intervals import wilson_interval
from basisprune.transfer.model import spec_of

_BATCHES = (1, 32)
# What `basisprune export` writes for other runtimes.
_EXPORTED = tuple(
    name
    for runtime in RUNTIMES.values()
    for stem in (STEM, INT8_STEM)
    for name in runtime.files(stem)
    if name not in (ONNX, INT8)
)
_SECONDS = 30.0  # time limit for comparing latencies
T = TypeVar("T")


@dataclass(frozen=True)
class Delivery:
    """What to write: the chosen and the unpruned network in deployed form, and the file formats.

    `prepared` means that the images are already normalised floats. With `onnx=None`, the ONNX file is written if
    its packages are installed. `files` are those that were tested already, which are delivered as they are, and
    `standard` is what an int8 file that was not has to keep to. The test images of a run that was `interrupted` are not
    looked at, because it may go on.
    """

    model: nn.Module
    original: nn.Module
    plans: tuple[Plan, ...]
    data: Splits
    prepared: bool
    onnx: bool | None = None
    int8: bool = False
    files: Files = NO_FILES
    standard: Standard | None = None
    interrupted: bool = False

    @property
    def exporter(self) -> Exporter:
        """What writes ONNX files."""
        return Exporter(self.data, self.prepared)

    @property
    def with_onnx(self) -> bool:
        """Whether to write an ONNX file."""
        return has_onnx() if self.onnx is None else self.onnx


def deliver(summary: RunSummary, delivery: Delivery, folder: Path, listener: Listener) -> RunSummary:
    """The summary, with the files that were written and the latency; it is written last.

    A format that the model does not support is skipped, and the reason goes to the listener. Each file of an earlier
    start of the run stays until the new one is complete; files that are not ours are never touched.
    """
    if delivery.onnx is None and not has_onnx():
        listener.say(f"{ONNX} is not written: {MissingExtraError('onnx', extra='onnx')}")
    if delivery.int8 and not delivery.with_onnx:
        listener.say(f"{INT8} is not written, because it is made from {ONNX}")
    if not PartialState().is_main_process:
        return summary
    folder.mkdir(parents=True, exist_ok=True)
    before = _summary_in(folder)
    (folder / SUMMARY).unlink(missing_ok=True)  # its presence means that the others are complete
    summary = replace(summary, files=_write_models(summary, delivery, folder, listener))
    summary = _with_exports(summary, before, folder)
    summary = replace(summary, verdict=_verdict(summary))
    _remove_stale(folder, summary.files)
    summary = replace(summary, latency=_latency(delivery, folder, listener))
    try:
        write_report(summary, folder / REPORT)
    except MissingExtraError as error:
        (folder / REPORT).unlink(missing_ok=True)
        listener.say(f"{REPORT} is not written: {error}; its contents are in {SUMMARY}")
    summary.write(folder / SUMMARY)
    return summary


def _write_models(
    summary: RunSummary, delivery: Delivery, folder: Path, listener: Listener
) -> dict[str, DeliveredFile]:
    exported = {
        name: replace(about, sha256=file_digest(folder / name), promise=_promise(name, summary, delivery))
        for name, about in _write_onnx(delivery, folder, listener).items()
    }
    for name, about in exported.items():
        if about.fault:
            listener.say(f"{name}: {about.fault}")
    sums = {name: about.sha256 for name, about in exported.items()}
    if not _written(BUNDLE, listener, lambda: _save_bundle(summary, delivery, folder / BUNDLE, sums)):
        return exported
    weights = folder / BUNDLE / "model.safetensors"
    size, said = weights.stat().st_size, "for Python: basisprune.from_pretrained"
    return {BUNDLE: DeliveredFile(size, said, sha256=file_digest(weights)), **exported}


def _promise(name: str, summary: RunSummary, delivery: Delivery) -> Status | None:
    """What is promised of a file; None where the budget is not about accuracy, and of the unpruned network itself."""
    if summary.certificate is None or (name == ONNX and summary.candidates and summary.candidates[0].chosen):
        return None
    return "certified" if name in delivery.files.certified else "estimated"


def _write_onnx(delivery: Delivery, folder: Path, listener: Listener) -> dict[str, DeliveredFile]:
    files: dict[str, DeliveredFile] = {}
    if delivery.with_onnx and (size := _written(ONNX, listener, lambda: _float_file(delivery, folder / ONNX))):
        files[ONNX] = DeliveredFile(size, "for ONNX Runtime and others; takes pixels")
        if delivery.int8 and (about := _written(INT8, listener, lambda: _int8_file(delivery, folder / ONNX))):
            files[INT8] = about
    return files


def _summary_in(folder: Path) -> RunSummary | None:
    """The summary of an earlier start of the run, if there is one."""
    try:
        return RunSummary.read(folder / SUMMARY)
    except CheckpointError:
        return None


def _with_exports(summary: RunSummary, before: RunSummary | None, folder: Path) -> RunSummary:
    """The summary with what was exported for other runtimes before, if it was the same network."""
    weights = summary.files.get(BUNDLE)
    old = None if before is None else before.files.get(BUNDLE)
    if before is None or old is None or weights is None or old.sha256 != weights.sha256:
        return summary
    kept = {
        name: about
        for name, about in before.files.items()
        if name in _EXPORTED and name not in summary.files and (folder / name).is_file()
    }
    rows = tuple(row for row in before.runtimes if not row.file or row.file in kept or row.file in summary.files)
    return replace(summary, files={**summary.files, **kept}, runtimes=rows if kept else ())


def _remove_stale(folder: Path, files: Mapping[str, DeliveredFile]) -> None:
    """Removes files of an earlier start of the run that this one did not rewrite."""
    for name in (ONNX, INT8, *_EXPORTED):
        if name not in files:
            (folder / name).unlink(missing_ok=True)


def _written(name: str, listener: Listener, write: Callable[[], T]) -> T | None:
    """The result of `write`, or None if the model does not support that format."""
    listener.say(f"writing {name}")
    try:
        return write()
    except BasisPruneError as error:
        listener.say(f"{name} is not written: {error}")
        return None


def _save_bundle(summary: RunSummary, delivery: Delivery, folder: Path, sums: Mapping[str, str]) -> Path:
    """The folder of the bundle, which also knows the checksums of the files beside it."""
    chosen = summary.chosen
    metrics: dict[str, object] = {"verdict": summary.verdict, "reference": asdict(summary.reference)}
    if summary.test is not None:
        metrics["test"] = asdict(summary.test)
    if chosen is not None:
        metrics["validation"] = {"accuracy": chosen.accuracy, "interval": list(chosen.interval)}
    if sums:
        metrics[CHECKSUMS] = dict(sums)
    return save_pretrained(
        delivery.model, folder, classes=list(summary.classes), metrics=_plain(metrics), plans=delivery.plans
    )


def _plain(value: object) -> dict[str, JsonValue]:
    """The value as it comes back from JSON."""
    plain: dict[str, JsonValue] = json.loads(json.dumps(value))
    return plain


def _float_file(delivery: Delivery, path: Path) -> int:
    """The bytes of the ONNX file: the one that was tested, or a new one."""
    if delivery.files.onnx is None:
        return delivery.exporter.export(delivery.model, path).size
    with atomic(path) as file:
        file.write(delivery.files.onnx)
    return len(delivery.files.onnx)


def _int8_file(delivery: Delivery, source: Path) -> DeliveredFile:
    """The int8 file next to the ONNX file; its accuracy is measured, because it differs."""
    small, files = source.with_name(INT8), delivery.files
    try:
        if files.int8 is None or files.made is None:
            made = delivery.exporter.quantise(source, small, delivery.original, delivery.standard)
        else:
            made = files.made
            with atomic(small) as file:
                file.write(files.int8)
        data = (None if delivery.interrupted else delivery.data.test) or delivery.data.val or delivery.data.train
        found = evaluate_onnx(small, data, prepared=delivery.prepared)
    except BasisPruneError:
        small.unlink(missing_ok=True)
        raise
    interval = wilson_interval(round(found.accuracy * found.count), found.count)
    size, fault = small.stat().st_size, "" if INT8 in files.certified else made.fault
    return DeliveredFile(size, made.what, found.accuracy, interval, test=files.int8_test, fault=fault)


def _verdict(summary: RunSummary) -> str:
    """The verdict, with what is to be said of the int8 file."""
    said, small = summary.verdict, summary.files.get(INT8)
    if small is None or small.promise != "estimated":
        return said
    if small.fault:
        more = f"Warning: {INT8} is not within the budget: {small.fault}."
    elif summary.certificate is None or not summary.certificate.certified:
        return said  # as all is
    else:
        more = f"{INT8} is estimated, not certified{'' if small.test is None else ': its test failed'}."
    return said if more in said else f"{said} {more}"


def _latency(delivery: Delivery, folder: Path, listener: Listener) -> LatencyReport:
    """The latency of the unpruned and of the chosen model, in turns: of the delivered file first, then in PyTorch."""
    listener.say("measuring the latency of the unpruned and the pruned model")
    models = {"before": delivery.original, "after": delivery.model}
    shape = spec_of(delivery.model).shape
    has_file = delivery.with_onnx and (folder / ONNX).is_file()
    repeats = rounds(models, shape, images=sum(_BATCHES) * (2 if has_file else 1), seconds=_SECONDS)
    eager = measure_latency(models, shape, batch_sizes=_BATCHES, backends=["eager"], repeats=repeats)
    if not has_file:
        return eager
    try:
        with TemporaryDirectory() as scratch:
            before = delivery.exporter.export(delivery.original, Path(scratch) / ONNX).path
            files = {"before": before, "after": folder / ONNX}
            in_file = measure_files(files, ONNX_RUNTIME, batch_sizes=_BATCHES, repeats=repeats)
    except BasisPruneError as error:  # a network that torch's exporter does not support
        listener.say(f"ONNX Runtime's latency could not be measured: {error}")
        return eager
    return replace(eager, rows=(*in_file, *eager.rows))
