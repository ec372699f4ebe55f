"""Laws of `basisprune evaluate`."""

from __future__ import annotations

import json
import shutil

import pytest
from commands import invoke
from PIL import Image


def test_evaluating_a_result_gives_the_accuracy_of_its_summary(compressed, photos):
    folder, done = compressed
    expected = json.loads(done.stdout)
    found = json.loads(invoke("evaluate", folder, "--json").stdout)
    assert (found["part"], found["images"]) == ("test", 12)
    assert found["accuracy"] == pytest.approx(expected["test"]["after"]["accuracy"])
    assert found["interval"] == pytest.approx(expected["test"]["after"]["interval"])
    assert "with 95% confidence" in invoke("evaluate", folder).stdout


def test_every_form_of_a_result_is_judged_by_the_images_that_its_run_held_out(compressed, photos, tmp_path):
    folder, done = compressed
    known = json.loads(done.stdout)
    after, int8 = known["test"]["after"]["accuracy"], known["files"]["model.int8.onnx"]["accuracy"]
    for form, accuracy in (("model", after), ("model.onnx", after), ("model.int8.onnx", int8)):
        for more in ((), ("--data", f"{photos}/"), ("--data", photos / "red" / "..", "--part", "test")):
            found = json.loads(invoke("evaluate", folder / form, *more, "--json").stdout)
            assert (found["part"], found["images"]) == ("test", 12)
            assert found["accuracy"] == pytest.approx(accuracy)
    moved = tmp_path / "model.onnx"
    moved.write_bytes((folder / "model.onnx").read_bytes())
    assert json.loads(invoke("evaluate", moved, "--data", photos, "--json").stdout)["part"] == "all"
    for part in ("train", "val", "test"):
        refused = invoke("evaluate", moved, "--data", photos, "--part", part)
        assert (refused.exit_code, "held out is unknown" in refused.stderr) == (1, True)
    (tmp_path / "split").mkdir()
    for name in ("train", "test"):
        (tmp_path / "split" / name).symlink_to(photos)
    whole = invoke("evaluate", moved, "--data", tmp_path / "split", "--part", "test", "--json")
    assert json.loads(whole.stdout)["images"] == 120  # the data says itself which are its test images


def test_evaluating_on_classes_that_the_model_does_not_know_is_refused(compressed, photos, tmp_path):
    for name in ("red", "violet"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (16, 16)).save(tmp_path / name / "1.png")
    result = invoke("evaluate", compressed[0], "--data", tmp_path)
    assert (result.exit_code, "'violet'" in result.stderr) == (1, True)


def test_every_role_is_written_down_and_can_be_evaluated(compressed):
    folder, _ = compressed
    parts = json.loads((folder / "images.json").read_text())["parts"]
    assert {role: len(entries) for role, entries in parts.items()} == {
        "train": 78,
        "val": 15,
        "confirm": 15,
        "test": 12,
    }
    assert len({name for entries in parts.values() for name, *_ in entries}) == 120
    found = json.loads(invoke("evaluate", folder, "--part", "confirm", "--json").stdout)
    assert (found["part"], found["images"]) == ("confirm", 15)


@pytest.fixture
def trained(photos, tmp_path):
    """A trained network, and its photos in a folder of their own."""
    copied = shutil.copytree(photos, tmp_path / "photos")
    words = ("--model", "tiny:tiny_backbone", "--data", copied, "--size", 16, "--epochs", 1)
    assert invoke("train", *words, "--output", tmp_path / "out").exit_code == 0
    return tmp_path / "out", copied


def test_files_that_are_added_later_are_not_evaluated(trained):
    folder, photos = trained
    before = {part: invoke("evaluate", folder, "--part", part, "--json").stdout for part in ("train", "val", "test")}
    for index in range(60):  # which would change the split if it were drawn again
        Image.new("RGB", (16, 16), (0, 0, index)).save(photos / "red" / f"a{index}.png")
    after = {part: invoke("evaluate", folder, "--part", part, "--json").stdout for part in before}
    assert after == before
    assert json.loads(invoke("evaluate", folder, "--part", "all", "--json").stdout)["images"] == 180


def test_images_of_the_run_that_are_missing_or_replaced_are_refused_by_name(trained):
    folder, photos = trained
    test = [name for name, *_ in json.loads((folder / "images.json").read_text())["parts"]["test"]]
    (photos / test[0]).unlink()
    Image.new("RGB", (16, 16)).save(photos / test[1])
    result = invoke("evaluate", folder)
    assert result.exit_code == 1
    assert all(said in result.stderr for said in ("2 faults", f"{test[0]}: missing", f"{test[1]}: replaced", "put the"))
    assert invoke("evaluate", folder, "--part", "train").exit_code == 0  # whose images are as they were
    (folder / "images.json").unlink()
    result = invoke("evaluate", folder)
    assert (result.exit_code, "images.json is missing" in result.stderr) == (1, True)


def test_a_damaged_image_is_left_out_and_said(trained):
    folder, photos = trained
    (photos / "red" / "cut.png").write_bytes(b"")
    result = invoke("evaluate", folder, "--part", "all", "--json")
    assert json.loads(result.stdout)["images"] == 120
    assert "cut.png" in result.stderr
