"""Deployed networks -> ONNX files, float and int8, as they are certified and delivered."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from basisprune.budget.certify import Standard
from basisprune.data import Splits, make_loader, prepare
from basisprune.deploy.export import OnnxReport, export_onnx
from basisprune.deploy.export.evaluating import as_pixels, predict_onnx
from basisprune.deploy.export.quantise import Quantised, quantise_within
from basisprune.training.predict import predict
from basisprune.transfer.model import spec_of
from basisprune.types import InputSpec

_CALIBRATION = 256


@dataclass(frozen=True)
class Exporter:
    """Writes networks for these images; `prepared` means that they are already normalised floats."""

    data: Splits
    prepared: bool

    def export(self, model: nn.Module, path: Path) -> OnnxReport:
        """The float file, which takes pixels unless the images are prepared."""
        spec = spec_of(model)
        return export_onnx(
            model,
            path,
            check_inputs=self._calibration(spec)[:1],
            classes=list(self.data.classes),
            preprocess=not self.prepared,
            input_spec=spec,
        )

    def quantise(self, source: Path, target: Path, reference: nn.Module, standard: Standard | None) -> Quantised:
        """What came of the int8 file of a float one: within the standard, as the validation images tell.

        `reference` is the unpruned network. Without a standard every file is good enough.
        """
        spec, val = spec_of(reference), self.data.val
        if standard is None or val is None:
            return quantise_within(source, target, self._calibration(spec), lambda _path: True)
        before = predict(reference, val, prepared=self.prepared)

        def accepts(path: Path) -> bool:
            return standard.passes(before, predict_onnx(path, val, prepared=self.prepared))

        return quantise_within(source, target, self._calibration(spec), accepts)

    def _calibration(self, spec: InputSpec) -> list[Tensor]:
        """Batches of training images as the exported graph expects them: uint8 pixels (N, H, W, C), or prepared."""
        batches, seen = [], 0
        for images, _ in make_loader(self.data.train, 32, shuffle=True, seed=0):
            given = prepare(images, spec, prepared=True).contiguous() if self.prepared else as_pixels(images, spec)
            batches.append(given)
            seen += len(images)
            if seen >= _CALIBRATION:
                break
        return batches
