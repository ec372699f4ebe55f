"""Laws of bundles on the hub."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from bundles import NAMES, refused, same
from huggingface_hub import ModelCard
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.models._hub import load_model_config_from_path
from tiny import tiny_decomposed, tiny_model
from torch import nn

from basisprune.data.decode import to_pixels
from basisprune.data.transforms import prepare
from basisprune.deploy.bundle import Card, from_pretrained, load_bundle, push_to_hub, save_pretrained
from basisprune.deploy.bundle.hub import escaped, model_card, page_files
from basisprune.deploy.bundle.loading import read_folder
from basisprune.deploy.export import export_onnx
from basisprune.errors import BundleError, ConfigError
from basisprune.files import digest
from basisprune.transfer.model import transfer_model


def test_a_bundle_comes_from_the_hub_by_its_id(saved, monkeypatch, tmp_path):
    asked = []

    def download(repo_id, *, revision, allow_patterns):
        asked.append((repo_id, revision))
        return str(saved)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("basisprune.deploy.bundle.loading.snapshot_download", download)
    assert same(from_pretrained("owner/name", revision="v1"), tiny_decomposed(), torch.randn(2, 3, 16, 16))
    assert asked == [("owner/name", "v1")]

    def fail(*_, **__):
        raise OSError("offline")

    monkeypatch.setattr("basisprune.deploy.bundle.loading.snapshot_download", fail)
    with pytest.raises(BundleError, match=r"owner/name: no such folder, and the hub .*offline"):
        from_pretrained("owner/name")


def test_a_factory_that_a_bundle_from_the_hub_names_is_called_only_if_it_is_trusted(tmp_path, monkeypatch):
    folder = save_pretrained(transfer_model("networks:Residual", 3, input_size=16), tmp_path / "b")
    monkeypatch.setattr("basisprune.deploy.bundle.loading.snapshot_download", lambda *_, **__: str(folder))
    with pytest.raises(BundleError, match=r"built by 'networks:Residual'.*trust_remote_code=True"):
        from_pretrained("owner/name")
    from_pretrained("owner/name", factory="networks:Residual")
    from_pretrained("owner/name", trust_remote_code=True)


BUNDLE = {"config.json", "model.safetensors", "plans.json", "README.md"}


class Commit:
    commit_url, repo_id = "hub/owner/name/commit/1", "owner/name"


class Hub:
    calls: ClassVar[list[tuple]] = []

    def __init__(self, token=None):
        Hub.calls = []

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(("create", repo_id, private, exist_ok))
        return Commit()

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        files = {path.name: path.read_text(errors="ignore") for path in Path(folder_path).iterdir()}
        self.calls.append(("upload", repo_id, files))
        return Commit()


def test_a_network_or_a_folder_is_pushed_with_a_card_made_from_its_metrics(saved, monkeypatch, tmp_path):
    monkeypatch.setattr("basisprune.deploy.bundle.hub.HfApi", Hub)
    assert push_to_hub(saved, "owner/name") == Commit.commit_url
    assert Hub.calls[0] == ("create", "owner/name", False, True)
    files = Hub.calls[1][2]
    assert files.keys() == {*BUNDLE, "app.py", "requirements.txt", "model.onnx"}
    assert "| accuracy | 0.9 |" in files["README.md"]
    assert "red, green, blue" in files["README.md"]
    assert ModelCard(files["README.md"]).data.library_name == "basisprune"

    (saved / "README.md").unlink()
    push_to_hub(saved, "owner/name", card=Card(page=False))
    assert Hub.calls[1][2].keys() == BUNDLE
    assert "| accuracy | 0.9 |" in Hub.calls[1][2]["README.md"]
    assert not (saved / "README.md").exists()
    (saved / "README.md").write_text("my own words")
    push_to_hub(saved, "owner/name", card=Card(page=False))
    assert Hub.calls[1][2]["README.md"] == "my own words"
    (tmp_path / "secret").write_text("my key")
    (saved / "README.md").unlink()
    (saved / "README.md").symlink_to(tmp_path / "secret")
    push_to_hub(saved, "owner/name", card=Card(page=False))
    assert "my key" not in Hub.calls[1][2]["README.md"]
    (saved / "README.md").unlink()

    push_to_hub(tiny_model(), "owner/name", private=True, metrics={"test": {"accuracy": 0.7}}, card=Card(page=False))
    assert Hub.calls[0] == ("create", "owner/name", True, True)
    assert "| test.accuracy | 0.7 |" in Hub.calls[1][2]["README.md"]


def test_a_push_that_cannot_work_is_refused_before_the_hub_is_asked(saved, monkeypatch):
    monkeypatch.setattr("basisprune.deploy.bundle.hub.HfApi", None)
    with pytest.raises(ConfigError, match="write 'owner/name'"):
        push_to_hub(saved, "name")
    with pytest.raises(ConfigError, match="are for a network"):
        push_to_hub(saved, "owner/name", metrics={})
    (saved / "plans.json").unlink()
    with pytest.raises(BundleError, match=r"plans\.json"):
        push_to_hub(saved, "owner/name")


def test_a_missing_folder_is_refused(tmp_path):
    refused(tmp_path / "nothing", "no such folder")


METRICS = {
    "accuracy": True,  # which is no number
    "test": {"before": {"accuracy": 0.98}, "after": {"accuracy": 0.975, "interval": [0.961, 0.985]}},
    "validation": {"accuracy": 0.97, "interval": "unknown"},
}


def test_the_hub_reads_licence_datasets_and_metrics_with_their_intervals(tmp_path):
    folder = save_pretrained(tiny_model(), tmp_path / "b", classes=NAMES, metrics=METRICS)
    told = Card(license="apache-2.0", datasets=("mnist",))
    data = ModelCard(model_card(read_folder(folder).config, told, repo_id="owner/small")).data
    assert (data.license, data.datasets, data.metrics) == ("apache-2.0", ["mnist"], ["accuracy"])
    assert (data.library_name, data.pipeline_tag, data.model_name) == ("basisprune", "image-classification", "small")
    test, validation = data.eval_results
    assert (test.dataset_type, test.metric_type, test.metric_value) == ("mnist", "accuracy", 0.975)
    assert test.metric_name == "accuracy, 95% interval 96.1% to 98.5%"
    assert test.metric_args == {"confidence": 0.95, "interval": [0.961, 0.985]}
    assert (validation.metric_value, validation.metric_args) == (0.97, None)
    plain = ModelCard((folder / "README.md").read_text()).data
    assert (plain.license, plain.datasets) == ("unknown", None)


def test_a_card_that_the_hub_would_refuse_is_refused_before():
    with pytest.raises(ConfigError) as caught:
        Card(license="GPL 3\n---", datasets=("mnist", "/home/me/photos"))
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["license", "datasets"]


def test_timm_reads_the_classes_and_how_images_are_prepared(tmp_path):
    model = tiny_model()
    folder = save_pretrained(model, tmp_path / "b", classes=NAMES)
    known, name, _ = load_model_config_from_path(folder)
    assert (known["num_classes"], known["label_names"], name) == (3, NAMES, "")
    config = resolve_data_config(pretrained_cfg=known)
    assert (config["input_size"], config["mean"]) == ([3, 16, 16], list(model.input_spec.mean))
    assert create_transform(**config) is not None


def test_the_classes_of_masks_are_channels_and_not_pixels(tmp_path):
    folder = save_pretrained(nn.Sequential(nn.Conv2d(3, 5, 1)), tmp_path / "b", input_shape=(3, 8, 16))
    known = json.loads((folder / "config.json").read_text())
    assert (known["num_classes"], known["pretrained_cfg"]["num_classes"]) == (5, 5)


def test_the_card_shows_names_letter_by_letter(tmp_path):
    names = ["<script>alert(1)</script>", "[x](javascript:y)", "a|b\n# c `d` \x1b[31m"]
    metrics = {"<img src=x>": 1, "b": {"|c": "|\n\n<d>"}}
    folder = save_pretrained(tiny_model(), tmp_path / "b", classes=names, metrics=metrics)
    card = (folder / "README.md").read_text()
    assert "<" not in card
    assert "](" not in card
    assert "\x1b" not in card
    assert card.count("\n# ") == 1
    assert "| &lt;img src=x&gt; | 1 |" in card
    assert r"| b.\|c | \|  &lt;d&gt; |" in card


@pytest.mark.parametrize("text", ["resnet18", "0.93", "a-b+c", "Löwenzahn"])
def test_plain_text_needs_no_escape(text):
    assert escaped(text) == text


EVIL = ['"); import os; ("', "<script>alert(1)</script>", "it's {x}"]
WITHOUT_TORCH = """
import json, runpy, sys, types
class Part:
    def __init__(self, *args, **kwargs): self.args = args
