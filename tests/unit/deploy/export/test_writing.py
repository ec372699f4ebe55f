"""Laws of files for any runtime: they compute what PyTorch does and say what they take, or they are not written."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from bundles import content
from graphs import NAMES, close, pixels, run
from tiny import tiny_decomposed, tiny_images, tiny_model
from torch import Tensor, nn
from torch.utils.data import Subset

from basisprune.data import WrappedDataset
from basisprune.deploy.export import Exported, evaluate_onnx, export, export_onnx, export_program
from basisprune.deploy.export.exportable import Exportable
from basisprune.deploy.export.runtime import FileModel
from basisprune.deploy.export.runtimes import RUNTIMES
from basisprune.deploy.fold import fold
from basisprune.errors import ConfigError, DataError, MissingExtraError, ModelError
from basisprune.training.evaluation import evaluate
from basisprune.transfer.model import transfer_model

INSTALLED = ("onnx", "openvino", "torch")  # with the extra dev; benchmarks/runtimes.py checks the others


def images(count: int = 12) -> torch.Tensor:
    return torch.stack([tiny_images(count)[index][0] for index in range(count)])


def sharp_model() -> nn.Module:
    """The tiny network with answers that differ from image to image."""
    model = tiny_model()
    nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(0))
    model.classes = NAMES
    return model


def facts_of(file: Exported) -> tuple[object, object]:
    model = FileModel(file.path, RUNTIMES[file.runtime])
    return model.input, model.classes


@pytest.mark.parametrize("name", INSTALLED)
@pytest.mark.parametrize("prepared", [False, True])
def test_a_file_computes_the_same_and_knows_its_classes_and_its_input(name, prepared, tmp_path):
    model, runtime = sharp_model(), RUNTIMES[name]
    given = torch.randn(8, 3, 16, 16) if prepared else images()
    (found,) = export(model, name, tmp_path / "out", images=given, prepared=prepared)
    assert (found.agreement.difference <= 1e-4, found.agreement.same, found.agreement.images) == (True, 1, len(given))
    assert set(content(tmp_path / "out")) == set(runtime.files())
    assert found.bytes == sum(map(len, content(tmp_path / "out").values()))
    file = FileModel(found.path, runtime)
    assert file.classes == tuple(NAMES)
    assert (file.input.spec, file.input.layout) == (model.input_spec, None if prepared else "NHWC")
    for count in (1, 5):
        (scores,) = file.outputs(file.input.batch(given[:count], prepared=prepared))
        assert scores.shape == (count, 3)


def test_openvino_reads_labels_and_input_where_it_looks_for_them(tmp_path):
    openvino = pytest.importorskip("openvino")
    model = sharp_model()
    evil = ["red fox", '<b>"x" & y', "a\nb"]
    (found,) = export(model, "openvino", tmp_path, classes=evil)
    said = openvino.Core().read_model(found.path)
    assert said.get_rt_info(["model_info", "labels"]).value.split() == ["red_fox", '<b>"x"_&_y', "a_b"]
    assert said.get_rt_info(["model_info", "model_type"]).value == "Classification"
    assert facts_of(found)[1] == tuple(evil)


@pytest.mark.parametrize("name", ["onnx", "openvino"])
def test_int8_is_smaller_and_close(name, tmp_path):
    torch.manual_seed(0)
    model = transfer_model("test_resnet", 3, input_size=32)
    nn.init.normal_(model.classifier.weight)
    model = fold(model, torch.zeros(1, 3, 32, 32))
    full, small = export(model, name, tmp_path, images=images(32).split(16), int8=True)
    assert small.path.name.startswith("model.int8.")
    assert small.bytes < 0.5 * full.bytes
    assert small.agreement.same >= 0.8
    assert facts_of(small) == facts_of(full)


def test_the_network_is_exported_in_plain_memory_and_stays_as_it_is():
    model = sharp_model().to(memory_format=torch.channels_last)
    assert all(tensor.is_contiguous() for tensor in Exportable.of(model, "NHWC").network.parameters())
    assert not all(tensor.is_contiguous() for tensor in model.parameters())


def test_wrong_settings_are_refused_and_nothing_is_written(tmp_path):
    for name, options, said in (
        ("opnvino", {}, r"'opnvino' is not a runtime\. Did you mean 'openvino'\? Allowed are onnx, openvino"),
        ("torch", {"int8": True}, "int8: is not made for torch; the runtimes that have it are onnx, openvino"),
        ("onnx", {"int8": True}, "int8: no images came"),
        ("onnx", {"classes": ["a"]}, "classes: 1 given, the network has 3"),
    ):
        with pytest.raises(ConfigError, match=said):
            export(tiny_model(), name, tmp_path / "out", **options)
    with pytest.raises(ModelError, match="does not know its input"):
        export(nn.Linear(2, 2), "torch", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["openvino", "executorch", "ncnn"])
def test_a_missing_package_is_named_with_its_extra(name, tmp_path, monkeypatch):
    monkeypatch.setattr("basisprune.deploy.export.runtime.find_spec", lambda package: None)
    with pytest.raises(MissingExtraError, match=rf"is needed.*pip install 'basisprune\[{name}\]'"):
        export(tiny_model(), name, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_replaced_only_if_asked(tmp_path):
    model = sharp_model()
    (tmp_path / "model.pt2").write_text("mine")
    with pytest.raises(ConfigError, match=r"model\.pt2: exists already; .*--overwrite"):
        export(model, "torch", tmp_path)
    assert (tmp_path / "model.pt2").read_text() == "mine"
    (found,) = export(model, "torch", tmp_path, overwrite=True)
    assert found.bytes == (tmp_path / "model.pt2").stat().st_size > 1000
    (tmp_path / "model.pt2").unlink()
    (tmp_path / "model.pt2").mkdir()
    with pytest.raises(ConfigError, match="is a link or a folder"):
        export(model, "torch", tmp_path, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is a file; name a folder"):
        export(model, "torch", tmp_path / "file")


@pytest.mark.parametrize("fault", ["differs", "raises", "quantises"])
def test_a_runtime_that_fails_leaves_what_was_there(fault, tmp_path, monkeypatch):
    def copied(path: Path, target: Path, _batches: object) -> None:
        shutil.copyfile(path, target)
        raise ModelError("no")

    def fail(*_given: object) -> None:
        raise RuntimeError("out of  luck\n")

    changed = {
        "differs": {"open": lambda path, threads: ({}, lambda batch: [torch.ones(len(batch), 3).numpy()])},
        "raises": {"write": fail},
        "quantises": {"quantise": copied},
    }
    monkeypatch.setitem(RUNTIMES, "torch", replace(RUNTIMES["torch"], **changed[fault]))
    said = {"differs": "output differs from PyTorch's", "raises": r"cannot take it \(RuntimeError: out of luck\)"}
    (tmp_path / "model.pt2").write_text("mine")
    with pytest.raises(ModelError, match=said.get(fault, "no")):
        export(sharp_model(), "torch", tmp_path, images=images(), overwrite=True, int8=fault == "quantises")
    assert content(tmp_path) == {"model.pt2": b"mine"}


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
    for write, name in ((export_onnx, "m.onnx"), (export_program, "m.pt2")):
        with pytest.raises(ModelError, match="Sequential cannot be exported"):
            write(model, tmp_path / name, example_inputs=torch.randn(2, 4))
    broken = tiny_model()
    broken.classifier.bias.data.fill_(torch.nan)
    for write, name in ((export_onnx, "m.onnx"), (export_program, "m.pt2")):
        with pytest.raises(ModelError, match="NaN"):
            write(broken, tmp_path / name)
    with pytest.raises(ModelError, match=r"ends in \.pt2"):
        export_program(tiny_model(), tmp_path / "m.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_program_of_torch_export_computes_the_same_for_any_batch_size(tmp_path):
    model = tiny_decomposed()
    loaded = torch.export.load(export_program(model, tmp_path / "m.pt2")).module()
    for count in (1, 2, 5):
        x = torch.randn(count, 3, 16, 16)
        with torch.no_grad():
            assert close(model(x), loaded(x))
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt2"]


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("_guards_fn", nn.Parameter(torch.ones(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self._guards_fn


def test_a_parameter_with_a_name_of_torch_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ModelError, match="Odd cannot be exported"):
        export_program(Odd(), tmp_path / "m.pt2", example_inputs=torch.ones(2, 3, 4, 4))
    assert list(tmp_path.iterdir()) == []


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
