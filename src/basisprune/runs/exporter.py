"""Deployed networks -> ONNX files, float and int8, as they are certified and delivered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from basisprune.budget.certify import AcceptanceRule
from basisprune.budget.metrics import format_value, in_words, value_of
from basisprune.data import LabelledImages, LoaderPart, Splits, make_loader
from basisprune.deploy.export import OnnxReport, export_onnx
from basisprune.deploy.export.exportable import GraphInput
from basisprune.deploy.export.onnx import ONNX, Quantised, quantise_within
from basisprune.deploy.export.runtime import FileModel
from basisprune.tasks import CLASSIFICATION, Outcomes, Task
from basisprune.training.evaluation import judge
from basisprune.transfer.model import spec_of
from basisprune.types import InputSpec

BATCH = 32
_CALIBRATION = 256


@dataclass(frozen=True)
class Int8Export:
    """An int8 file: which of its layers stay in float, and the metric before and after if it breaks the budget."""

    layers: Quantised
    broken: str = ""

    @property
    def what(self) -> str:
        count = self.layers.in_float
        but = f"; {count} layer{'' if count == 1 else 's'} in float, which 8 bits would harm" if count else ""
        return f"the same with 8-bit weights and activations{but}"

    @property
    def fault(self) -> str:
        """How it breaks the budget, in a clause; empty if it does not."""
        if not self.broken:
            return ""
        kept = f"{self.layers.in_float} of {self.layers.layers} layers in float"
        return f"it breaks the budget even with {kept}: {self.broken}"


@dataclass(frozen=True)
class Exporter:
    """Writes networks for these images."""

    data: Splits
    task: Task = CLASSIFICATION

    def outcomes(self, model: nn.Module, images: LabelledImages) -> Outcomes:
        return judge(model, images, self.task)

    def file_outcomes(self, path: Path, model: nn.Module, images: LabelledImages) -> Outcomes:
        """What the ONNX file says of them; its output has the structure of that of the network, pruned or not."""
        file = FileModel(path, ONNX, like=model, trusted=True)
        return judge(file, images, self.task, batch_size=64, shared=False)

    def export(self, model: nn.Module, path: Path) -> OnnxReport:
        """The float file, which takes pixels unless the images are prepared."""
        spec = spec_of(model)
        return export_onnx(
            model,
            path,
            check_inputs=self._calibration(spec)[:1],
            classes=list(self.data.classes) or None,
            preprocess=not self.data.train.prepared,
            input_spec=spec,
        )

    def quantise(self, source: Path, target: Path, reference: nn.Module, standard: AcceptanceRule | None) -> Int8Export:
        """Write the int8 file of a float one, within the standard (None: any) on the validation images if possible."""
        spec, val = spec_of(reference), self.data.val
        if standard is None or val is None:
            return Int8Export(quantise_within(source, target, self._calibration(spec), lambda _path: True))
        before = self.outcomes(reference, val)

        def accepts(path: Path) -> bool:
            return standard.passes(before, self.file_outcomes(path, reference, val))

        found = quantise_within(source, target, self._calibration(spec), accepts)
        after = self.file_outcomes(target, reference, val)
        if standard.within(before, after):
            return Int8Export(found)
        metric = standard.promise.metric
        was, now = (format_value(metric, value_of(metric, each)) for each in (before, after))
        where = f"{in_words(metric)} on the validation images"
        return Int8Export(found, f"{where} is {now}, and {was} for the unpruned model")

    def _calibration(self, spec: InputSpec) -> list[Tensor]:
        """Batches of training images as the exported graph expects them: uint8 pixels (N, H, W, C), or prepared."""
        batches = calibration_batches(self.data.train)
        if isinstance(self.data.train, LoaderPart):
            return [inputs.float().contiguous() for inputs in batches if tuple(inputs.shape[1:]) == spec.shape]
        prepared = self.data.train.prepared
        wanted = GraphInput(spec, None if prepared else "NHWC")
        return [wanted.batch(images, prepared=prepared) for images in batches]


def calibration_batches(images: LabelledImages) -> list[Tensor]:
    """Batches of a few hundred of the images, as they are, drawn at random; the same each time."""
    batches, seen = [], 0
    for batch, _ in make_loader(images, BATCH, shuffle=True, seed=0):
        batches.append(batch)
        seen += len(batch)
        if seen >= _CALIBRATION:
            break
    return batches
