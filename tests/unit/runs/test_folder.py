"""Laws of the folder that a run writes into."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tiny import Notes

from basisprune.callback import NullCallback
from basisprune.data.manifest import IMAGES
from basisprune.errors import CheckpointError
from basisprune.files import digest, locked
from basisprune.runs.folder import OutputFolder, changed_settings, is_loadable, is_repeatable, settings_of, versions
from basisprune.runs.parsing import read_settings

CONFIG = {"model": "resnet18", "recipe": {"train": {"epochs": 3}}, "shape": (1, 2), "rate": 1e-5, "int8": False}


def test_a_folder_belongs_to_one_configuration(tmp_path):
    folder, notes = OutputFolder(tmp_path / "deep" / "out"), Notes()
    folder.claim(CONFIG, notes)
    assert read_settings(folder.path / "config.yaml") == json.loads(json.dumps(CONFIG)) | {"versions": versions()}
    folder.claim(CONFIG, notes)
    assert notes.lines == []
    folder.stages.mkdir()
    (folder.stages / "dense.pt").write_bytes(b"")
    before = (folder.path / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match="other settings") as error:
        folder.claim(CONFIG | {"recipe": {"train": {"epochs": 4}}, "seed": 1}, notes)
    assert error.value.faults == ("recipe.train.epochs: 3 -> 4", "seed: not set -> 1")
    assert (folder.path / "config.yaml").read_text() == before


def test_a_setting_that_only_one_run_notes_has_its_default():
    new = {**CONFIG, "strict": False, "task": "classification"}
    old = {**CONFIG, "size": None, "versions": versions()}
    assert changed_settings(old, new) == changed_settings(new, old) == {}
    assert changed_settings(old, {**new, "strict": True}) == {"strict": "not set -> True"}
    assert changed_settings({**old, "size": 32}, new) == {"size": "32 -> not set"}


@pytest.mark.parametrize("free", ["onnx", "int8"])
def test_what_is_written_at_the_end_may_change(free, tmp_path):
    folder = OutputFolder(tmp_path / "out")
    folder.claim(CONFIG, NullCallback())
    folder.claim(CONFIG | {free: True}, NullCallback())
    assert read_settings(folder.path / "config.yaml")[free] is True


def test_other_versions_are_told_once(tmp_path):
    folder, notes = OutputFolder(tmp_path / "out"), Notes()
    folder.claim(CONFIG, notes)
    file = folder.path / "config.yaml"
    old = read_settings(file) | {"versions": versions() | {"torch": "1.0"}}
    text = yaml.safe_dump(old)
    file.write_text(f"{text}# sha256 {digest(text.encode())}\n")
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
    OutputFolder(tmp_path / "out", "train").claim(config, NullCallback())
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
        OutputFolder(tmp_path / "file").claim({}, NullCallback())
    with pytest.raises(CheckpointError, match="contains file but no"):
        OutputFolder(tmp_path).claim({}, NullCallback())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_folder_or_one_of_hidden_files_is_taken(tmp_path):
    (tmp_path / ".gitkeep").write_text("")
    OutputFolder(tmp_path).claim(CONFIG, NullCallback())
    assert (tmp_path / "config.yaml").exists()
    assert OutputFolder(tmp_path).stages.parent == tmp_path


# ------------------------------------------------------------------------------- one run, and what is left of it


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_claim_without_anything_stored_is_none(tmp_path):
    folder = OutputFolder(tmp_path / "out")
    folder.claim(CONFIG, NullCallback())
    folder.check(CONFIG | {"seed": 1})
    folder.claim(CONFIG | {"seed": 1}, NullCallback())
    assert settings_of(folder.path)["seed"] == 1


def fail(folder: OutputFolder, error: type[BaseException], *, stored: bool = False) -> None:
    with folder.held(CONFIG, NullCallback()):
        folder.stages.mkdir()
        (folder.stages / "run.json").write_text("{}")
        (folder.path / IMAGES).write_text("{}")
        if stored:
            (folder.stages / "dense.pt").write_bytes(b"")
        raise error


@pytest.mark.parametrize("error", [CheckpointError, OSError, KeyboardInterrupt])
def test_a_start_that_fails_leaves_no_claim_on_the_folder(error, tmp_path):
    with pytest.raises(error):
        fail(OutputFolder(tmp_path / "new"), error)
    assert names(tmp_path) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / ".keep").write_text("mine")
    with pytest.raises(error):
        fail(OutputFolder(tmp_path / "old"), error)
    assert names(tmp_path) == ["old", "old/.keep"]
    with pytest.raises(error):
        fail(OutputFolder(tmp_path / "begun"), error, stored=True)
    stored = ["candidates", "candidates/dense.pt", "candidates/run.json", "config.yaml", "images.json"]
    assert names(tmp_path / "begun") == stored


@pytest.mark.parametrize("bit", range(8))
def test_a_damaged_configuration_is_set_aside_and_made_again(bit, tmp_path):
    folder, notes = OutputFolder(tmp_path / "out"), Notes()
    folder.claim(CONFIG, notes)
    (folder.path / "training.pt").write_bytes(b"")
    whole = (folder.path / "config.yaml").read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 3] ^= 1 << bit
    (folder.path / "config.yaml").write_bytes(damaged)
    folder.check(CONFIG)
    folder.claim(CONFIG, notes)
    (line,) = notes.lines
    assert "it is now config.yaml.damaged, and is made again" in line
    assert (folder.path / "config.yaml").read_bytes() == whole
    assert (folder.path / "config.yaml.damaged").read_bytes() == damaged
    (folder.path / "config.yaml").unlink()  # as if killed in between
    folder.claim(CONFIG, notes)


def test_leftovers_of_killed_writers_are_cleared_when_a_run_starts(tmp_path):
    folder = OutputFolder(tmp_path / "out")
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    folder.claim(CONFIG, NullCallback())
    for place in (folder.path, folder.stages, folder.path / "model"):
        place.mkdir(exist_ok=True)
        (place / f".partial-{dead.pid}-0123abcd.pt").write_bytes(b"half")
    with folder.held(CONFIG, NullCallback()):
        assert not list(folder.path.rglob(".partial*"))


HOLDS = """
import sys, time
from pathlib import Path
from basisprune.files import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_second_run_in_a_folder_is_refused_until_the_first_one_is_dead(tmp_path):
    folder = OutputFolder(tmp_path / "out")
    folder.claim(CONFIG, NullCallback())
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    first = subprocess.Popen(
        [sys.executable, "-c", HOLDS, folder.path], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "held\n"
        with (
            pytest.raises(CheckpointError, match="another run works in this folder"),
            folder.held(CONFIG, NullCallback()),
        ):
            pytest.fail("both are in")
    finally:
        first.kill()
        first.communicate()
    with folder.held(CONFIG, NullCallback()), pytest.raises(CheckpointError, match="another run"), locked(folder.path):
        pytest.fail("both are in")
    assert names(folder.path) == ["config.yaml"]
