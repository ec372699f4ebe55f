"""Laws of a graph that differs: the first layer that does is named."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_model
from torch import Tensor, nn

from basisprune.deploy.export import export_onnx, export_program
from basisprune.errors import LayerError, ModelError


class Liar(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.5 if torch.compiler.is_compiling() else x


def test_a_graph_that_differs_is_refused_with_the_layer_named(tmp_path):
    model = tiny_model()
    model.backbone.add_module("6", Liar())
    model.backbone.add_module("7", nn.Softplus())
    with pytest.raises(LayerError, match=r"backbone\.6: is the first layer where the ONNX graph differs") as caught:
        export_onnx(model, tmp_path / "m.onnx", preprocess=True)
    assert caught.value.layer == "backbone.6"
    with pytest.raises(ModelError, match="output differs from PyTorch's"):
        export_program(model, tmp_path / "m.pt2")
    assert list(tmp_path.iterdir()) == []


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(x)
        return x + 1 if torch.compiler.is_compiling() else x


def test_a_difference_outside_of_all_layers_is_refused_too(tmp_path):
    with pytest.raises(LayerError, match="the difference lies between them"):
        export_onnx(Between(), tmp_path / "m.onnx", example_inputs=torch.randn(2, 4))
