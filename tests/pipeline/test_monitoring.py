"""A finished run on new images: differences raise a hand without labels, labels certify anew; and in a browser."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from browsing import browse_labels
from PIL import Image
from tiny import NAMES, tiny_images, tiny_model, tiny_recipe, tiny_training
from typer.testing import CliRunner

from basisprune.budget.looks import SequentialTest
from basisprune.cli import app
from basisprune.data import Loaders
from basisprune.errors import ConfigError, DataError
from basisprune.results import RunSummary
from basisprune.runs.compress import certify_run, compress
from basisprune.runs.monitoring import check_run
from basisprune.runs.record import PAGE, read_answers
from basisprune.search import SearchConfig

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINING = {
    "epochs": 8,
    "batch_size": 16,
    "lr": 0.05,
    "min_lr": 1e-3,
    "choices": None,
    "optimizer": "sgd",
    "head_lr": 1.0,
    "norm_statistics": "batch",
    "train": "method",
    "warmup": 0.0,
    "weight_decay": 0.0,
}
RECIPE = {
    "base": "quick",
    "plan": {"round_to": None},
    "filter_plan": {"round_to": None},
    "train": TRAINING,
    "finetune": TRAINING,
}


def write(folder: Path, count: int, seed: int, *, contrast: int, flat: bool = True) -> dict[str, str]:
    images, labels = tiny_images(count, seed=seed), {}
    for index in range(count):
        pixels, label = images[index]
        pixels[label] -= 120 - contrast
        name = f"{index:03}.png" if flat else f"{NAMES[label]}/{index:03}.png"
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / name)
        labels[name] = NAMES[label]
    return labels


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """A run whose model and data are named, so that its folder alone repeats it, and the true labels."""
    folder = tmp_path_factory.mktemp("monitored")
    write(folder / "photos", 90, 0, contrast=30, flat=False)
    truth = write(folder / "week46", 240, 1, contrast=30)
    out = folder / "out"
    compress(
        "tiny:tiny_backbone", str(folder / "photos"), max_drop=0.08, size=16, val_fraction=0.3, recipe=RECIPE,
        search={"framework": "basis+taylor", "tune_fully": True}, onnx=False,
        unlabelled=str(folder / "week46"), output=out,
    )  # fmt: skip
    return out, truth


def test_a_person_labels_a_run_to_its_certificate_in_a_browser(finished, tmp_path):
    out, _ = finished
    kept = read_answers(out)
    assert kept is not None
    smallest = dict(zip(kept.images, list(kept.answers.values())[-1], strict=True))
    found = browse_labels(out / PAGE, {name: smallest[name] for name in kept.images}, tmp_path)
    (tmp_path / "labels.csv").write_text(str(found["csv"]))
    rows = list(csv.DictReader(io.StringIO(str(found["csv"]))))
    done = CliRunner().invoke(
        app, ["certify", str(out), "--labels", str(tmp_path / "labels.csv"), "--trust-code", "--json"]
    )
    assert done.exit_code == 0, done.output
    certificate = json.loads(done.stdout)["certificate"]
    assert certificate["status"] == "certified"
    assert certificate["labelled"] == len(rows) < 240
    assert RunSummary.read(out / "summary.json").certificate.certified


def test_new_images_of_the_same_kind_raise_no_hand_and_others_do(finished, tmp_path):
    out, _ = finished
    write(tmp_path / "week47", 240, 2, contrast=30)
    write(tmp_path / "dark", 240, 3, contrast=0)
    same, other = (check_run(out, str(tmp_path / name), trust_code=True) for name in ("week47", "dark"))
    assert not same.has_drifted
    assert other.has_drifted
    assert "Warning" in other.verdict
    assert other.differing / other.images > same.differing / same.images
    assert (same.folder / PAGE).exists()
    done = CliRunner().invoke(app, ["certify", str(out), "--unlabelled", str(tmp_path / "dark"), "--trust-code"])
    assert done.exit_code == 3
    assert "Warning" in done.stdout


def test_labels_of_new_images_certify_the_budget_on_them(finished, tmp_path):
    out, _ = finished
    write(tmp_path / "week48", 240, 4, contrast=30)
    first = check_run(out, str(tmp_path / "week48"), trust_code=True)
    kept = read_answers(first.folder)
    assert kept is not None
    before, after = kept.answers.values()
    labels = {name: kept.classes[new] for name, old, new in zip(kept.images, before, after, strict=True) if old != new}
    with (tmp_path / "l.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("file", "label"), *labels.items()])
    assert check_run(out, str(tmp_path / "week48"), tmp_path / "l.csv", trust_code=True).certificate.certified
    assert check_run(out, str(tmp_path / "week48"), trust_code=True).certificate.certified  # the labels are kept


def test_settings_of_a_run_cannot_vouch_for_the_code_that_they_name(finished, tmp_path):
    out, _ = finished
    (tmp_path / "l.csv").write_text("file,label\n000.png,r\n")
    with pytest.raises(ConfigError, match="--trust-code"):
        certify_run(out, tmp_path / "l.csv")
    with pytest.raises(ConfigError, match="--trust-code"):
        check_run(out, str(tmp_path))
    done = CliRunner().invoke(app, ["certify", str(out), "--unlabelled", "tiny:tiny_backbone"])
    assert done.exit_code == 1
    assert "--trust-code" in done.stderr


def test_certify_wants_labels_or_images(finished):
    done = CliRunner().invoke(app, ["certify", str(finished[0])])
    assert done.exit_code == 2


def batches(images, labels, *, labelled: bool = True):
    pairs = zip(images.split(16), labels.split(16), strict=True)
    return [(x, y) if labelled else x for x, y in pairs]


def loaded(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = tiny_images(count, seed=seed)
    images = torch.stack([data[index][0] for index in range(count)]).float() / 255
    return images, torch.from_numpy(data.labels.copy())


def test_loaders_without_targets_confirm(tmp_path):
    new = loaded(120, 5)
    copies = torch.cat([new[0], new[0][:8]])
    loaders = Loaders(
        train=batches(*loaded(90, 0)),
        val=batches(*loaded(60, 6)),
        unlabelled=batches(copies, torch.zeros(128, dtype=torch.int64), labelled=False),
    )
    found = compress(
        tiny_model(), loaders, max_drop=0.1, recipe=tiny_recipe(tiny_training(epochs=2)),
        search=SearchConfig(framework="basis+taylor"), onnx=False, output=tmp_path / "out",
    )  # fmt: skip
    kept = read_answers(tmp_path / "out")
    assert kept is not None
    assert len(kept.images) == 120  # a copy counts once
    assert found.summary.certificate.images == 120
    assert found.summary.certificate.labelled == 0


def test_loaders_refuse_unlabelled_examples_that_train_and_both_kinds_at_once():
    train = batches(*loaded(48, 0))
    with pytest.raises(DataError, match="also in train"):
        Loaders(train=train, val=train, unlabelled=batches(*loaded(48, 0), labelled=False)).splits(_task())
    with pytest.raises(ConfigError, match="pass one of them"):
        Loaders(train=train, val=train, confirm=train, unlabelled=train)


def _task():
    from basisprune.tasks import CLASSIFICATION

    return CLASSIFICATION


def test_the_page_and_the_test_have_the_same_looks(finished):
    data = json.loads((finished[0] / PAGE).read_text().split('id="data">')[1].split("</script>")[0])
    assert [tuple(each) for each in data["looks"]] == list(SequentialTest(240, 0.08).looks)
    assert np.all(np.diff([item["place"] for item in data["items"]]) > 0)
