"""A result -> the files in its folder: the model in all its forms, the report and, last, the summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from pydantic import JsonValue
from torch import Tensor, nn

from basisprune.budget.certify import AcceptanceRule, interval_of
from basisprune.callback import Callback
from basisprune.data import Splits
from basisprune.data.decode import random_numbers_kept
from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.bundle.files import TENSORS
from basisprune.deploy.export.onnx import ONNX as ORT
from basisprune.deploy.export.onnx import has_onnx
from basisprune.deploy.export.runtimes import RUNTIMES
from basisprune.deploy.export.writing import INT8_STEM, STEM
from basisprune.deploy.latency import LatencyReport, file_latencies, measure_latency
from basisprune.errors import BasisPruneError, BundleError, CheckpointError, LayerError, MissingExtraError
from basisprune.files import atomic, file_digest
from basisprune.method.states import Plan
from basisprune.report.html import write_report
from basisprune.results import DeliveredFile, RunSummary
from basisprune.runs.certifying import NO_FILES, Files
from basisprune.runs.exporting import Exporter
from basisprune.runs.output import BUNDLE, CHECKSUMS, INT8, ONNX, REPORT, SUMMARY
from basisprune.runs.summary import rounds
from basisprune.runs.tested import MADE
from basisprune.runs.verdict import ONNX_FILES, promise_of, with_missing, with_promises
from basisprune.tasks import CLASSIFICATION, Task
from basisprune.torchkit.processes import Processes
from basisprune.training.evaluation import task_batches
from basisprune.transfer.model import spec_of

_BATCHES, _EXAMPLES = (1, 32), 8
_WEIGHTS = f"{BUNDLE}/{TENSORS}"
# What this and `basisprune export` write for runtimes, with a few words about each.
_EXPORTED = {
    name: runtime.what if place == 0 else f"belongs to {runtime.files(stem)[0]}"
    for runtime in RUNTIMES.values()
    for stem in (STEM, INT8_STEM)
    for place, name in enumerate(runtime.files(stem))
}
_SECONDS = 30.0  # time limit for comparing latencies
T = TypeVar("T")


@dataclass(frozen=True)
class Delivery:
    """What to write: the chosen and the unpruned network in deployed form, and the file formats.

    With `onnx=None`, the ONNX file is written if
    its packages are installed. `files` are those that were tested already, which are delivered as they are, and
    `standard` is what an int8 file that was not has to keep to. The test images of a run that was `interrupted` are not
    looked at, because it may go on. `factory` is the function that builds the network, if it is known by name.
    """

    model: nn.Module
    original: nn.Module
    plans: tuple[Plan, ...]
    data: Splits
    onnx: bool | None = None
    int8: bool = False
    files: Files = NO_FILES
    standard: AcceptanceRule | None = None
    interrupted: bool = False
    task: Task = CLASSIFICATION
    factory: str | None = None

    @property
    def exporter(self) -> Exporter:
        """What writes ONNX files."""
        return Exporter(self.data, self.task)

    @property
    def some_inputs(self) -> list[Tensor]:
        """A batch of training examples as the network reads them, which what is written is compared on."""
        with random_numbers_kept():
            batches = task_batches(self.data.train, self.model, self.task, batch_size=_EXAMPLES)
            return [batch[0] for batch in islice(batches, 1)]

    @property
    def with_onnx(self) -> bool:
        """Whether to write an ONNX file."""
        return has_onnx() if self.onnx is None else self.onnx


def deliver(summary: RunSummary, delivery: Delivery, folder: Path, callback: Callback) -> RunSummary:
    """The summary, with the files that were written and the latency; it is written last.

    A format that the model does not support is skipped, and the reason goes to the callback. Each file of an earlier
    start of the run stays until the new one is complete; files that are not ours are never touched.
    """
    refused: dict[str, str] = {}
    if not delivery.with_onnx:
        refused[ONNX] = "it is not asked for" if has_onnx() else str(MissingExtraError("onnx", extra="onnx"))
    if delivery.onnx is None and not has_onnx():
        callback.log(f"{ONNX} is not written: {refused[ONNX]}")
    if delivery.int8 and not delivery.with_onnx:
        callback.log(f"{INT8} is not written, because it is made from {ONNX}")
    if not Processes.here().is_main:
        return summary
    folder.mkdir(parents=True, exist_ok=True)
    earlier = _Earlier.of(folder)
    (folder / SUMMARY).unlink(missing_ok=True)  # its presence means that the others are complete
    writer = _Writer(callback, refused)
    summary = with_promises(replace(summary, files=_describe_onnx(summary, delivery, folder, writer)))
    summary = _with_bundle(summary, delivery, folder, writer)
    written, summary = set(summary.files), with_promises(earlier.exports_for(summary, folder))
    _remove_stale(folder, summary.files, callback)
    if (summary.files.keys() - written) & set(ONNX_FILES):  # the bundle tells of those that stay too
        summary = _with_bundle(summary, delivery, folder, writer)
    summary = with_missing(replace(summary, not_written=refused), _remedies(delivery))
    summary = replace(summary, latency=_latency(delivery, folder, callback))
    try:
        write_report(summary, folder / REPORT)
    except MissingExtraError as error:
        (folder / REPORT).unlink(missing_ok=True)
        callback.log(f"{REPORT} is not written: {error}; its contents are in {SUMMARY}")
    summary.write(folder / SUMMARY)
    return summary


@dataclass(frozen=True)
class _Writer:
    """Writes one form of the model after the other, and keeps why those that it does not support are `refused`."""

    callback: Callback
    refused: dict[str, str]

    def written(self, name: str, write: Callable[[], T]) -> T | None:
        """The result of `write`, or None if the model does not support that format."""
        self.callback.log(f"writing {name}")
        self.refused.pop(name, None)
        try:
            return write()
        except BasisPruneError as error:
            self.refused[name] = str(error)
            self.callback.log(f"{name} is not written: {error}")
            return None


def _remedies(delivery: Delivery) -> list[str]:
    """What would help where nothing could be written."""
    onnx = [] if delivery.with_onnx else ["write ONNX (--onnx)" if has_onnx() else "pip install 'basisprune[onnx]'"]
    named = (
        [] if delivery.factory else ["pass the model by name, as package.module:function, which a bundle then names"]
    )
    return [*onnx, *named, "remove from its forward what the reasons name"]


def _describe_onnx(summary: RunSummary, delivery: Delivery, folder: Path, writer: _Writer) -> dict[str, DeliveredFile]:
    """The ONNX files, written and described: their checksums, and what is promised of them."""
    files: dict[str, DeliveredFile] = {}
    for name, about in _write_onnx(delivery, folder, writer).items():
        promise = promise_of(name, summary, certified=name in delivery.files.certified)
        files[name] = replace(about, sha256=file_digest(folder / name), promise=promise)
        if about.fault:
            writer.callback.log(f"{name}: {about.fault}")
    return files


def _with_bundle(summary: RunSummary, delivery: Delivery, folder: Path, writer: _Writer) -> RunSummary:
    """The summary with the bundle, written last of the models, because it has the verdict and all checksums."""
    files = {name: about for name, about in summary.files.items() if name != BUNDLE}
    sums = {name: files[name].sha256 for name in ONNX_FILES if name in files}
    if not writer.written(BUNDLE, lambda: _save_bundle(summary, delivery, folder / BUNDLE, sums)):
        return replace(summary, files=files)
    size, said = (folder / _WEIGHTS).stat().st_size, "for Python: basisprune.from_pretrained"
    bundle = DeliveredFile(size, said, sha256=file_digest(folder / _WEIGHTS))
    return replace(summary, files={BUNDLE: bundle, **files})


def _write_onnx(delivery: Delivery, folder: Path, writer: _Writer) -> dict[str, DeliveredFile]:
    files: dict[str, DeliveredFile] = {}
    if delivery.with_onnx and (size := writer.written(ONNX, lambda: _float_file(delivery, folder / ONNX))):
        takes = "prepared inputs" if delivery.data.train.prepared else "pixels"
        what, test = f"for ONNX Runtime and others; takes {takes}", delivery.files.onnx_test
        files[ONNX] = DeliveredFile(size, what, test=test)
        if delivery.int8 and (about := writer.written(INT8, lambda: _int8_file(delivery, folder / ONNX))):
            files[INT8] = about
    return files


@dataclass(frozen=True)
class _Earlier:
    """What an earlier start of the run left in the folder: its summary, and the checksum of its bundle's weights."""

    summary: RunSummary | None
    weights: str | None

    @classmethod
    def of(cls, folder: Path) -> _Earlier:
        """What is there; without a summary, for instance because that start was killed, the bundle itself tells."""
        try:
            summary = RunSummary.read(folder / SUMMARY)
        except CheckpointError:
            path = folder / _WEIGHTS
            return cls(None, file_digest(path) if path.is_file() else None)
        bundle = summary.files.get(BUNDLE)
        return cls(summary, None if bundle is None else bundle.sha256)

    def exports_for(self, summary: RunSummary, folder: Path) -> RunSummary:
        """The new summary with what was exported before, if it was the same network."""
        bundle = summary.files.get(BUNDLE)
        if bundle is None or bundle.sha256 != self.weights:
            return summary
        there = [name for name in _EXPORTED if name not in summary.files and (folder / name).is_file()]
        if self.summary is None:
            kept = {name: _described(folder / name, summary) for name in there}
            return replace(summary, files={**summary.files, **kept})
        known = self.summary.files
        kept = {name: known[name] for name in there if name in known and _is_export(name, known[name])}
        rows = tuple(
            row for row in self.summary.runtimes if not row.file or row.file in kept or row.file in summary.files
        )
        return replace(summary, files={**summary.files, **kept}, runtimes=rows if kept else ())


