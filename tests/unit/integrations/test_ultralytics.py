"""YOLO networks: the loss and the metric are Ultralytics' own, and it reads what is written."""

from __future__ import annotations

import copy
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from yolos import PARTS, SIDE, data_of, network_of

import basisprune as bp
from basisprune.deploy.bundle import from_pretrained
from basisprune.errors import BundleError, ConfigError, MissingExtraError
from basisprune.integrations.ultralytics import YoloKit, compress, save

pytestmark = [
    pytest.mark.usefixtures("one_thread", "ultralytics"),
    pytest.mark.filterwarnings("ignore"),  # of Ultralytics, and of torch's exporter
]
SETTINGS = {"imgsz": SIDE, "batch": 16, "workers": 0}
VALIDATED = {"imgsz": SIDE, "batch": 16, "workers": 0, "rect": False, "plots": False, "verbose": False, "device": "cpu"}


def taught(
    library: ModuleType, task: str, folder: Path, epochs: int, parts: dict[str, int]
) -> tuple[YoloKit, Path, Path]:
    """A network that has learnt something of shapes, the file that Ultralytics writes of it, and its data."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(0)
    data, model = data_of(task, folder / "data", parts), network_of(task, folder)
    kit = YoloKit.of(model, data, SETTINGS)
    optimizer = torch.optim.AdamW(kit.network.parameters(), lr=6e-3)
    kit.network.train()
    for _ in range(epochs):
        for inputs, targets in map(kit.task.inputs_and_targets, kit.loaders.train):
            optimizer.zero_grad()
            kit.task.mean_loss(kit.network, inputs, targets).backward()
            optimizer.step()
    yolo = library.YOLO(str(model))
    yolo.model = copy.deepcopy(kit.network).eval()
    for name in ("dynamic", "export"):
        delattr(yolo.model.model[-1], name)
    for name in ("file_notes", "built_by"):
        delattr(yolo.model, name)
    yolo.model.args = vars(yolo.model.args)
    yolo.ckpt = {"train_args": yolo.model.args}
    yolo.save(str(folder / "best.pt"))
    return kit, folder / "best.pt", data


@pytest.fixture(scope="module")
def detector(ultralytics, tmp_path_factory) -> tuple[YoloKit, Path, Path]:
    return taught(ultralytics, "detect", tmp_path_factory.mktemp("yolo"), 40, PARTS)


def test_the_metric_is_that_of_ultralytics_and_the_order_of_images_does_not_matter(ultralytics, detector):
    kit, file, data = detector
    found = ultralytics.YOLO(file).val(data=str(data), split="test", **VALIDATED)
    assert found.box.map > 0.2  # it has learnt something
    assert bp.evaluate(kit.network, kit.loaders.test, task=kit.task).accuracy == pytest.approx(found.box.map, abs=1e-6)
    kit.network.eval()
    rows = []
    with torch.no_grad():
        for inputs, targets in map(kit.task.inputs_and_targets, kit.loaders.test):
            rows.append(kit.task.rows(kit.network(inputs), targets, len(inputs)))
    (whole,) = rows
    assert kit.task.value(whole[::-1]) == kit.task.value(whole) == pytest.approx(found.box.map, abs=1e-6)
    assert kit.task.value(0 * whole) == 0


@pytest.mark.parametrize("training", [False, True])
def test_the_loss_is_that_of_ultralytics_in_both_modes_and_the_modes_stay(detector, training):
    kit = detector[0]
    batch = next(iter(kit.loaders.test))
    inputs, targets = kit.task.inputs_and_targets(batch)
    network, plain = copy.deepcopy(kit.network).train(training), copy.deepcopy(kit.network).train(training)
    plain.model[-1].export = False
    with torch.no_grad():
        expected = plain.loss({**batch, "img": inputs})[0].sum() / len(inputs)
    found = kit.task.mean_loss(network, inputs, targets)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert found.requires_grad
    assert {module.training for module in network.modules()} == {training}


@pytest.mark.parametrize("task", ["detect", "segment", "pose", "classify"])
def test_a_smaller_network_is_read_by_ultralytics_as_it_is(task, ultralytics, tmp_path):
    _, model, data = taught(ultralytics, task, tmp_path, 30, dict.fromkeys(PARTS, 16))
    options = {"filter_ratio": 0.3, "basis_ratio": 0.3, "epochs": 1, "onnx": task in ("detect", "classify")}
    result = compress(model, data, output=tmp_path / "out", settings=SETTINGS, **options)
    assert result.summary.chosen.parameters < 0.7 * result.summary.reference.parameters

    small = ultralytics.YOLO(tmp_path / "out" / "yolo.pt")
    assert small.task == task
    assert small.names == {0: "box", 1: "disc"}
    assert {type(module).__module__.partition(".")[0] for module in small.model.modules()} == {"torch", "ultralytics"}
    images = torch.rand(2, 3, SIDE, SIDE)
    ours = copy.deepcopy(result.model)
    with torch.no_grad():
        answer, (said, *_) = ours(images), small.model(images)
        said = said[0] if task == "segment" else said
        torch.testing.assert_close(said, answer[0] if task == "segment" else answer)
        with pytest.raises(BundleError, match="which would be imported and run"):
            from_pretrained(tmp_path / "out" / "model")
        loaded = from_pretrained(tmp_path / "out" / "model", trust_remote_code=True)
        assert str(loaded(images)) == str(answer)
    picture = next((tmp_path / "data" / "test").rglob("*.png"))
    assert len(small.predict(str(picture), imgsz=SIDE, verbose=False)) == 1
    found = small.val(data=str(data), split="test", **VALIDATED).results_dict
    key = {"segment": "metrics/mAP50-95(M)", "pose": "metrics/mAP50-95(P)", "classify": "metrics/accuracy_top1"}
    value = found[key.get(task, "metrics/mAP50-95(B)")]
    assert result.summary.test.after.accuracy == pytest.approx(value, abs=0.01)
    if options["onnx"]:
        file = ultralytics.YOLO(tmp_path / "out" / "model.onnx", task=None)
        again = file.val(data=str(data), split="test", **VALIDATED).results_dict
        assert again[key.get(task, "metrics/mAP50-95(B)")] == pytest.approx(value, abs=0.01)


def test_a_smaller_network_is_not_trained_as_the_large_one(ultralytics, detector, tmp_path):
    kit, _, data = detector
    folded = bp.fold(kit.network, torch.zeros(2, 3, SIDE, SIDE))
    small = ultralytics.YOLO(save(folded, tmp_path / "small.pt"))
    with pytest.raises(KeyError, match="made smaller by basisprune"):
        small.train(data=str(data), epochs=1, imgsz=SIDE, device="cpu", project=str(tmp_path), plots=False)


def test_stages_take_the_network_the_loaders_and_the_task(detector):
    kit = detector[0]
    small = bp.prune(kit.network, 0.3, kit.loaders.train, loss=kit.task)
    assert sum(part.numel() for part in small.parameters()) < 0.9 * sum(p.numel() for p in kit.network.parameters())
    assert bp.evaluate(small, kit.loaders.test, task=kit.task).metric == "mAP50-95"


def test_without_images_to_confirm_half_of_those_to_validate_do(detector, tmp_path):
    data = data_of("detect", tmp_path, {"train": 16, "val": 20})
    loaders = YoloKit.of(detector[1], data, SETTINGS).loaders
    names = [{name for batch in part for name in batch["im_file"]} for part in (loaders.val, loaders.confirm)]
    assert [len(each) for each in names] == [10, 10]
    assert not names[0] & names[1]


def test_what_cannot_be_used_is_refused(ultralytics, detector, tmp_path):
    _, file, data = detector
    for message, model, given, settings in (
        ("a .pt file that exists", tmp_path / "missing.pt", data, {}),
        ("a .pt file that exists", "yolo11n", data, {}),
        ("int given; a YOLO", 3, data, {}),
        ("nothing is downloaded", file, tmp_path / "coco8.yaml", {}),
        ("it has 1 classes, and the network 2", file, _edited(data, tmp_path, "0: box, 1: disc", "0: box"), {}),
        ("Ultralytics cannot take", file, _edited(data, tmp_path, "val: val", "val: nowhere", CODE), {}),
        ("Ultralytics cannot take", file, data, {"no_such": 1}),
        ("a network for 'obb' given", ultralytics.YOLO("yolo11n-obb.yaml"), data, {}),
    ):
        with pytest.raises(ConfigError, match=message):
            YoloKit.of(model, given, SETTINGS | settings)
    assert not Path("boom").exists()


CODE = "download: open('boom', 'w')\n"


def _edited(data: Path, folder: Path, before: str, after: str, more: str = "") -> Path:
    path = folder / f"{len(list(folder.iterdir()))}.yaml"
    path.write_text(data.read_text().replace(before, after) + more)
    return path


def test_ultralytics_is_imported_when_it_is_needed_and_missed_by_the_name_of_its_extra(monkeypatch):
    code = "import sys, basisprune.integrations.ultralytics; print('ultralytics' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
    monkeypatch.setitem(sys.modules, "ultralytics", None)
    with pytest.raises(MissingExtraError, match=r"basisprune\[ultralytics\]"):
        compress("best.pt", "data.yaml")
