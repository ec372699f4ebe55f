"""Laws that every export keeps."""

from __future__ import annotations

import pytest
import torch
from graphs import close, pixels, run
from tiny import tiny_decomposed, tiny_model
from torch import Tensor, nn

from basisprune.deploy.export import export_onnx, export_program
from basisprune.errors import ModelError


@pytest.mark.parametrize("layout", [True, "NCHW"])
def test_preparation_can_be_in_the_graph(layout, tiny):
    (model, files), x = tiny, pixels()
    images = x.permute(0, 3, 1, 2)
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (model.input_spec.mean, model.input_spec.std))
    with torch.no_grad():
        expected = model((images / 255 - mean) / std)
    assert close(expected, run(files[layout], images.contiguous() if layout == "NCHW" else x))


def test_the_network_is_not_changed(tmp_path):
    model = tiny_decomposed().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    export_onnx(model, tmp_path / "m.onnx", preprocess=True)
    export_program(model, tmp_path / "m.pt2")
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.state_dict().keys() == before.keys()


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_what_cannot_be_exported_is_refused_and_nothing_is_written(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), Branching())
    for export, name in ((export_onnx, "m.onnx"), (export_program, "m.pt2")):
        with pytest.raises(ModelError, match="Sequential cannot be exported"):
            export(model, tmp_path / name, example_inputs=torch.randn(2, 4))
    broken = tiny_model()
    broken.classifier.bias.data.fill_(torch.nan)
    for export, name in ((export_onnx, "m.onnx"), (export_program, "m.pt2")):
        with pytest.raises(ModelError, match="NaN"):
            export(broken, tmp_path / name)
    with pytest.raises(ModelError, match=r"ends in \.pt2"):
        export_program(tiny_model(), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []
