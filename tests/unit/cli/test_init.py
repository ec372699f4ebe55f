"""Laws of the command line as a whole: its help, its version and what it answers to typos."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from commands import compress_into, invoke

import basisprune
import basisprune.demo

COMMANDS = ("compress", "train", "evaluate", "predict", "inspect", "demo")


def test_help_names_every_command_and_the_exit_codes():
    for words in (("--help",), ()):
        shown = invoke(*words).output
        assert all(command in shown for command in COMMANDS)
        assert "130" in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_each_command_teaches_by_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert len(re.findall(r"^ +basisprune \w+ ?", result.output, re.MULTILINE)) >= 2


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_a_terminal_of_80_columns(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke(*filter(None, [command]), "--help").output
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert " / --no-" not in shown or "[default: no-" not in shown


def test_errors_name_options_as_they_are_typed(tmp_path):
    given = ("--model", "resnet18", "--data", tmp_path, "--output", tmp_path / "out")
    for words, said in [
        (("--max-drop", "200%"), "error: --max-drop: 2.0 given"),
        (("--max-drop", "1%", "--min-accuracy", "90%"), "error: --max-drop, --min-accuracy given; pass one budget"),
        (("--size", "0", "--augment", "much"), "--augment: 'much' given"),
        (("--val-fraction", "0.9", "--test-fraction", "0.2"), "--val-fraction + --test-fraction: 1.1 leaves"),
    ]:
        assert said in invoke("compress", *given, *words).stderr
    (tmp_path / "settings.yaml").write_text("max_drop: 200%\nsize: none\n")
    assert "size: " in invoke("compress", "--config", tmp_path / "settings.yaml").stderr


def test_the_name_of_the_model_is_checked_before_an_image_is_opened(photos, tmp_path):
    found = invoke("compress", "--model", "resnet81", "--data", photos, "--output", tmp_path / "out")
    assert found.exit_code == 1
    assert "timm has no model 'resnet81'" in found.stderr
    assert "opening" not in found.stderr


def test_the_version_is_shown():
    result = invoke("--version")
    assert (result.exit_code, result.output.strip()) == (0, basisprune.__version__)


@pytest.mark.parametrize(
    ("words", "code", "hint"),
    [
        (("comprss",), 2, "Did you mean 'compress'"),
        (("inspect", "resnet18", "--szie", 3), 2, "--size"),
        (("inspect", "rsnet18"), 1, "Did you mean 'resnet18'"),
        (
            ("compress", "--model", "resnet18", "--data", "torchvision:CIFAR1", "--output", "x"),
            1,
            "Did you mean 'CIFAR10'",
        ),
        (("compress", "--model", "x", "--data", "x", "--output", "x", "--recipe", "quik"), 1, "Did you mean 'quick'"),
        (("compress", "--model", "x", "--data", "x", "--output", "x", "--framework", "taylr"), 1, "'taylor'"),
        (("compress", "--model", "x", "--data", "x", "--output", "x", "--max-drop", "much"), 2, "a percentage such as"),
        (
            ("compress", "--model", "resnet18", "--data", "nowhere", "--output", "x"),
            1,
            "nowhere: there is no such file",
        ),
        (("evaluate", "nowhere"), 1, "nowhere: does not exist"),
        (("predict", "nowhere", "image.jpg"), 1, "nowhere: does not exist"),
    ],
)
def test_a_typo_is_answered_with_what_is_allowed(words, code, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*words)
    assert result.exit_code == code, result.output
    assert hint in re.sub(r"\s+", " ", result.stderr)
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- what nobody means well with

FACTORIES = """
import torch
from tiny import tiny_backbone

def half(): return tiny_backbone().half()
def double(): return tiny_backbone().double()
def meta(): return tiny_backbone().to("meta")
def ends(): raise SystemExit(0)
"""


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """An empty folder to work in, with modules beside it that a command line may name."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "factories.py").write_text(FACTORIES)
    (code / "raises.py").write_text("raise RuntimeError('boom')\n")
    (code / "exits.py").write_text("import sys\nsys.exit(0)\n")
    (tmp_path / "work").mkdir()
    monkeypatch.syspath_prepend(code)
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


