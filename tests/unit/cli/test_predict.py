"""Laws of `basisprune predict`."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import unicodedata

import pytest
import torch
from bundles import seal
from commands import invoke
from PIL import Image
from tiny import tiny_model

from basisprune.data import load_data
from basisprune.deploy.bundle import save_pretrained


def test_a_class_folder_of_photos_is_predicted_from_every_form_of_a_result(compressed, photos):
    folder, _ = compressed
    answers = []
    for form in (folder, folder / "model", folder / "model.onnx"):
        result = invoke("predict", form, photos / "red", "--json")
        assert result.exit_code == 0, result.output
        answers.append(json.loads(result.stdout))
    assert len(answers[0]) == 40
    assert sum(answer["class"] == "red" for answer in answers[0]) >= 36
    shares = torch.tensor([[answer["probability"] for answer in given] for given in answers])
    assert torch.allclose(shares[0], shares[1], atol=1e-6)
    assert torch.allclose(shares[0], shares[2], atol=1e-3)


def test_an_image_that_cannot_be_read_spoils_nothing_for_the_others(compressed, photos, tmp_path):
    folder, _ = compressed
    (tmp_path / "broken.png").write_text("no image")
    result = invoke("predict", folder, photos / "blue" / "2.png", tmp_path / "broken.png", "nowhere.png")
    assert result.exit_code == 1
    assert re.fullmatch(r".*2\.png: blue [0-9.]+%\n", result.stdout)
    assert "broken.png: not an image" in result.stderr
    assert "nowhere.png: cannot be read (No such file" in result.stderr


def test_csv_has_a_row_for_each_class_named(compressed, photos):
    folder, _ = compressed
    result = invoke("predict", folder, photos / "blue" / "2.png", "--top", 2, "--csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert (len(rows), rows[0]["class"]) == (2, "blue")
    assert invoke("predict", folder, "x.png", "--csv", "--json").exit_code == 2


def test_a_folder_without_images_is_refused(compressed, tmp_path):
    result = invoke("predict", compressed[0], tmp_path)
    assert (result.exit_code, "contains no images" in result.stderr) == (1, True)


def test_hidden_files_are_skipped_as_when_training(compressed, photos, tmp_path):
    copied = shutil.copytree(photos, tmp_path / "photos")
    for name in (".hidden.png", "._0.png", ".cache/0.png", "deep/.git/0.png", "deep/0.png"):
        (copied / "red" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(next((photos / "red").iterdir()), copied / "red" / name)
    answers = json.loads(invoke("predict", compressed[0], copied / "red", "--json").stdout)
    trained = load_data(copied, val_fraction=0, test_fraction=0).train
    assert len(answers) == sum(label == trained.classes.index("red") for label in trained.labels) == 41


@pytest.mark.parametrize("command", ["predict", "inspect"])
@pytest.mark.parametrize("factory", ["http.server:test", "sys:exit", "os:getcwd"])
def test_a_bundle_that_names_a_function_is_refused_with_the_way_to_trust_it(command, factory, photos, tmp_path):
    folder = save_pretrained(tiny_model(), tmp_path / "bundle", classes=["red", "green", "blue"])
    seal(folder, lambda config: config["network"].update(backbone=factory, alone=False))
    words = (command, folder, *([next((photos / "red").iterdir())] if command == "predict" else []))
    refused = invoke(*words)
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert all(said in refused.stderr for said in (f"is built by '{factory}'", "--trust-code"))
    if factory != "http.server:test":
        ended = invoke(*words, "--trust-code")
        assert (ended.exit_code, ended.stdout) == (1, "")
        assert "its architecture cannot be built" in ended.stderr


ODD_NAMES = ("\x1b[2Jred", "=1+1\nerror: none", "@\u202eb[link=x]c")


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    """A bundle with class names that a terminal or a spreadsheet would act on, and images of these classes."""
    folder = tmp_path_factory.mktemp("odd")
    save_pretrained(tiny_model(), folder / "model", classes=list(ODD_NAMES))
    for index, name in enumerate(ODD_NAMES):
        (folder / "images" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16), (250, index, 9)).save(folder / "images" / name / f"+\x1b]0;{index}\x07.png")
    return folder


@pytest.mark.parametrize("more", [("predict", "--top", 3), ("predict", "--csv", "--top", 3), ("evaluate",)])
def test_names_of_a_stranger_are_text_to_the_terminal(more, odd):
    command, *options = more
    data = (odd / "images",) if command == "predict" else ("--data", odd / "images")
    done = invoke(command, odd / "model", *data, *options)
    assert done.exit_code == 0, done.output
    letters = set(done.stdout + done.stderr) - {"\n"}
    assert all(unicodedata.category(letter) not in ("Cc", "Cf", "Cs", "Zl", "Zp") for letter in letters)
    assert not any(line.startswith("error") for line in done.output.splitlines())
    assert r"\x1b[2Jred" in done.stdout
    assert "[link=x]c" in done.stdout
    if "--csv" in options:
        rows = list(csv.reader(io.StringIO(done.stdout)))
        assert len(rows) == 1 + 9
        assert {row[1][0] for row in rows[1:]} == {"\\", "'"}


def test_names_in_errors_are_text_to_the_terminal_too(odd, photos, tmp_path):
    (tmp_path / "\x1b[2J.png").write_text("no image")
    for words in (("evaluate", odd / "model", "--data", photos), ("predict", odd / "model", tmp_path)):
        done = invoke(*words)
        assert (done.exit_code, "\x1b" in done.output) == (1, False)
        assert sum(line.startswith("error") for line in done.stderr.splitlines()) == 1
