"""What the tests of exports share: one network with its files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from graphs import NAMES
from tiny import tiny_model
from torch import nn

from basisprune.deploy.export import export_onnx


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> tuple[nn.Module, dict[object, Path]]:
    """A network, and its files with each kind of preparation."""
    model, folder = tiny_model(), tmp_path_factory.mktemp("tiny")
    nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(0))
    reports = {
        kind: export_onnx(model, folder / f"{kind}.onnx", classes=NAMES, preprocess=kind)
        for kind in (False, True, "NCHW")
    }
    return model, {kind: report.path for kind, report in reports.items()}
