"""Laws of 8 bits."""

from __future__ import annotations

import pytest
import torch
from graphs import NAMES, metadata
from tiny import tiny_images
from torch import nn

from basisprune.data import PreparedBatches
from basisprune.deploy.export import evaluate_onnx, export_onnx
from basisprune.deploy.export.onnx import quantise_within
from basisprune.deploy.fold import fold
from basisprune.transfer.model import transfer_model


@pytest.mark.parametrize("preprocess", [False, True])
@pytest.mark.parametrize("folded", [False, True])
def test_int8_is_smaller_close_and_knows_its_classes(folded, preprocess, tmp_path):
    torch.manual_seed(0)
    model, data = transfer_model("test_resnet", 3, input_size=32), tiny_images()
    nn.init.normal_(model.classifier.weight)
    model = fold(model, torch.zeros(1, 3, 32, 32)) if folded else model
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


def test_layers_that_hurt_most_stay_in_float_until_the_file_is_good_enough(tmp_path):
    torch.manual_seed(0)
    model = transfer_model("test_resnet", 3, input_size=32)
    batches = list(PreparedBatches(tiny_images(16), model.input_spec, batch_size=16))
    with torch.no_grad():  # one channel of a thousand times the size leaves no bits to the others
        next(iter(model.modules())).get_submodule("backbone.layer3.0.bn1").weight[0] *= 1000
    source = export_onnx(model, tmp_path / "m.onnx").path
    images, sizes = [batch[0] for batch in batches], []

    def asked(accepted_at: int):
        def accepts(path) -> bool:
            sizes.append(path.stat().st_size)
            return len(sizes) == accepted_at

        sizes.clear()
        return quantise_within(source, tmp_path / "m.int8.onnx", images, accepts)

    at_once = asked(1)
    assert (at_once.in_float, at_once.accepted) == (0, True)
    later = asked(3)
    assert later.accepted
    assert 0 < later.in_float < later.layers
    assert sizes == sorted(sizes)
    never = asked(9)
    assert (never.accepted, len(sizes)) == (False, 4)
    assert never.in_float == (never.layers + 1) // 2
