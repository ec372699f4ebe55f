"""A result -> the files in its folder: the model in all its forms, the report and, last, the summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from torch import nn

from basisprune.budget.certify import AcceptanceRule, Guarantee, Status, interval_of
from basisprune.callback import Callback, NullCallback
from basisprune.data import Splits
from basisprune.data.decode import random_numbers_kept
from basisprune.data.manifest import keep_images
from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.bundle.loading import TENSORS
from basisprune.deploy.export.onnx import ONNX as ORT
from basisprune.deploy.export.onnx import has_onnx
from basisprune.deploy.export.runtimes import RUNTIMES
from basisprune.deploy.export.writing import INT8_STEM, STEM
from basisprune.deploy.latency import LatencyReport, file_latencies, measure_latency
from basisprune.errors import BasisPruneError, BundleError, CheckpointError, LayerError, MissingExtraError
from basisprune.files import atomic, file_digest, user_path
from basisprune.method.states import State
from basisprune.report.html import write_report
from basisprune.results import DeliveredFile, Finding, RunSummary, RuntimeRow
from basisprune.runs.certify import NO_FILES, Files
from basisprune.runs.exporter import Exporter
from basisprune.runs.folder import BUNDLE, CHECKSUMS, INT8, ONNX, REPORT, SUMMARY, OutputFolder
from basisprune.runs.record import TESTS_MADE
from basisprune.runs.summary import rounds
from basisprune.search.candidates import Candidate, SearchResult
from basisprune.tasks import CLASSIFICATION, Task
from basisprune.torchkit.processes import Processes
from basisprune.training.evaluation import task_batches
from basisprune.transfer.model import spec_of

_OWN = (ONNX, INT8)  # which a run writes itself
_LONGEST = 400  # letters of a reason
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
class Compressed:
    """The smallest model found, in plain layers and ready to use; `summary` has all results."""

    summary: RunSummary
    found: SearchResult
    data: Splits
    files: Files = NO_FILES
    guarantee: Guarantee | None = None
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
        return self.found.candidates[self.found.chosen]

    def report(self, path: str | Path) -> Path:
        """Write the report, one self-contained HTML file."""
        return write_report(self.summary, path)

    def save(
        self, folder: str | Path, *, onnx: bool | None = None, int8: bool = False, callback: Callback | None = None
    ) -> Path:
        """Write the result into a folder: summary, report, and the model as a bundle and as ONNX.

        By default, ONNX is written if its packages are installed; `int8` adds a quantised file.

        Raises:
            CheckpointError: The folder contains another result.
            BundleError: The network could be written in no form that can be used; summary and report are written.
        """
        callback, path = callback or NullCallback(), user_path(folder, "save")
        OutputFolder(path).claim(self.summary.config, callback)
        keep_images(path, self.data, callback)
        summary = deliver(self, path, callback, onnx=onnx, int8=int8)
        if summary.is_undelivered:
            raise BundleError(f"{path}: {summary.verdict}")
        return path


def deliver(
    result: Compressed, folder: Path, callback: Callback, *, onnx: bool | None = None, int8: bool = False
) -> RunSummary:
    """Write the model in all its forms and the report; return the summary, which is written last.

    A format that the model does not support is skipped. Files that are not of the run are never touched.
    """
    if not Processes.here().is_main:
        return result.summary
    folder.mkdir(parents=True, exist_ok=True)
    earlier = _Earlier.of(folder)
    (folder / SUMMARY).unlink(missing_ok=True)  # its presence means that the others are complete
    writer = _Writer(result, folder, callback, has_onnx() if onnx is None else onnx)
    summary = with_files(result.summary, writer.onnx_files(is_asked=onnx is not None, int8=int8))
    summary = writer.with_bundle(summary)
    written = set(summary.files)
    summary = with_files(*earlier.exports_for(summary, folder))
    stale = [name for name in _EXPORTED if name not in summary.files and (folder / name).is_file()]
    for name in stale:
        (folder / name).unlink()
    if stale:
        callback.log(f"removed {', '.join(stale)}: of an earlier start, and not asked for now or of another network")
    if (summary.files.keys() - written) & set(_OWN):  # the bundle tells of those that stay too
        summary = writer.with_bundle(summary)
    summary = with_files(replace(summary, not_written=writer.refused), summary.files, writer.remedies)
    summary = replace(summary, latency=writer.latency())
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

    result: Compressed
    folder: Path
    callback: Callback
    with_onnx: bool
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def exporter(self) -> Exporter:
        return Exporter(self.result.data, self.result.task)

    def written(self, name: str, write: Callable[[], T]) -> T | None:
        """Return the result of `write`, or None if the model does not support that format."""
        self.callback.log(f"writing {name}")
        self.refused.pop(name, None)
        try:
            return write()
        except BasisPruneError as error:
            self.refused[name] = str(error)
            self.callback.log(f"{name} is not written: {error}")
            return None

    def onnx_files(self, *, is_asked: bool, int8: bool) -> dict[str, DeliveredFile]:
        if not self.with_onnx:
            self.refused[ONNX] = "it is not asked for" if has_onnx() else str(MissingExtraError("onnx", extra="onnx"))
            if not is_asked:
                self.callback.log(f"{ONNX} is not written: {self.refused[ONNX]}")
            if int8:
                self.callback.log(f"{INT8} is not written, because it is made from {ONNX}")
            return {}
        found: dict[str, DeliveredFile] = {}
        for name, write in ((ONNX, self._float_file), (INT8, self._int8_file)):
            if name == INT8 and not (int8 and ONNX in found):
                break
            if about := self.written(name, write):
                promise = promise_of(name, self.result.summary, certified=name in self.result.files.certified)
                found[name] = replace(about, sha256=file_digest(self.folder / name), promise=promise)
                if about.fault:
                    self.callback.log(f"{name}: {about.fault}")
        return found

    def _float_file(self) -> DeliveredFile:
        path, files = self.folder / ONNX, self.result.files
        if files.onnx is None:
            self.exporter.export(self.result.model, path)
        else:
            with atomic(path) as file:
                file.write(files.onnx)
        takes = "prepared inputs" if self.result.data.train.prepared else "pixels"
        return DeliveredFile(path.stat().st_size, f"for ONNX Runtime and others; takes {takes}", test=files.onnx_test)

    def _int8_file(self) -> DeliveredFile:
        """Write the int8 file next to the ONNX file; its accuracy is measured, because it differs."""
        result, files, small, data = self.result, self.result.files, self.folder / INT8, self.result.data
        try:
            if files.int8 is None or files.made is None:
                rule = None if result.guarantee is None else AcceptanceRule(result.guarantee)
                made = self.exporter.quantise(self.folder / ONNX, small, result.original, rule)
            else:
                made = files.made
                with atomic(small) as file:
                    file.write(files.int8)
            # The test images of a run that was stopped are not looked at, because it may resume.
            images = (None if result.found.interrupted else data.test) or data.val or data.train
            found = self.exporter.file_outcomes(small, result.model, images)
        except BasisPruneError:
            small.unlink(missing_ok=True)
            raise
        size, fault = small.stat().st_size, "" if INT8 in files.certified else made.fault
        return DeliveredFile(size, made.what, found.value, interval_of(found), test=files.int8_test, fault=fault)

    def with_bundle(self, summary: RunSummary) -> RunSummary:
        """Write the bundle, last of the models, because it has the verdict and all checksums."""
        files = {name: about for name, about in summary.files.items() if name != BUNDLE}
        sums = {name: files[name].sha256 for name in _OWN if name in files}
        if not self.written(BUNDLE, lambda: self._save_bundle(summary, sums)):
            return replace(summary, files=files)
        weights = self.folder / _WEIGHTS
        said = "for Python: basisprune.from_pretrained"
        bundle = DeliveredFile(weights.stat().st_size, said, sha256=file_digest(weights))
        return replace(summary, files={BUNDLE: bundle, **files})

    def _save_bundle(self, summary: RunSummary, sums: Mapping[str, str]) -> Path:
        """Write the folder of the bundle, which also knows the checksums of the files beside it."""
        chosen, certificate, result = summary.chosen, summary.certificate, self.result
        metrics: dict[str, object] = {
            **result.task.to_dict(),
            "verdict": summary.verdict,
            "reference": asdict(summary.reference),
        }
        if summary.test is not None:
            metrics["test"] = asdict(summary.test)
        if chosen is not None:
            metrics["validation"] = {"accuracy": chosen.accuracy, "interval": list(chosen.interval)}
        if sums:
            metrics[CHECKSUMS] = dict(sums)
        if certificate is not None and certificate.tests:
            metrics[TESTS_MADE] = len(certificate.tests)
        with random_numbers_kept():
            batches = task_batches(result.data.train, result.model, result.task, batch_size=_EXAMPLES)
            checks = [batch[0] for batch in islice(batches, 1)]
        save = partial(
            save_pretrained,
            result.model,
            self.folder / BUNDLE,
            classes=list(summary.classes) or None,
            metrics=json.loads(json.dumps(metrics)),
            plans=result.state.plans,
            check_inputs=checks,
        )
        try:
            return save()  # which loads without any other code
        except (BundleError, LayerError):
            if result.factory is None:
                raise
            return save(factory=result.factory)

    @property
    def remedies(self) -> list[str]:
        onnx = "write ONNX (--onnx)" if has_onnx() else "pip install 'basisprune[onnx]'"
        by_name = "pass the model by name, as package.module:function, which a bundle then names"
        return [
            *([] if self.with_onnx else [onnx]),
            *([] if self.result.factory else [by_name]),
            "remove from its forward what the reasons name",
        ]

    def latency(self) -> LatencyReport:
        """Measure the unpruned and the chosen model alternately: the delivered file first, then in PyTorch."""
        self.callback.log("measuring the latency of the unpruned and the pruned model")
        models = {"before": self.result.original, "after": self.result.model}
        shape = spec_of(self.result.model).shape
        has_file = self.with_onnx and (self.folder / ONNX).is_file()
        repeats = rounds(models, shape, images=sum(_BATCHES) * (2 if has_file else 1), seconds=_SECONDS)
        eager = measure_latency(models, shape, batch_sizes=_BATCHES, backends=["eager"], repeats=repeats)
        if not has_file:
            return eager
        try:
            with TemporaryDirectory() as scratch:
                before = self.exporter.export(self.result.original, Path(scratch) / ONNX).path
                files = {"before": (ORT, before), "after": (ORT, self.folder / ONNX)}
                in_file = file_latencies(files, batch_sizes=_BATCHES, repeats=repeats)
        except BasisPruneError as error:  # a network that torch's exporter does not support
            self.callback.log(f"ONNX Runtime's latency could not be measured: {error}")
            return eager
        return replace(eager, rows=(*in_file, *eager.rows))


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

    def exports_for(self, summary: RunSummary, folder: Path) -> tuple[RunSummary, dict[str, DeliveredFile]]:
        """Return the new summary, and its files with what was exported before, if it was the same network."""
        bundle = summary.files.get(BUNDLE)
        if bundle is None or bundle.sha256 != self.weights:
            return summary, dict(summary.files)
        there = [name for name in _EXPORTED if name not in summary.files and (folder / name).is_file()]
        if self.summary is None:
            kept = {name: exported_file(folder / name, summary) for name in there}
            return summary, {**summary.files, **kept}
        known = self.summary.files  # of which ONNX files may be the run's own
        kept = {name: known[name] for name in there if name in known and (known[name].exported or name not in _OWN)}
        rows = tuple(
            row for row in self.summary.runtimes if not row.file or row.file in kept or row.file in summary.files
        )
        return replace(summary, runtimes=rows if kept else ()), {**summary.files, **kept}


def exported_file(path: Path, summary: RunSummary, row: RuntimeRow | None = None) -> DeliveredFile:
    """Describe a file that `basisprune export` wrote; a fault of the one that it replaces still counts."""
    old = summary.files.get(path.name)
    return DeliveredFile(
        path.stat().st_size,
        _EXPORTED[path.name],
        None if row is None else row.accuracy,
        None if row is None else row.interval,
        sha256=file_digest(path),
        promise=promise_of(path.name, summary),
        fault="" if old is None else old.fault,
        exported=True,
    )


# ------------------------------------------------------------------------------------------- the files in words


def promise_of(name: str, summary: RunSummary, *, certified: bool = False) -> Status | None:
    """Return what is promised of a file: nothing without an accuracy budget, for other runtimes, if it is unpruned."""
    is_unpruned = name == ONNX and bool(summary.candidates) and summary.candidates[0].chosen
    if summary.certificate is None or name not in _OWN or is_unpruned:
        return None
    return "certified" if certified else "estimated"


def with_files(summary: RunSummary, files: Mapping[str, DeliveredFile], remedies: Sequence[str] = ()) -> RunSummary:
    """Return the summary with these files, and a verdict that says what they lack, and what would help."""
    finding = summary.finding or Finding(summary.verdict, summary.headline)
    said, head = finding.verdict, finding.headline
    summary = replace(summary, files=files)
    follows, is_certified = head == said, summary.certificate is not None and summary.certificate.certified
    for name in _OWN:
        about = files.get(name)
        if about is None or about.promise != "estimated" or not (about.fault or is_certified):
            continue
        why = "" if about.test is None else ": its test failed"
        said += (
            f" Warning: {name} is not within the budget: {about.fault}."
            if about.fault
            else (f" {name} is estimated, not certified{why}.")
        )
        if is_certified and head:
            head += f"; {name} is not"
    if summary.is_undelivered:
        why = " ".join(f"{name}: {_sentence(reason)}" for name, reason in summary.not_written.items())
        said = f"No deployable file could be written: there is neither a bundle ({BUNDLE}/) nor {ONNX}. {said}"
        said += f" Why not: {why}" + (f" What would help: {'; '.join(remedies)}." if remedies else "")
        head = f"No deployable file; {head}"
    elif BUNDLE in summary.not_written and BUNDLE not in files:
        said += f" There is no bundle ({BUNDLE}/) of this network: {_sentence(summary.not_written[BUNDLE])}"
    return replace(summary, finding=finding, verdict=said, headline=said if follows else head)


def _sentence(reason: str) -> str:
    line = " ".join(reason.split())
    line = line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ..."
    return line if line.endswith(".") else f"{line}."
