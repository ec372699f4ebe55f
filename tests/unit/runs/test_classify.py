"""Laws of the answers about image files."""

from __future__ import annotations

import torch
from tiny import NAMES, tiny_images

from basisprune.runs.classify import classify_files, image_files
from basisprune.runs.load import load_any


def test_answers_come_in_the_order_of_the_files_with_all_classes(forms, tmp_path):
    from basisprune.runs.summary import picture_of

    images = tiny_images(40)
    for index in range(40):
        picture_of(images[index][0]).save(tmp_path / f"{index:02}.png")
    (tmp_path / "07.png").write_text("broken")
    answers = list(classify_files(load_any(forms / "bundle"), image_files([tmp_path])))
    assert [answer.file.name for answer in answers] == [f"{index:02}.png" for index in range(40)]
    assert [bool(answer.error) for answer in answers] == [index == 7 for index in range(40)]
    good = [answer for answer in answers if not answer.error]
    assert all(set(dict(answer.classes)) == set(NAMES) for answer in good)
    assert torch.allclose(torch.tensor([sum(dict(answer.classes).values()) for answer in good]), torch.ones(39))
    assert all(answer.classes[0][1] == max(dict(answer.classes).values()) for answer in good)
