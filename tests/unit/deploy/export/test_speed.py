"""Laws of timing files: all are run on what they take; how long they take is not asserted."""

from __future__ import annotations

import pytest
import torch

from basisprune.deploy.export.exportable import GraphInput
from basisprune.deploy.export.onnx import ONNX
from basisprune.deploy.latency import file_latencies, random_images
from basisprune.types import InputSpec


@pytest.mark.parametrize(
    ("layout", "shape", "kind"),
    [
        ("NHWC", (2, 4, 6, 3), torch.uint8),
        ("NCHW", (2, 3, 4, 6), torch.uint8),
        (None, (2, 3, 4, 6), torch.float32),
    ],
)
def test_noise_is_what_the_file_takes(layout, shape, kind):
    spec = InputSpec(size=(4, 6), mean=(0.5,) * 3, std=(0.5,) * 3)
    images = random_images(GraphInput(spec, layout), 2)
    assert (images.shape, images.dtype) == (shape, kind)


def test_every_file_and_pytorch_are_timed_at_each_batch_size(tiny):
    model, paths = tiny
    files = {str(kind): (ONNX, path) for kind, path in paths.items()}
    rows = file_latencies(files, model, batch_sizes=(1, 4), repeats=3)
    assert [(row.model, row.backend, row.batch_size) for row in rows] == [
        (name, "eager" if name == "PyTorch" else "onnxruntime", size)
        for size in (1, 4)
        for name in ("False", "True", "NCHW", "PyTorch")
    ]
    assert all(row.seconds > 0 and row.spread >= 0 for row in rows)
    assert [row.speedup for row in rows if row.model == "False"] == [1, 1]
