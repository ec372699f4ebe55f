"""Laws of settings as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import yaml

from basisprune.errors import CheckpointError, ConfigError
from basisprune.recipes import RECIPES
from basisprune.runs.settings import ResultFolder, differences, read_settings, recipe_of, search_of
from basisprune.search import SearchConfig


@pytest.mark.parametrize("name", ["quick", "paper", "paper:mnist"])
def test_a_recipe_survives_yaml(name):
    recipe = recipe_of(name)
    assert recipe_of(yaml.safe_load(yaml.safe_dump(json.loads(json.dumps(asdict(recipe)))))) == recipe


def test_the_settings_of_a_search_survive_yaml():
    search = SearchConfig(framework="l1", tolerance=0.3)
    assert search_of(yaml.safe_load(yaml.safe_dump(asdict(search)))) == search


def test_only_what_is_given_differs_from_the_base():
    recipe = recipe_of({"base": "paper", "train": {"lr": "1e-3", "augmentation": {"flip": True}}})
    assert recipe.train.lr == 1e-3  # YAML takes that for a text
    assert recipe.train.augmentation.flip
    assert recipe.finetune == RECIPES["paper"].finetune
    assert recipe.train.augmentation.shift == RECIPES["paper"].train.augmentation.shift


def test_all_faults_are_listed_at_once_with_the_nearest_names():
    given = {"basis": "output", "train": {"epoch": 1, "batch_size": 2.5, "augmentation": {"flip": 1}}, "plan": 3}
    with pytest.raises(ConfigError) as error:
        recipe_of(given)
    for part in ("5 faults", "'outputs'", "'epochs'", "train.batch_size: 2.5", "train.augmentation.flip", "plan: 3"):
        assert part in str(error.value)


def test_values_out_of_range_are_told_where_they_are():
    with pytest.raises(ConfigError, match=r"train\.epochs: 0 given, at least 1"):
        recipe_of({"train": {"epochs": 0}})
    with pytest.raises(ConfigError, match=r"tolerance: 2\.0 given"):
        search_of({"tolerance": 2})
    with pytest.raises(ConfigError, match="base: 3 given"):
        recipe_of({"base": 3})


def test_a_folder_belongs_to_one_configuration(tmp_path):
    folder = ResultFolder(tmp_path / "out")
    config = {"model": "resnet18", "recipe": {"train": {"epochs": 3}}, "shape": (1, 2), "int8": False}
    assert folder.claim(config, {"torch": "2.6"}) == []
    assert read_settings(folder.path / "config.yaml") == json.loads(json.dumps(config)) | {"versions": {"torch": "2.6"}}
    assert folder.claim(config | {"int8": True}, {"torch": "2.7"}) == ["torch: 2.6 -> 2.7"]
    with pytest.raises(CheckpointError, match=r"recipe\.train\.epochs: 3 -> 4"):
        folder.claim(config | {"recipe": {"train": {"epochs": 4}}}, {})


@pytest.mark.parametrize(
    ("model", "data", "repeatable"),
    [
        ("resnet18", "torchvision:CIFAR10", True),
        ("resnet18", ".", True),
        ("resnet18", "5,000 handwritten digits", False),
        ("a TransferModel given in Python", ".", False),
    ],
)
def test_a_command_that_repeats_the_run_is_named_only_where_it_can(model, data, repeatable, tmp_path):
    ResultFolder(tmp_path / "out").claim({"model": model, "data": data}, {})
    assert (tmp_path / "out" / "config.yaml").read_text().startswith("# This run again") == repeatable


def test_a_file_or_a_folder_of_other_things_is_not_taken(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        ResultFolder(tmp_path / "file").claim({}, {})
    with pytest.raises(CheckpointError, match="holds file but no"):
        ResultFolder(tmp_path).claim({}, {})


def test_differences_name_what_is_new_and_what_is_gone():
    assert differences({"a": 1, "b": 2}, {"b": 2, "c": None}) == ["a: 1 -> not set", "c: not set -> None"]
