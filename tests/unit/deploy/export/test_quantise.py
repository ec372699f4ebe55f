"""Laws of 8 bits."""

from __future__ import annotations

import pytest
import torch
from graphs import NAMES, metadata
from tiny import tiny_images
from torch import nn

from basisprune.data import PreparedBatches
from basisprune.deploy.export import evaluate_onnx, export_onnx
from basisprune.transfer.model import transfer_model


@pytest.mark.parametrize("preprocess", [False, True])
def test_int8_is_smaller_close_and_knows_its_classes(preprocess, tmp_path):
    torch.manual_seed(0)
    model, data = transfer_model("test_resnet", 3, input_size=32), tiny_images()
    nn.init.normal_(model.classifier.weight)
    x = torch.randint(0, 256, (16, 32, 32, 3), dtype=torch.uint8)
    batches = [x[:8], x[8:]] if preprocess else list(PreparedBatches(data, model.input_spec, batch_size=16))
    report = export_onnx(
        model, tmp_path / "m.onnx", classes=NAMES, preprocess=preprocess, int8=batches, check_inputs=batches
    )
    assert report.int8_path == tmp_path / "m.int8.onnx"
    assert report.int8_size < 0.5 * report.size
    assert report.agreement > 0.8
    assert metadata(report.int8_path) == metadata(report.path)
    one, other = (evaluate_onnx(path, data) for path in (report.path, report.int8_path))
    assert abs(one.loss - other.loss) < 0.2 * one.loss
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", "m.int8.onnx"}
