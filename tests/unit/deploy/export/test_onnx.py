"""Laws of ONNX graphs: they compute what PyTorch does, in float and in 8 bits, or they are not written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from graphs import NAMES, close, metadata, pixels, run
from hypothesis import given
from hypothesis import strategies as st
from networks import NETWORKS
from PIL import Image
from tiny import tiny_images, tiny_model
from torch import Tensor, nn
from torch.nn import functional as F

from basisprune.basis.decompose import decompose
from basisprune.coupling import cut, trace_coupling
from basisprune.data import PreparedBatches
from basisprune.deploy.export import evaluate_onnx, export_onnx, export_program
from basisprune.deploy.export.onnx import open_session, over_two_axes, quantise_within, to_proto
from basisprune.deploy.fold import fold
from basisprune.errors import ConfigError, DataError, LayerError, MissingExtraError, ModelError
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


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.sampled_from([None, 2, "all"]), st.booleans())
def test_leading_axes_are_only_a_way_of_counting(leading, masked, scaled):
    query, value = torch.randn(*leading, 4, 6), torch.randn(*leading, 5, 3)
    key = torch.randn(*leading, 5, 6)
    shape = (4, 5) if masked == 2 else (*leading, 4, 5)
    mask = None if masked is None else torch.randn(shape)
    options = {"scale": 0.3} if scaled else {}
    wanted = F.scaled_dot_product_attention(query, key, value, mask, **options)
    torch.testing.assert_close(over_two_axes(query, key, value, mask, **options), wanted)


class _Attention(nn.Module):
    """Attention within windows of the image: (batch, windows, heads, length, width) unless there are fewer axes."""

    def __init__(self, axes: int) -> None:
        super().__init__()
        self.axes, self.mix = axes, nn.Conv2d(3, 24, 1)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.mix(images).flatten(2).transpose(1, 2)  # (batch, 16, 24)
        if self.axes == 3:
            query, key, value = rows.chunk(3, -1)
        else:
            windows = rows.unflatten(1, (4, 4)).unflatten(3, (3, 2, 4))
            query, key, value = windows.permute(3, 0, 1, 4, 2, 5).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0)
        return mixed.flatten(1)


@pytest.mark.parametrize("axes", [3, 5])
def test_attention_with_other_than_four_axes_is_exported(axes):
    torch.manual_seed(0)
    network = _Attention(axes).eval()
    session = open_session(to_proto(network, torch.randn(2, 3, 4, 4)).SerializeToString())
    for count in (1, 3):
        images = torch.randn(count, 3, 4, 4)
        (found,) = session.run(None, {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), network(images), rtol=1e-5, atol=1e-6)


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
    with torch.no_grad():
        expected = model(x)
    assert (run(int8, x) - expected).abs().max() < 0.05 * (expected.max() - expected.min())


def test_statistics_that_say_something_are_in_the_file(tmp_path):
    model, x = NETWORKS["concat"](dtype=torch.float32)
    report = export_onnx(model, tmp_path / "m.onnx", example_inputs=x)
    assert not any(node.op_type == "ConstantOfShape" for node in onnx.load(report.path).graph.node)


def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("basisprune.deploy.export.runtime.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'onnx' is needed.*basisprune\[onnx\]"):
        export_onnx(tiny_model(), tmp_path / "m.onnx")
    with pytest.raises(MissingExtraError, match=r"'onnx' is needed.*basisprune\[onnx\]"):
        evaluate_onnx(tmp_path / "m.onnx", tiny_images())
