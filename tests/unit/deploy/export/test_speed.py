"""Laws of timing files: all are run on what they take; how long they take is not asserted."""

from __future__ import annotations

import numpy as np
import pytest

from basisprune.deploy.export.facts import GraphInput
from basisprune.deploy.export.runtimes import RUNTIMES
from basisprune.deploy.export.speed import measure_files, random_images, time_files
from basisprune.types import InputSpec


@pytest.mark.parametrize(
    ("prepares", "layout", "shape", "kind"),
    [
        (True, "NHWC", (2, 4, 6, 3), np.uint8),
        (True, "NCHW", (2, 3, 4, 6), np.uint8),
        (False, "NCHW", (2, 3, 4, 6), "f4"),
    ],
)
def test_noise_is_what_the_file_takes(prepares, layout, shape, kind):
    spec = InputSpec(size=(4, 6), mean=(0.5,) * 3, std=(0.5,) * 3)
    images = random_images(GraphInput(spec, prepares, layout), 2)
    assert (images.shape, images.dtype) == (shape, np.dtype(kind))


def test_every_file_and_pytorch_are_timed(tiny):
    model, files = tiny
    found = time_files({str(kind): (RUNTIMES["onnx"], path) for kind, path in files.items()}, model, repeats=3)
    assert list(found) == ["False", "True", "NCHW", "PyTorch"]
    assert all(each.milliseconds > 0 and each.spread >= 0 for each in found.values())


def test_files_are_compared_with_the_first_at_each_batch_size(tiny):
    paths = list(tiny[1].values())
    rows = measure_files({"before": paths[0], "after": paths[1]}, RUNTIMES["onnx"], batch_sizes=(1, 4), repeats=3)
    assert [(row.model, row.backend, row.batch_size) for row in rows] == [
        (model, "onnxruntime", batch) for batch in (1, 4) for model in ("before", "after")
    ]
    assert [row.speedup for row in rows if row.model == "before"] == [1, 1]
