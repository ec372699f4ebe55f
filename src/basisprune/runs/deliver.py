"""A result -> the files of its folder: the model in all its forms, the report, and the summary as the last one."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate import PartialState
from torch import Tensor

from basisprune.data import LabelledImages, make_loader, prepare
from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.bundle.files import CONFIG as BUNDLE_CONFIG
from basisprune.deploy.bundle.files import NAMES as BUNDLE_FILES
from basisprune.deploy.export import OnnxReport, evaluate_onnx, export_onnx
from basisprune.deploy.export.evaluating import as_pixels
from basisprune.deploy.export.runtime import has_onnx
from basisprune.deploy.latency import Backend, measure_latency
from basisprune.errors import BasisPruneError, MissingExtraError
from basisprune.files import write_text
from basisprune.report.html import write_report
from basisprune.runs.summary import rounds
from basisprune.training.intervals import wilson_interval
from basisprune.types import InputSpec

if TYPE_CHECKING:
    from basisprune.runs.compress import Compressed

BUNDLE, ONNX, INT8, REPORT, SUMMARY = "model", "model.onnx", "model.int8.onnx", "report.html", "summary.json"
_BATCHES = (1, 32)
_SECONDS = 30.0  # that the comparison of latencies may take
_CALIBRATION = 256


def deliver(
    result: Compressed, folder: Path, *, onnx: bool | None, int8: bool, say: Callable[[str], None]
) -> dict[str, Any]:
    """The summary with what was written into the folder and how fast it runs; it is written there last.

    A form that the model cannot take is left out, and `say` gets the reason. What an earlier start of the run
    delivered is gone.
    """
    if onnx is None and not has_onnx():
        say("model.onnx is not written: " + str(MissingExtraError("onnx", extra="onnx")))
    with_onnx = has_onnx() if onnx is None else onnx
    if int8 and not with_onnx:
        say(f"{INT8} is not written, as it is made from {ONNX}")
    if not PartialState().is_main_process:
        return dict(result.summary)
    folder.mkdir(parents=True, exist_ok=True)
    summary = {**result.summary, "latency": _latency(result, with_onnx, say)}
    _clear(folder)
    files: dict[str, dict[str, Any]] = {}
    if _written(BUNDLE, say, lambda: _save_bundle(result, folder / BUNDLE)):
        size = (folder / BUNDLE / "model.safetensors").stat().st_size
        files[BUNDLE] = {"bytes": size, "what": "for Python: basisprune.from_pretrained"}
    if with_onnx and (report := _written(ONNX, say, lambda: _export(result, folder / ONNX))):
        files[ONNX] = {"bytes": report.size, "what": "for ONNX Runtime and others; takes pixels"}
        if int8 and (about := _written(INT8, say, lambda: _int8(result, folder / ONNX))):
            files[INT8] = about
    summary["files"] = files
    try:
        write_report(summary, folder / REPORT)
    except MissingExtraError as error:
        say(f"{REPORT} is not written: {error}; everything that it would show is in {SUMMARY}")
    write_text(folder / SUMMARY, json.dumps(summary) + "\n")
    return summary


def _clear(folder: Path) -> None:
    """Removes what was delivered before: the summary, which vouches for the others, first."""
    bundle = [folder / BUNDLE / name for name in (BUNDLE_CONFIG, *sorted(BUNDLE_FILES))]
    for path in (folder / SUMMARY, *bundle, folder / ONNX, folder / INT8, folder / REPORT):
        path.unlink(missing_ok=True)
    with suppress(OSError):  # not there, or with files of somebody else, which saving tells of
        (folder / BUNDLE).rmdir()


def _written(name: str, say: Callable[[str], None], write: Callable[[], Any]) -> Any:
    """What writing returns, None where the model cannot take that form."""
    say(f"writing {name}")
    try:
        return write()
    except BasisPruneError as error:
        say(f"{name} is not written: {error}")
        return None


def _save_bundle(result: Compressed, folder: Path) -> Path:
    summary = result.summary
    metrics = {key: summary[key] for key in ("verdict", "test", "reference") if key in summary}
    metrics["validation"] = {"accuracy": result.chosen.accuracy, "interval": result.chosen.interval}
    return save_pretrained(
        result.model,
        folder,
        classes=summary["classes"],
        metrics=json.loads(json.dumps(metrics)),
        plans=result.state.plans,
    )


def _export(result: Compressed, path: Path, *, int8: bool = False) -> OnnxReport:
    spec = _spec(result)
    prepared = _is_prepared(result)
    images = _calibration(result.data.train, spec, prepared=prepared)
    return export_onnx(
        result.model,
        path,
        check_inputs=images[:1],
        classes=result.summary["classes"],
        preprocess=not prepared,
        int8=images if int8 else None,
        input_spec=spec,
    )


def _int8(result: Compressed, path: Path) -> dict[str, Any]:
    """What is known of the int8 file beside the ONNX file; its accuracy is measured, as it differs."""
    small = path.with_name(INT8)
    try:
        _export(result, path, int8=True)  # once more, as the nodes to quantise are known only while exporting
        data = result.data.test or result.data.val or result.data.train
        found = evaluate_onnx(small, data, prepared=_is_prepared(result))
    except BasisPruneError:
        small.unlink(missing_ok=True)
        raise
    return {
        "bytes": small.stat().st_size,
        "what": "the same with weights and activations of 8 bits",
        "accuracy": found.accuracy,
        "interval": wilson_interval(round(found.accuracy * found.count), found.count),
    }


def _latency(result: Compressed, with_onnx: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """The latency of the unpruned and of the chosen model, which take turns."""
    say("measuring latency, unpruned and pruned in turns")
    models = {"before": result.original, "after": result.model}
    shape = _spec(result).shape
    backends: list[Backend] = ["eager", "onnxruntime"] if with_onnx else ["eager"]
    repeats = rounds(models, shape, images=sum(_BATCHES) * len(backends), seconds=_SECONDS)
    try:
        report = measure_latency(models, shape, batch_sizes=_BATCHES, backends=backends, repeats=repeats)
    except Exception as error:  # a network that torch's exporter does not take
        if not with_onnx:
            raise
        say(f"ONNX Runtime's latency could not be measured: {error}")
        report = measure_latency(models, shape, batch_sizes=_BATCHES, backends=["eager"], repeats=repeats)
    return asdict(report)


def _spec(result: Compressed) -> InputSpec:
    spec: InputSpec = result.model.input_spec  # type: ignore[assignment]
    return spec


def _is_prepared(result: Compressed) -> bool:
    return bool(result.summary["config"]["recipe"]["train"]["prepared"])


def _calibration(data: LabelledImages, spec: InputSpec, *, prepared: bool) -> list[Tensor]:
    """Batches of training images as the exported graph takes them: uint8 pixels (N, H, W, C), or prepared ones."""
    batches, seen = [], 0
    for images, _ in make_loader(data, 32, shuffle=True, seed=0):
        batches.append(prepare(images, spec, prepared=True).contiguous() if prepared else as_pixels(images, spec))
        seen += len(images)
        if seen >= _CALIBRATION:
            break
    return batches