def said(result) -> str:
    assert result.exit_code in (1, 2), result.output
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert len(result.output) < 3000
    return re.sub(r"\s+", " ", result.stderr)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--target-params", "1e400", "expected a number such as"),
        ("--target-macs", "1e400", "expected a number such as"),
        ("--target-latency", "1e400", "expected a time such as"),
        ("--max-drop", "nan", "expected a percentage"),
        ("--min-accuracy", "-0.5", "min_accuracy: -0.5 given; it is a fraction"),
        ("--seed", 2**64, "seed: 18446744073709551616 given, at most"),
        ("--seed", 10**12, "seed: 1000000000000 given, at most"),
        ("--seed", -1, "seed: -1 given, at least 0"),
        ("--size", 100_000_000, "size: 100000000 given, at most 16384"),
        ("--size", 0, "size: 0 given, at least 1"),
        ("--epochs", 10**30, "epochs: 1e+30 given, at most"),
        ("--limit", 0, "limit: 0 given, at least 1"),
        ("--data", "~nouser/x", "'~nouser/x' given"),
        ("--data", "x" * 5000, "(5,000 characters)' given, which cannot be a path"),
        ("--data", "a\0b", "which cannot be a path"),
        ("--output", "~nouser/x", "output: '~nouser/x' given"),
        ("--output", "x" * 5000, "which cannot be a path"),
        ("--output", "a\udcff", "is not UTF-8"),
        ("--model", "x" * 5000, "File name too long"),
        ("--model", "a\0b", "timm has no model"),
        ("--model", ".rel:x", "is not a factory"),
        ("--model", "raises:x", "cannot import raises: RuntimeError: boom"),
        ("--model", "exits:x", "cannot import exits: it ends the program"),
        ("--model", "factories:ends", "it ends the program"),
        ("--model", "factories:half", "float16; float32 is needed"),
        ("--model", "factories:double", "float64; float32 is needed"),
        ("--model", "factories:meta", "a network on the meta device"),
        ("--config", "/dev/zero", "it is a device, no file"),
    ],
)
def test_a_hostile_option_is_answered_by_the_dry_run(option, value, message, place, photos):
    assert message in said(compress_into("out", photos, option, value, "--dry-run"))
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("inspect", "resnet18", "--size", 0), "input_size: 0 given"),
        (("inspect", "resnet18", "--size", 10**8), "(height, width) of 1 to 16384 pixels"),
        (("inspect", "resnet18", "--classes", 10**12), "1 to 1,000,000 are possible"),
        (("inspect", "x" * 5000), "File name too long"),
        (("predict", "x" * 5000, "image.jpg"), "File name too long"),
        (("predict", "/dev/zero", "image.jpg"), "is not a result"),
        (("evaluate", "."), "is not a result"),
    ],
)
def test_a_hostile_command_is_answered(words, message, place):
    assert message in said(invoke(*words))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: [quick]", "a name is needed"),
        ("recipe: 5", "a name is needed"),
        ("recipe: true", "a name is needed"),
        ("5", "a mapping is needed"),
        ("true", "a mapping is needed"),
        ("recipe: {train: {weight_decay: .nan}}", "line 1: nan given; a finite number is needed"),
        ("recipe: {train: {batch_size: 1" + "0" * 30 + "}}", "line 1: a number beyond"),
        ("epochs: " + "9" * 5000, "is not valid YAML"),
        ("data: [1]", "data: [1] given; a string is needed"),
    ],
)
def test_a_hostile_file_of_settings_is_answered(text, message, place, photos):
    (place.parent / "odd.yaml").write_text(text)
    assert message in said(compress_into("out", photos, "--config", place.parent / "odd.yaml", "--dry-run"))
    assert list(place.iterdir()) == []


def test_a_dry_run_refuses_what_the_run_would_refuse(place, photos, monkeypatch):
    for dry in ((), ("--dry-run",)):
        assert "lies in the folder of the images" in said(compress_into(photos / "out", photos, *dry))
    (place / "notes.txt").write_text("mine")
    for dry in ((), ("--dry-run",)):
        assert "contains notes.txt but no config.yaml" in said(compress_into(place, photos, *dry))
    monkeypatch.setattr("basisprune.deploy.export.runtime.find_spec", lambda _name: None)
    for dry in ((), ("--dry-run",)):
        assert "basisprune[onnx]" in said(compress_into("out", photos, "--int8", *dry))
    assert [path.name for path in place.iterdir()] == ["notes.txt"]
    assert not (photos / "out").exists()


def test_a_model_folder_is_told_for_what_it_is(place, photos, compressed):
    folder, _ = compressed
    (place / "empty").mkdir()
    (place / "begun").mkdir()
    (place / "begun" / "config.yaml").write_text("seed: 0\n")
    expected = {
        folder: f"is the folder of a run; pass the bundle in it, {folder / 'model'}",
        place / "begun": "is the folder of a run that has not written its model yet",
        place / "empty": "is neither a bundle nor a run: it is empty",
        photos: "is neither a bundle nor a run: it holds blue, green, red",
        folder / "model": "this bundle is folded and cannot be trained",
    }
    for path, message in expected.items():
        assert message in said(compress_into("out", photos, "--model", path, "--dry-run"))


