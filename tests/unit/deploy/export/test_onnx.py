"""Laws of exported networks: they compute what PyTorch does, or they are not written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from networks import NETWORKS
from PIL import Image
from tiny import tiny_decomposed, tiny_images, tiny_model
from torch import Tensor, nn
from torch.utils.data import Subset

from basisprune.basis.split import decompose
from basisprune.coupling import cut, trace_coupling
from basisprune.data import PreparedBatches
from basisprune.deploy.export import evaluate_onnx, export_onnx, export_program
from basisprune.deploy.fold import fold
from basisprune.errors import ConfigError, DataError, LayerError, MissingExtraError, ModelError
from basisprune.training.evaluation import evaluate
from basisprune.transfer.model import transfer_model

NAMES = ["red", "green", "blue"]
EXAMPLE = Path(__file__).parents[4] / "docs" / "predict_onnx.py"


def run(path: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": x.numpy()})[0])


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (one - other).abs().max() <= 1e-4 * one.abs().max()


def pixels(count: int = 5) -> Tensor:
    return torch.randint(0, 256, (count, 16, 16, 3), dtype=torch.uint8)


def metadata(path: Path) -> dict:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    return {key: json.loads(value) for key, value in facts.items() if key.startswith("basisprune.")}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[nn.Module, dict[object, Path]]:
    """A network, and its files with each kind of preparation."""
    model, folder = tiny_model(), tmp_path_factory.mktemp("tiny")
    nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(0))
    reports = {
        kind: export_onnx(model, folder / f"{kind}.onnx", classes=NAMES, preprocess=kind)
        for kind in (False, True, "NCHW")
    }
    return model, {kind: report.path for kind, report in reports.items()}


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


def test_statistics_that_say_nothing_are_not_in_the_file(tmp_path):
    model, x = NETWORKS["concat"](dtype=torch.float32)
    folded = fold(model, x)
    report = export_onnx(folded, tmp_path / "m.onnx", example_inputs=x)
    proto = onnx.load(report.path)
    norms = [node for node in proto.graph.node if node.op_type == "BatchNormalization"]
    assert [list(norm.input[3:]) for norm in norms] == [["fill.0.6", "fill.1.6"], ["fill.0.10", "fill.1.10"]]
    assert not any("running" in constant.name for constant in proto.graph.initializer)
    with torch.no_grad():
        assert close(model(x), run(report.path, x))
    onnx.checker.check_model(proto)
    int8 = export_onnx(folded, tmp_path / "m.onnx", example_inputs=x, int8=[x]).int8_path
    assert run(int8, x).shape == (2, 4)


def test_statistics_that_say_something_are_in_the_file(tmp_path):
    model, x = NETWORKS["concat"](dtype=torch.float32)
    report = export_onnx(model, tmp_path / "m.onnx", example_inputs=x)
    assert not any(node.op_type == "ConstantOfShape" for node in onnx.load(report.path).graph.node)


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
    with pytest.raises(ModelError, match="the program differs"):
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


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("basisprune.deploy.export.runtime.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'onnx' is needed.*basisprune\[onnx\]"):
        export_onnx(tiny_model(), tmp_path / "m.onnx")
    with pytest.raises(MissingExtraError, match=r"'onnx' is needed.*basisprune\[onnx\]"):
        evaluate_onnx(tmp_path / "m.onnx", tiny_images())


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
    with pytest.raises(DataError, match="holds no image"):
        evaluate_onnx(tiny[1][False], Subset(tiny_images(), []))
    with pytest.raises(DataError, match="prepares its images itself"):
        evaluate_onnx(tiny[1][True], tiny_images(), prepared=True)


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


def test_a_program_of_torch_export_computes_the_same_for_any_batch_size(tmp_path):
    model = tiny_decomposed()
    loaded = torch.export.load(export_program(model, tmp_path / "m.pt2")).module()
    for count in (1, 2, 5):
        x = torch.randn(count, 3, 16, 16)
        with torch.no_grad():
            assert close(model(x), loaded(x))
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]


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
