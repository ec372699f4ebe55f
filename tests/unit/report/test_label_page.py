"""The page that asks for labels, in a real browser: it is blind, and stops asking when the test would pass."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from browsing import browse_labels
from PIL import Image

from basisprune.budget.looks import LOST, UNLABELLED, SequentialTest
from basisprune.report.label_page import LabelPage, Question, write_label_page

from .test_html import EVIL, Page

CLASSES = ("cat", "=dog", EVIL)
IMAGES, MARGIN = 300, 0.05


def picture() -> Image.Image:
    return Image.fromarray(np.full((8, 8, 3), 200, dtype=np.uint8))


def page(answers: dict[int, tuple[int, ...]], candidates=("small",)) -> LabelPage:
    questions = [Question(f"{place:03}.png", place, each, picture) for place, each in answers.items()]
    return LabelPage(
        "labels", "run", "basisprune certify out", CLASSES, candidates, SequentialTest(IMAGES, MARGIN), questions
    )


def label(asked: LabelPage, truth: dict[str, int | str], tmp_path: Path) -> dict[str, object]:
    """Label in the browser until the page stops asking."""
    return browse_labels(write_label_page(asked, tmp_path / "label.html"), truth, tmp_path)


def decided(asked: LabelPage, truth: dict[str, int | str], labels: dict[str, str]) -> bool | None:
    """What Python decides by the labels from the page."""
    differences = np.zeros(IMAGES, dtype=np.int8)
    for each in asked.questions:
        before, after = each.answers
        given = labels.get(each.name)
        right = LOST if given == "?" else int(CLASSES[before] == given) - int(CLASSES[after] == given)
        differences[each.place] = UNLABELLED if given is None else right
    return asked.test.decide(differences).passed


@pytest.mark.parametrize(("lost", "won", "neither"), [(4, 4, 3), (0, 12, 0), (14, 2, 1)])
def test_the_page_stops_asking_when_the_test_is_decided(tmp_path, lost, won, neither):
    places = np.random.default_rng(0).choice(IMAGES, lost + won + neither, replace=False).tolist()
    answers = dict.fromkeys(places, (0, 1))
    truth = dict(zip((f"{place:03}.png" for place in places), [0] * lost + [1] * won + [2] * neither, strict=True))
    asked = page(answers)
    found = label(asked, truth, tmp_path)
    labels = {row["file"]: row["label"].removeprefix("'") for row in csv.DictReader(io.StringIO(str(found["csv"])))}
    assert decided(asked, truth, labels) is (lost <= won)
    assert found["asked"] == len(labels) <= len(places)
    assert all(labels[name] == CLASSES[truth[name]] for name in labels)  # types of any kind survive the file
    last = list(labels)[-1]
    assert decided(asked, truth, {name: each for name, each in labels.items() if name != last}) is None
    assert found["reopened"]


def test_cannot_tell_counts_against_the_pruned_network(tmp_path):
    answers = dict.fromkeys(range(0, 300, 15), (0, 1))
    truth = {f"{place:03}.png": "?" for place in answers}
    found = label(page(answers), truth, tmp_path)
    assert "not kept" in str(found["verdict"]) or found["reopened"]
    labels = {row["file"]: row["label"].removeprefix("'") for row in csv.DictReader(io.StringIO(str(found["csv"])))}
    assert set(labels.values()) == {"?"}
    assert decided(page(answers), truth, labels) is False


def test_several_candidates_are_asked_for_what_is_new(tmp_path):
    answers = dict.fromkeys(range(0, 300, 60), (0, 1, 1)) | dict.fromkeys(range(7, 300, 30), (0, 0, 2))
    asked = page(answers, ("large", "small"))
    found = label(asked, {each.name: each.answers[0] if each.place % 60 else 1 for each in asked.questions}, tmp_path)
    assert "small" not in str(found["verdict"]).split(":")[1].split()[0]


def test_the_page_is_one_file_that_shows_no_markup_of_a_class_and_not_which_network_said_what(tmp_path):
    text = write_label_page(page({3: (0, 2), 9: (2, 0)}), tmp_path / "label.html").read_text()
    assert EVIL not in text
    assert all(not (attributes.get("src") or "").startswith("http") for _, attributes in Page(text).tags)
    shown = text.split("<script")[0]
    assert "unpruned" not in shown
    assert "candidate" not in shown


def test_pictures_stay_in_their_files_where_there_are_too_many(tmp_path, monkeypatch):
    monkeypatch.setattr("basisprune.report.label_page.EMBEDDED", 100)
    path = tmp_path / "a photo.png"
    picture().save(path)
    asked = page({})
    questions = [Question(f"{place}.png", place, (0, 1), picture, path) for place in range(3)]
    data = LabelPage(asked.title, asked.key, asked.command, CLASSES, ("small",), asked.test, questions).data
    sources = [item["source"][:5] for item in data["items"]]
    assert sources == ["data:", "file:", "file:"]