RUINS = {
    "not UTF-8": lambda path, content: path.write_bytes(b"\xff\xfe" + content),
    "empty": lambda path, _content: path.write_bytes(b""),
    "a pipe": lambda path, _content: os.mkfifo(path),
    "a device": lambda path, _content: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path, _content: path.symlink_to(path),
}


@pytest.mark.parametrize("ruin", RUINS)
def test_no_file_of_a_run_that_is_ruined_makes_a_traceback_or_a_hang(ruin, place, compressed, photos):
    """Whatever is read is refused with a message, and whatever is not read does not matter."""
    folder, image = place / "run", next((photos / "red").iterdir())
    shutil.copytree(compressed[0], folder)
    read = {"config.yaml", "model/config.json", "model/model.safetensors", "model/plans.json"}
    files = [path for path in folder.rglob("*") if path.is_file() and path.parent.name != "candidates"]
    assert read <= {str(path.relative_to(folder)) for path in files}
    for path in files:
        content = path.read_bytes()
        path.unlink()
        RUINS[ruin](path, content)
        is_read = str(path.relative_to(folder)) in read
        result = invoke("predict", folder, image)
        assert "error: " in said(result) if is_read else result.exit_code == 0, (path, result.output)
        dry = compress_into(folder, photos, "--max-drop", "2%", "--int8", "--dry-run")
        assert dry.exception is None or isinstance(dry.exception, SystemExit), (path, dry.exception)
        path.unlink()
        path.write_bytes(content)


def test_a_run_makes_again_whatever_was_ruined_of_it(place, photos):
    words = ("--basis-ratio", "0.5", "--epochs", "1", "--no-onnx")
    assert compress_into(place / "run", photos, *words).exit_code == 0
    answer = (place / "run" / "model" / "model.safetensors").read_bytes()
    kept = [*(place / "run" / "candidates").iterdir(), place / "run" / "config.yaml"]
    assert {path.suffix for path in kept} == {".pt", ".json", ".yaml"}
    for path in kept:
        path.write_bytes(b"\xff" + path.read_bytes())
    (place / "run" / "model" / "config.json").write_bytes(b"")
    (place / "run" / "model" / ".DS_Store").write_bytes(b"theirs")
    again = compress_into(place / "run", photos, *words)
    assert again.exit_code == 0, again.output
    assert all(f"it is now {path.name}.damaged" in again.stderr for path in kept)
    assert (place / "run" / "model" / "model.safetensors").read_bytes() == answer
    assert (place / "run" / "model" / ".DS_Store").read_bytes() == b"theirs"
    assert invoke("predict", place / "run", next((photos / "red").iterdir())).exit_code == 0


LINKS = (".basisprune-ready", "model/.basisprune-ready", "candidates/.basisprune-ready", "model", "candidates", "mine")


@pytest.mark.parametrize("more", [("--overwrite",), ("--dry-run",), ()], ids=["export", "dry run", "compress"])
@pytest.mark.parametrize("link", LINKS)
def test_no_link_in_the_folder_of_a_run_is_followed(link, more, place, compressed, photos):
    """The folder itself may be one, as its user names it."""
    folder, outside = place / "run", place / "outside"
    shutil.copytree(compressed[0], place / "real")
    folder.symlink_to(place / "real")
    outside.mkdir()
    (outside / "theirs.txt").write_text("theirs")
    if (folder / link).exists():
        shutil.copytree(folder / link, outside, dirs_exist_ok=True)
        shutil.rmtree(folder / link)
    (folder / link).symlink_to(outside)
    before = {path: path.stat().st_mtime_ns for path in outside.rglob("*")}
    if more == ("--overwrite",):
        done = invoke("export", folder, "--to", "onnx", *more)
    else:
        done = compress_into(folder, photos, "--max-drop", "2%", "--int8", *more)
    assert done.exit_code == 1, done.output
    assert str(folder / link) in done.stderr or str(place / "real" / link) in done.stderr
    assert "link" in done.stderr
    assert {path: path.stat().st_mtime_ns for path in outside.rglob("*")} == before
    (folder / link).unlink()


@pytest.mark.parametrize("name", ["config.yaml", "model", "model/config.json", "model/.basisprune-ready"])
def test_predict_follows_no_link_in_the_folder_of_a_run(name, place, compressed, photos):
    folder, outside = place / "run", place / "outside"
    shutil.copytree(compressed[0], folder)
    if (folder / name).exists():
        shutil.move(folder / name, outside)
    else:
        shutil.copytree(folder / "model", outside)
    (folder / name).symlink_to(outside)
    done = invoke("predict", folder, next((photos / "red").iterdir()))
    assert (done.exit_code, f"{folder / name}: is a link" in done.stderr) == (1, True)
