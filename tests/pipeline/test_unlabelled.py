"""From images without labels to a certificate: compress, label, certify."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny import NAMES, tiny_images, tiny_model, tiny_recipe, tiny_training

from basisprune.errors import CheckpointError, ConfigError, DataError
from basisprune.results import RunSummary
from basisprune.runs.compress import Compressed, certify_run, compress
from basisprune.runs.record import ANSWERS, PAGE, Answers, read_answers, read_labels
from basisprune.search import SearchConfig

pytestmark = pytest.mark.usefixtures("one_thread")
COUNT = 240


def write_images(folder: Path, count: int, seed: int, *, flat: bool) -> dict[str, str]:
    """Write images that are hard to tell apart, in class folders or not, and return their labels by name."""
    images, labels = tiny_images(count, seed=seed), {}
    for index in range(count):
        pixels, label = images[index]
        pixels[label] -= 108
        name = f"{index:03}.png" if flat else f"{NAMES[label]}/{index:03}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / name)
        labels[name] = NAMES[label]
    return labels


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    folder = tmp_path_factory.mktemp("unlabelled")
    write_images(folder / "photos", 90, 0, flat=False)
    return folder, write_images(folder / "week46", COUNT, 1, flat=True)


def run(folder: Path, output: Path | None, **options) -> Compressed:
    settings = {
        "max_drop": 0.08,
        "recipe": tiny_recipe(tiny_training(epochs=2)),
        "search": SearchConfig(framework="basis+taylor"),
        "onnx": False,
        "val_fraction": 0.3,
        "unlabelled": str(folder / "week46"),
        "output": output,
    }
    return compress(tiny_model(), str(folder / "photos"), **{**settings, **options})


@pytest.fixture(scope="module")
def begun(place, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "out"
    run(place[0], output)
    return output


@pytest.fixture
def output(begun, tmp_path) -> Path:
    """A copy of the run's folder, before any label was given."""
    return Path(shutil.copytree(begun, tmp_path / "out"))


def to_label(output: Path) -> list[str]:
    """The images on which any two of the networks differ, in the order of the page."""
    kept = read_answers(output)
    assert kept is not None
    answers = np.array(list(kept.answers.values()))
    return [kept.images[place] for place in np.flatnonzero((answers != answers[0]).any(0))]


def in_favour(output: Path, *, of: str) -> dict[str, str]:
    """Labels of all images on which networks differ: what the unpruned network answers, or the smallest."""
    kept = read_answers(output)
    assert kept is not None
    answers = dict(zip(kept.images, list(kept.answers.values())[0 if of == "unpruned" else -1], strict=True))
    return {name: kept.classes[answers[name]] for name in to_label(output)}


def write_labels(path: Path, labels: dict[str, str]) -> Path:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label"), *labels.items()])
    return path


def test_without_labels_the_result_is_estimated_and_says_what_to_label(place, output):
    summary = RunSummary.read(output / "summary.json")
    certificate = summary.certificate
    assert certificate is not None
    assert (certificate.status, certificate.images, certificate.labelled) == ("estimated", COUNT, 0)
    assert PAGE in certificate.reason
    assert "basisprune certify" in summary.verdict
    page = (output / PAGE).read_text()
    assert all(f'"{name}"' in page for name in to_label(output))


def test_all_labelled_images_train_and_search(place, output):
    listed = json.loads((output / "images.json").read_text())["parts"]
    assert "confirm" not in listed
    assert sum(map(len, listed.values())) == 90


def test_labels_where_answers_differ_certify_the_network(place, output, tmp_path):
    folder, _ = place
    result = run(folder, output, labels=write_labels(tmp_path / "labels.csv", in_favour(output, of="smallest")))
    certificate = result.summary.certificate
    assert certificate.certified
    assert certificate.labelled == len(to_label(output))
    assert f"{COUNT} images without labels" in result.summary.verdict
    assert result.chosen.parameters < result.history[0].parameters
    assert RunSummary.read(output / "summary.json") == result.summary
    again = run(folder, output)  # labels are kept
    assert again.summary.certificate == certificate


def test_labels_that_speak_against_the_pruned_network_end_the_tests(place, output, tmp_path):
    labels = write_labels(tmp_path / "labels.csv", in_favour(output, of="unpruned"))
    certificate = run(place[0], output, labels=labels).summary.certificate
    assert not certificate.certified
    assert not certificate.tests[-1].passed
    assert certificate.tests[-1].lost > certificate.tests[-1].won


