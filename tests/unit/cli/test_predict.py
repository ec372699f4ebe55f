"""Laws of `basisprune predict`."""

from __future__ import annotations

import csv
import io
import json
import re

import torch
from commands import invoke


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
    assert "nowhere.png: there is no such file" in result.stderr


def test_csv_has_a_row_for_each_class_named(compressed, photos):
    folder, _ = compressed
    result = invoke("predict", folder, photos / "blue" / "2.png", "--top", 2, "--csv")
    rows = list(csv.DictReader(io.StringIO(result.stdout)))
    assert (len(rows), rows[0]["class"]) == (2, "blue")
    assert invoke("predict", folder, "x.png", "--csv", "--json").exit_code == 2


def test_a_folder_without_images_is_refused(compressed, tmp_path):
    result = invoke("predict", compressed[0], tmp_path)
    assert (result.exit_code, "contains no images" in result.stderr) == (1, True)