sys.modules["gradio"] = types.SimpleNamespace(Interface=Part, Image=Part, Label=Part)
page = runpy.run_path(sys.argv[1])
from PIL import Image
answers = [page["classify"](Image.open(path)) for path in sys.argv[2:]]
assert page["classify"](None) == {} and page["page"].args[0] is page["classify"]
assert not {"torch", "basisprune", "torchvision", "timm"} & set(sys.modules)
print(json.dumps(answers))
"""


@pytest.fixture
def page(tmp_path):
    model = tiny_model()
    nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(0))
    bundle = load_bundle(save_pretrained(model, tmp_path / "bundle", classes=EVIL))
    files = page_files(bundle, tmp_path / "bundle", wanted=True)
    (tmp_path / "page").mkdir()
    for name, content in files.items():
        (tmp_path / "page" / name).write_bytes(content)
    return model, tmp_path / "page"


def test_the_page_answers_as_the_network_does_without_torch(page, tmp_path):
    model, folder = page
    dice = np.random.default_rng(0)
    pictures = {
        "photo.png": Image.fromarray(dice.integers(0, 256, (20, 30, 3), dtype=np.uint8)),
        "grey.png": Image.fromarray(dice.integers(0, 256, (16, 16), dtype=np.uint8)),
        "clear.png": Image.fromarray(dice.integers(0, 256, (9, 9, 4), dtype=np.uint8)),
    }
    for name, picture in pictures.items():
        picture.save(tmp_path / name)
    command = [
        sys.executable,
        "-c",
        WITHOUT_TORCH,
        str(folder / "app.py"),
        *(str(tmp_path / name) for name in pictures),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for answer, picture in zip(json.loads(done.stdout), pictures.values(), strict=True):
        images = to_pixels(picture, model.input_spec.size)[None]
        with torch.no_grad():
            shares = model.eval()(prepare(images, model.input_spec)).softmax(-1)[0]
        assert answer == pytest.approx(dict(zip(EVIL, shares.tolist(), strict=True)), abs=1e-4)


def test_nothing_of_the_bundle_is_in_the_program(page):
    _, folder = page
    text = (folder / "app.py").read_text()
    assert not any(name in text for name in EVIL)
    compile(text, "app.py", "exec")
    assert (folder / "requirements.txt").read_text().split() == ["gradio", "numpy", "onnxruntime", "pillow"]


def test_the_file_that_was_delivered_is_taken_if_it_is_sound(tmp_path):
    model = tiny_model()
    path = export_onnx(model, tmp_path / "model.onnx", classes=EVIL, preprocess=True).path
    sums = {"model.onnx": digest(path.read_bytes())}
    bundle = load_bundle(save_pretrained(model, tmp_path / "model", metrics={"sha256": sums}))
    assert page_files(bundle, tmp_path / "model", wanted=None)["model.onnx"] == path.read_bytes()
    path.write_bytes(b"something else")
    assert page_files(bundle, tmp_path / "model", wanted=None)["model.onnx"] != path.read_bytes()


def test_a_network_without_onnx_has_no_page_unless_it_is_wanted(tmp_path):
    bundle = load_bundle(save_pretrained(nn.Sequential(nn.Linear(2, 2)), tmp_path / "b", input_shape=(2,)))
    assert page_files(bundle, None, wanted=None) == page_files(bundle, None, wanted=False) == {}
    with pytest.raises(BundleError, match=r"the page cannot be made: .*does not know how its images"):
        page_files(bundle, None, wanted=True)
