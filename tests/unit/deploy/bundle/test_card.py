"""Laws of model cards: what the hub reads of them, and what people see."""

from __future__ import annotations

import json

import pytest
from bundles import NAMES
from huggingface_hub import ModelCard
from timm.data import create_transform, resolve_data_config
from timm.models._hub import load_model_config_from_path
from tiny import tiny_model
from torch import nn

from basisprune.deploy.bundle import Card, save_pretrained
from basisprune.deploy.bundle.files import read_folder
from basisprune.deploy.bundle.hub import escaped, model_card
from basisprune.errors import ConfigError

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
    assert test.metric_name == "accuracy, 95 % interval 96.1% to 98.5%"
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
