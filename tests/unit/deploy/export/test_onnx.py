"""Laws of exported networks: they compute what PyTorch does, or they are not written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from graphs import NAMES, close, metadata, pixels, run
from networks import NETWORKS
from PIL import Image
from tiny import tiny_model
from torch import nn

from basisprune.basis.decompose import decompose
from basisprune.coupling import cut, trace_coupling
from basisprune.deploy.export import export_onnx, export_program
from basisprune.deploy.fold import fold
from basisprune.errors import ConfigError, DataError
from basisprune.transfer.model import transfer_model

EXAMPLE = Path(__file__).parents[4] / "docs" / "predict_onnx.py"


@pytest.mark.parametrize(
    "name", ["residual", "grouped", "reflect_padded", "used_twice", "one_dimensional", "transposed"]
)
def test_a_network_computes_the_same_in_onnxruntime_for_any_batch_size(name, tmp_path):
    model, x = NETWORKS[name](dtype=torch.float32)
    model = decompose(model, scale_init=0.8)
    report = export_onnx(model, tmp_path / "m.onnx", example_inputs=x, check_inputs=x * 2)
    assert report.difference <= 1e-4
    assert report.size == report.path.stat().st_size
    for count in (1, 2, 7):
        inputs = torch.randn(count, *x.shape[1:])
        with torch.no_grad():
            assert close(model(inputs), run(report.path, inputs))
    onnx.checker.check_model(onnx.load(report.path))
    assert list(tmp_path.iterdir()) == [report.path]


def test_pruned_and_folded_networks_compute_the_same(tmp_path):
    model = decompose(transfer_model("test_resnet", 3, input_size=32))
    x = torch.randn(2, 3, 32, 32)
    coupling = trace_coupling(model, x)
    pruned = cut(model, coupling, {group.name: range(group.size // 2) for group in coupling.groups[:2]})
    reports = [export_onnx(pruned, tmp_path / "pruned.onnx")]
    folded = fold(pruned, x)
    reports.append(export_onnx(folded, tmp_path / "folded.onnx"))
    assert reports[1].size <= 1.02 * 4 * sum(p.numel() for p in folded.parameters()) + 64_000
    with torch.no_grad():
        assert all(close(pruned(x), run(report.path, x)) for report in reports)


def test_what_a_network_knows_of_itself_need_not_be_said(tmp_path):
    model = tiny_model()
    model.classes = NAMES
    folded = fold(model, torch.zeros(2, 3, 16, 16))
    facts = metadata(export_onnx(folded, tmp_path / "m.onnx", preprocess=True).path)
    assert facts["basisprune.classes"] == NAMES
    assert facts["basisprune.input"]["size"] == [16, 16]
    torch.export.load(export_program(folded, tmp_path / "m.pt2"))


def test_the_file_says_nothing_of_the_machine_that_wrote_it(tiny):
    for path in tiny[1].values():
        assert str(Path(__file__).parents[4]).encode() not in path.read_bytes()
        assert b"forward" not in path.read_bytes()


def test_the_file_knows_its_classes_and_its_input(tiny):
    model, files = tiny
    facts = metadata(files[False])
    assert facts["basisprune.classes"] == NAMES
    assert facts["basisprune.input"]["size"] == [16, 16]
    assert facts["basisprune.input"]["mean"] == list(model.input_spec.mean)
    assert [metadata(path)["basisprune.input"]["prepares"] for path in files.values()] == [False, True, True]
    assert [metadata(path)["basisprune.input"]["layout"] for path in files.values()] == ["NCHW", "NHWC", "NCHW"]


def test_wrong_settings_are_refused(tmp_path):
    path = tmp_path / "m.onnx"
    with pytest.raises(ConfigError, match="classes: 2 given, the network has 3"):
        export_onnx(tiny_model(), path, classes=["a", "b"])
    with pytest.raises(ConfigError, match="preprocess: 'CHWN' given"):
        export_onnx(tiny_model(), path, preprocess="CHWN")
    with pytest.raises(ConfigError, match="example_inputs: Conv2d does not know its input"):
        export_onnx(nn.Conv2d(3, 4, 1), path)
    with pytest.raises(DataError, match=r"torch.uint8 .* given, the graph takes torch.float32 \(N, 3, 16, 16\)"):
        export_onnx(tiny_model(), path, check_inputs=pixels())
    with pytest.raises(DataError, match="no batch came"):
        export_onnx(tiny_model(), path, int8=[])


@pytest.mark.parametrize("preprocess", [False, True])
def test_the_example_predicts_without_torch(preprocess, tiny, tmp_path):
    model, files = tiny
    colours = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(colours).save(tmp_path / "image.png")
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        "assert not {'torch', 'basisprune', 'torchvision', 'timm'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, str(EXAMPLE), str(files[preprocess]), "image.png", "image.png"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    mean, std = (np.array(values) for values in (model.input_spec.mean, model.input_spec.std))
    x = torch.from_numpy(((colours / 255 - mean) / std).transpose(2, 0, 1)[None]).float()
    with torch.no_grad():
        share, best = model(x).softmax(-1)[0].max(0)
    assert result.stdout.splitlines() == [f"image.png: {NAMES[best]} ({share:.1%})"] * 2


def test_the_example_is_short():
    lines = [line for line in EXAMPLE.read_text().splitlines() if line.strip()]
    assert len(lines) <= 30
