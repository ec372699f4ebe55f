"""A result -> the same network for another runtime, checked, measured beside the others and noted in its summary."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from basisprune.callback import Callback, NullCallback
from basisprune.data import LabelledImages
from basisprune.data.load import Reading, Source, read_parts
from basisprune.data.manifest import IMAGES, Role, read_manifest
from basisprune.deploy.export.exportable import Exportable
from basisprune.deploy.export.runtime import FileModel, Runtime
from basisprune.deploy.export.runtimes import RUNTIMES, find_runtime
from basisprune.deploy.export.writing import INT8_STEM, STEM, agreement, export
from basisprune.deploy.latency import PYTORCH, Latency, file_latencies, random_images
from basisprune.errors import BundleError, CheckpointError, MissingExtraError, ModelError
from basisprune.files import file_digest, locked, user_path
from basisprune.report.html import write_report
from basisprune.results import DeliveredFile, RunSummary, RuntimeRow
from basisprune.runs.deliver import exported_file, with_files
from basisprune.runs.exporter import BATCH, calibration_batches
from basisprune.runs.finished import Judgement, Loaded, accuracy_on, is_own, load_any, parts_of
from basisprune.runs.folder import CONFIG, PREPARED, REPORT, SUMMARY, refuse_links
from basisprune.types import Part

_CHECKED = 64
_SEEN: tuple[Role, ...] = ("val", "train")
_HELD_OUT: tuple[Role, ...] = ("test", "confirm", *_SEEN)


@dataclass(frozen=True)
class ExportOptions:
    """How to export: labelled `data` in place of the run's own, another folder, int8 too, over files that are there."""

    data: Source | None = None
    output: Path | None = None
    int8: bool = False
    overwrite: bool = False
    trust_remote_code: bool = False


def export_result(
    result: str | Path, to: str, options: ExportOptions | None = None, *, callback: Callback | None = None
) -> tuple[RuntimeRow, ...]:
    """Export a result, and return a row for each runtime that its folder has files for.

    Outputs are compared with PyTorch's on images of the run, and the accuracy on its test images (of a run that was
    stopped, on those that searched) is measured by the runtime. The summary and report of the run get the rows too.

    Args:
        result: The output folder of `compress` or `train`, or a bundle.
        to: A name in `RUNTIMES`.
        options: Other images, another folder, int8.
        callback: Receives the progress.

    Raises:
        ConfigError: For an unknown runtime, int8 that cannot be had, and files that are there already.
        MissingExtraError: Without the packages.
        BundleError: For what is not a result.
        ModelError: If the network cannot be exported, or its outputs differ.
    """
    chosen, callback = options or ExportOptions(), callback or NullCallback()
    runtime = find_runtime(to)
    runtime.require()
    loaded = load_any(result, trust_remote_code=chosen.trust_remote_code)
    if isinstance(loaded.model, FileModel):
        raise BundleError(
            f"{result}: is an exported file already; pass the output folder of its run, or its model/ folder"
        )
    if chosen.output is not None:
        folder = user_path(chosen.output, "export")
    else:
        folder = (loaded.folder or Path(result).resolve().parent) if loaded.settings else Path(result)
    if (folder / CONFIG).exists():
        refuse_links(folder)
    work = _Work(loaded, chosen, folder, callback)
    with locked(folder) if folder.is_dir() else nullcontext():
        callback.log(f"writing {folder / runtime.files()[0]}")
        export(
            loaded.model,
            to,
            folder,
            images=work.calibration if chosen.int8 else work.checks,
            prepared=work.prepared,
            int8=chosen.int8,
            classes=loaded.classes,
            overwrite=chosen.overwrite,
        )
        rows = work.rows(runtime)
        _note(folder, rows, callback)
    return rows


