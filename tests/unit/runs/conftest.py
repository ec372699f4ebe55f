"""What the tests of runs share: one network in each form that can be loaded."""

from __future__ import annotations

import pytest
from tiny import NAMES, tiny_model

from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.export import export_onnx


@pytest.fixture(scope="session")
def forms(tmp_path_factory):
    """The folder of the tiny network's forms: bundle/, pixels.onnx and prepared.onnx; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("forms")
    model = tiny_model()
    save_pretrained(model, folder / "bundle", classes=NAMES)
    export_onnx(model, folder / "pixels.onnx", classes=NAMES, preprocess=True)
    export_onnx(model, folder / "prepared.onnx")
    return folder