def _is_export(name: str, about: DeliveredFile) -> bool:
    """Whether `basisprune export` wrote the file; ONNX files may be the run's own."""
    return about.exported or name not in ONNX_FILES


def _described(path: Path, summary: RunSummary) -> DeliveredFile:
    """An export that no summary tells of."""
    promise = promise_of(path.name, summary)
    return DeliveredFile(
        path.stat().st_size, _EXPORTED[path.name], sha256=file_digest(path), promise=promise, exported=True
    )


def _remove_stale(folder: Path, files: Mapping[str, DeliveredFile], callback: Callback) -> None:
    """Removes files of an earlier start of the run that this one did not rewrite, and says so."""
    stale = [name for name in _EXPORTED if name not in files and (folder / name).is_file()]
    for name in stale:
        (folder / name).unlink()
    if stale:
        callback.log(f"removed {', '.join(stale)}: of an earlier start, and not asked for now or of another network")


def _save_bundle(summary: RunSummary, delivery: Delivery, folder: Path, sums: Mapping[str, str]) -> Path:
    """The folder of the bundle, which also knows the checksums of the files beside it."""
    chosen = summary.chosen
    metrics: dict[str, object] = {
        **delivery.task.to_dict(),
        "verdict": summary.verdict,
        "reference": asdict(summary.reference),
    }
    if summary.test is not None:
        metrics["test"] = asdict(summary.test)
    if chosen is not None:
        metrics["validation"] = {"accuracy": chosen.accuracy, "interval": list(chosen.interval)}
    if sums:
        metrics[CHECKSUMS] = dict(sums)
    if summary.certificate is not None and summary.certificate.tests:
        metrics[MADE] = len(summary.certificate.tests)
    save = partial(
        save_pretrained,
        delivery.model,
        folder,
        classes=list(summary.classes) or None,
        metrics=_plain(metrics),
        plans=delivery.plans,
        check_inputs=delivery.some_inputs,
    )
    try:
        return save()  # which whoever loads it needs no code of others for
    except (BundleError, LayerError):
        if delivery.factory is None:
            raise
        return save(factory=delivery.factory)


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
        found = delivery.exporter.file_outcomes(small, delivery.model, data)
    except BasisPruneError:
        small.unlink(missing_ok=True)
        raise
    size, fault = small.stat().st_size, "" if INT8 in files.certified else made.fault
    return DeliveredFile(size, made.what, found.value, interval_of(found), test=files.int8_test, fault=fault)


def _latency(delivery: Delivery, folder: Path, callback: Callback) -> LatencyReport:
    """The latency of the unpruned and of the chosen model, in turns: of the delivered file first, then in PyTorch."""
    callback.log("measuring the latency of the unpruned and the pruned model")
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
            files = {"before": (ORT, before), "after": (ORT, folder / ONNX)}
            in_file = file_latencies(files, batch_sizes=_BATCHES, repeats=repeats)
    except BasisPruneError as error:  # a network that torch's exporter does not support
        callback.log(f"ONNX Runtime's latency could not be measured: {error}")
        return eager
    return replace(eager, rows=(*in_file, *eager.rows))
