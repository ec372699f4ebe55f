"""Laws of the accuracy in onnxruntime."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_images
from torch import nn
from torch.utils.data import Subset

from basisprune.data import WrappedDataset
from basisprune.deploy.export import evaluate_onnx, export_onnx
from basisprune.errors import DataError, ModelError
from basisprune.training.evaluation import evaluate


@pytest.mark.parametrize("kind", [False, True, "NCHW"])
def test_accuracy_in_onnxruntime_is_that_in_pytorch(kind, tiny):
    (model, files), data = tiny, tiny_images()
    expected, given = evaluate(model, data), evaluate_onnx(files[kind], data, batch_size=10)
    assert (given.accuracy, given.count) == (pytest.approx(expected.accuracy), expected.count)
    assert given.loss == pytest.approx(expected.loss, rel=1e-4)


def test_what_does_not_fit_is_not_evaluated(tiny, tmp_path):
    path = export_onnx(nn.Linear(4, 4), tmp_path / "m.onnx", example_inputs=torch.randn(2, 4)).path
    with pytest.raises(ModelError, match="does not say how it wants its images"):
        evaluate_onnx(path, tiny_images())
    with pytest.raises(DataError, match="contains no images"):
        evaluate_onnx(tiny[1][False], Subset(tiny_images(), []))
    with pytest.raises(DataError, match="prepares its images itself"):
        evaluate_onnx(tiny[1][True], WrappedDataset(tiny_images(), prepared=True))