class _Work:
    """What exporting one result needs to know: its images, and what all of its files do with them."""

    def __init__(self, loaded: Loaded, options: ExportOptions, folder: Path, callback: Callback) -> None:
        self.loaded, self.options, self.folder, self.callback = loaded, options, folder, callback
        self.prepared = loaded.settings.get(PREPARED) is True
        self.reading = Reading(callback=callback)
        self.own = is_own(loaded, options.data)
        own_source = str(loaded.settings["data"]) if self.own else None
        self.source: Source | None = own_source if options.data is None else options.data
        known = () if self.source is None else self._known_parts(self.source)
        roles = _may_judge(loaded.folder or Path()) if self.own else _HELD_OUT
        self.judged: Part = next((role for role in roles if role in known), "all")
        images = None if self.source is None else self._images("train" if "train" in known else "all")
        self.calibration = [] if images is None else calibration_batches(images)
        self.checks = self.calibration[: _CHECKED // BATCH]
        self.in_pytorch = self._accuracy(loaded)  # before anything is written: images may not fit
        if self.source is None:
            callback.log(
                "the images of this result are not there, so it is compared on random ones, and no accuracy is "
                "measured; pass labelled images by --data"
            )

    def rows(self, wanted: Runtime) -> tuple[RuntimeRow, ...]:
        """Return a row for PyTorch and for each file in the folder, if it is new or runs within bounds."""
        files: dict[str, tuple[Runtime, Path]] = {}
        for runtime in RUNTIMES.values():
            for stem in (STEM, INT8_STEM):
                path = self.folder / runtime.files(stem)[0]
                is_new = runtime is wanted and (stem == STEM or self.options.int8)
                if path.is_file() and (is_new or self._runs(path, runtime)):
                    files[path.name] = runtime, path
        self.callback.log(f"measuring {', '.join([PYTORCH, *files])}")
        times = {row.model: row for row in file_latencies(files, self.loaded.model)}
        found = [self._row(runtime, path, times[name]) for name, (runtime, path) in files.items()]
        size = sum(tensor.nbytes for tensor in self.loaded.model.state_dict().values())
        ms, spread = (1000 * seconds for seconds in (times[PYTORCH].seconds, times[PYTORCH].spread))
        own = RuntimeRow("eager", PYTORCH, "", size, ms, spread, 1, compared=sum(map(len, self.checks)))
        return (*found, _judged(own, self.in_pytorch))

    def _runs(self, path: Path, runtime: Runtime) -> bool:
        if not runtime.is_data or not runtime.is_installed:
            return False
        try:
            file = FileModel(path, runtime, 1)
            file.outputs(random_images(file.input, 1))
        except ModelError as error:
            self.callback.log(f"not measured: {error}")
            return False
        return True

    def _row(self, runtime: Runtime, path: Path, time: Latency) -> RuntimeRow:
        layout = runtime.layout(prepared=self.prepared)
        what = Exportable.of(self.loaded.model, layout, spec=self.loaded.spec, classes=self.loaded.classes)
        checks = [what.input.batch(images, prepared=self.prepared) for images in self.checks]
        near = agreement(what, FileModel(path, runtime, 1), checks)
        is_int8 = path.name == runtime.files(INT8_STEM)[0]
        names = runtime.files(INT8_STEM if is_int8 else STEM)
        row = RuntimeRow(
            name=f"{runtime.name}{' int8' if is_int8 else ''}",
            title=f"{runtime.title}{', int8' if is_int8 else ''}",
            file=path.name,
            bytes=sum((self.folder / name).stat().st_size for name in names),
            latency_ms=1000 * time.seconds,
            spread_ms=1000 * time.spread,
            threads=1,
            difference=near.difference,
            same=near.same,
            compared=near.images,
        )
        return _judged(row, self._accuracy(replace(self.loaded, model=FileModel(path, runtime, 1))))

    def _accuracy(self, loaded: Loaded) -> Judgement | None:
        if self.source is None:
            return None
        return accuracy_on(loaded, self.source, self.judged, callback=self.callback)

    def _known_parts(self, source: Source) -> Collection[str]:
        """The parts that the run wrote down, or that the data has itself; none if it is not divided."""
        path = (self.loaded.folder or Path()) / IMAGES
        if self.own:
            return read_manifest(path).parts.keys() if path.exists() else ()
        parts = read_parts(source, self.loaded.spec.image_size, self.reading, self.loaded.spec.white).parts
        return parts.keys() if len(parts) > 1 else ()

    def _images(self, part: Part) -> LabelledImages:
        return parts_of(self.loaded, self.source or "", part, self.reading)[0]


def _judged(row: RuntimeRow, found: Judgement | None) -> RuntimeRow:
    if found is None:
        return row
    return replace(row, accuracy=found.accuracy, interval=found.interval, images=found.images)


def _may_judge(folder: Path) -> tuple[Role, ...]:
    """Return the parts of the run's images that may be looked at, the best first.

    A run that was stopped, or is not finished, may resume and look at its test images then; the confirming ones may
    certify a later `compress`, unless they have been looked at.
    """
    if not (folder / SUMMARY).is_file():
        return _SEEN
    try:
        summary = RunSummary.read(folder / SUMMARY)
    except CheckpointError:  # that of `train`, or damaged
        return ("test", *_SEEN)
    return _SEEN if summary.interrupted else _HELD_OUT if summary.certificate else ("test", *_SEEN)


def _note(folder: Path, rows: tuple[RuntimeRow, ...], callback: Callback) -> None:
    """Writes the rows into the summary and the report of the folder, if it is that of a finished run."""
    if not (folder / SUMMARY).is_file():
        return
    try:
        summary = RunSummary.read(folder / SUMMARY)
    except CheckpointError as error:
        callback.log(f"the rows are not noted: {error}")
        return
    measured = {row.name for row in rows}
    others = tuple(row for row in summary.runtimes if row.name not in measured and (folder / row.file).is_file())
    try:
        summary = with_files(replace(summary, runtimes=(*rows[:-1], *others, rows[-1])), _noted(folder, rows, summary))
        write_report(summary, folder / REPORT)
        summary.write(folder / SUMMARY)
    except MissingExtraError as error:
        callback.log(f"{REPORT} is not renewed: {error}")
        summary.write(folder / SUMMARY)
    except (ValueError, LookupError, TypeError, ArithmeticError, AttributeError) as error:  # that of a stranger
        callback.log(f"the rows are not noted: {SUMMARY} does not make sense ({type(error).__name__}: {error})")


def _noted(folder: Path, rows: tuple[RuntimeRow, ...], summary: RunSummary) -> dict[str, DeliveredFile]:
    """Return the summary's files, with those of these rows that are new or were written anew."""
    files, by_file = dict(summary.files), {row.file: row for row in rows}
    for first, *rest in (runtime.files(stem) for runtime in RUNTIMES.values() for stem in (STEM, INT8_STEM)):
        if first in by_file and (first not in files or files[first].sha256 != file_digest(folder / first)):
            files[first] = exported_file(folder / first, summary, by_file[first])
            files |= {name: exported_file(folder / name, summary) for name in rest}
    return files
