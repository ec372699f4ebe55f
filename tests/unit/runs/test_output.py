"""Laws of the folder that a run writes into."""

from __future__ import annotations

import json

import pytest
import yaml

from basisprune.errors import CheckpointError
from basisprune.listener import Silence
from basisprune.runs.output import OutputFolder, is_loadable, is_repeatable, versions
from basisprune.runs.validating import read_settings

CONFIG = {"model": "resnet18", "recipe": {"train": {"epochs": 3}}, "shape": (1, 2), "rate": 1e-5, "int8": False}


class Notes(Silence):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_a_folder_belongs_to_one_configuration(tmp_path):
    folder, notes = OutputFolder(tmp_path / "deep" / "out"), Notes()
    folder.claim(CONFIG, notes)
    assert read_settings(folder.path / "config.yaml") == json.loads(json.dumps(CONFIG)) | {"versions": versions()}
    folder.claim(CONFIG, notes)
    assert notes.lines == []
    before = (folder.path / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match="other settings") as error:
        folder.claim(CONFIG | {"recipe": {"train": {"epochs": 4}}, "seed": 1}, notes)
    assert error.value.faults == ("recipe.train.epochs: 3 -> 4", "seed: not set -> 1")
    assert (folder.path / "config.yaml").read_text() == before


@pytest.mark.parametrize("free", ["onnx", "int8"])
def test_what_is_written_at_the_end_may_change(free, tmp_path):
    folder = OutputFolder(tmp_path / "out")
    folder.claim(CONFIG, Silence())
    folder.claim(CONFIG | {free: True}, Silence())
    assert read_settings(folder.path / "config.yaml")[free] is True


def test_other_versions_are_told_once(tmp_path):
    folder, notes = OutputFolder(tmp_path / "out"), Notes()
    folder.claim(CONFIG, notes)
    file = folder.path / "config.yaml"
    old = read_settings(file) | {"versions": versions() | {"torch": "1.0"}}
    file.write_text(yaml.safe_dump(old))
    folder.claim(CONFIG, notes)
    (line,) = notes.lines
    assert line.endswith(f"torch: 1.0 -> {versions()['torch']}")
    folder.claim(CONFIG, notes)
    assert len(notes.lines) == 1


@pytest.mark.parametrize(
    ("model", "data", "repeatable"),
    [
        ("resnet18", "torchvision:CIFAR10", True),
        ("resnet18", ".", True),
        ("resnet18", "5,000 handwritten digits", False),
        ("a TransferModel given in Python", ".", False),
        (None, ".", False),
        ("resnet18", None, False),
    ],
)
def test_a_command_that_repeats_the_run_is_named_only_where_it_can(model, data, repeatable, tmp_path):
    config = {"model": model, "data": data}
    OutputFolder(tmp_path / "out", "train").claim(config, Silence())
    assert is_repeatable(config) == repeatable
    first = (tmp_path / "out" / "config.yaml").read_text().splitlines()[0]
    assert (first == "# Repeat this run: basisprune train --config config.yaml --output another") == repeatable


def test_data_is_loadable_by_a_name_or_a_path_that_is_there(tmp_path):
    assert is_loadable(str(tmp_path))
    assert not is_loadable(str(tmp_path / "nowhere"))
    assert not is_loadable(3)


def test_a_file_or_a_folder_of_other_things_is_not_taken(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        OutputFolder(tmp_path / "file").claim({}, Silence())
    with pytest.raises(CheckpointError, match="contains file but no"):
        OutputFolder(tmp_path).claim({}, Silence())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_folder_or_one_of_hidden_files_is_taken(tmp_path):
    (tmp_path / ".gitkeep").write_text("")
    OutputFolder(tmp_path).claim(CONFIG, Silence())
    assert (tmp_path / "config.yaml").exists()
    assert OutputFolder(tmp_path).stages.parent == tmp_path