def test_labels_may_come_in_parts_and_stay(place, output, tmp_path):
    folder, truth = place
    names = to_label(output)
    some = write_labels(tmp_path / "some.csv", {name: truth[name] for name in names[:1]})
    assert run(folder, output, labels=some).summary.certificate.labelled == 1
    other = next(each for each in NAMES if each != truth[names[0]])
    with pytest.raises(DataError, match="labels stay"):
        run(folder, output, labels=write_labels(tmp_path / "changed.csv", {names[0]: other}))
    rest = write_labels(tmp_path / "rest.csv", {name: truth[name] for name in names[1:]})
    assert run(folder, output, labels=rest).summary.certificate.labelled == len(names)


def test_cannot_tell_counts_against_the_pruned_network(place, output, tmp_path):
    folder, _ = place
    names = to_label(output)
    unknown = run(folder, output, labels=write_labels(tmp_path / "l.csv", dict.fromkeys(names, "?")))
    tests = unknown.summary.certificate.tests
    assert all(test.lost >= test.won for test in tests)
    assert sum(test.lost for test in tests) > 0


@pytest.mark.parametrize(
    ("rows", "fault"),
    [
        ({"nosuch.png": "r"}, "no image of this run"),
        ({"000.png": "purple"}, "no class of this run"),
        ({}, "file and label are needed"),
    ],
)
def test_labels_that_do_not_fit_are_refused_and_nothing_is_written(place, output, tmp_path, rows, fault):
    path = write_labels(tmp_path / "l.csv", rows)
    if not rows:
        path.write_text("a,b\n1,2\n")
    before = (output / ANSWERS).read_bytes()
    with pytest.raises(DataError) as caught:
        run(place[0], output, labels=path)
    assert fault in str(caught.value)
    assert (output / ANSWERS).read_bytes() == before


def test_changed_images_and_forged_answers_are_refused(place, output, tmp_path):
    folder = Path(shutil.copytree(place[0], tmp_path / "images"))
    with pytest.raises(CheckpointError):  # another folder is another setting
        run(folder, output)
    kept = (output / ANSWERS).read_text()
    (output / ANSWERS).write_text(kept.replace('"labels":{}', '"labels":{"000.png":"r"}'))
    with pytest.raises(CheckpointError):
        run(place[0], output)
    (output / ANSWERS).write_text(kept)
    image = place[0] / "week46" / "000.png"
    content = image.read_bytes()
    try:
        Image.new("RGB", (16, 16), "red").save(image)
        with pytest.raises(DataError):
            run(place[0], output)
    finally:
        image.write_bytes(content)


def test_copies_are_counted_once_and_copies_of_labelled_images_not_at_all(place, tmp_path):
    folder = Path(shutil.copytree(place[0], tmp_path / "images"))
    for index in range(5):
        shutil.copy(folder / "week46" / "001.png", folder / "week46" / f"copy{index}.png")
    shutil.copy(next((folder / "photos" / "r").iterdir()), folder / "week46" / "seen.png")
    with pytest.warns(UserWarning, match="6 images without labels are copies"):
        result = run(folder, None)
    assert result.summary.certificate.images == COUNT


def test_a_run_on_names_is_certified_by_its_folder_alone(place, output, tmp_path):
    with pytest.raises(ConfigError, match="labels="):
        certify_run(output, write_labels(tmp_path / "l.csv", {"000.png": "r"}))


@pytest.mark.parametrize("options", [{"metric": "balanced"}, {"max_drop": None, "min_accuracy": 0.9}])
def test_budgets_that_need_all_labels_are_refused(place, options):
    with pytest.raises(ConfigError, match="unlabelled"):
        run(place[0], None, **options)


def test_labels_of_other_tools_are_read(tmp_path):
    images = ("a/1.png", "b/1.png", "b/2 x.png", "c.png")
    path = tmp_path / "export.csv"
    path.write_text(
        "id,image,choice\n1,/data/local-files/?d=photos/a/1.png,cat\n2,/data/upload/3/0a1b2c3d-2%20x.png,dog\n"
        "3,c.png,'=sum\n"
    )
    assert read_labels(path, images) == {"a/1.png": "cat", "b/2 x.png": "dog", "c.png": "=sum"}


def test_answers_survive_their_file():
    kept = Answers(("a", "b"), ("x", "y"), {"one": (0, 1), "two": (1, 1)}, {"a": "?"})
    assert Answers.from_json(kept.to_json()) == kept
    assert kept.differences("one", "two").tolist() == [1, 0]
