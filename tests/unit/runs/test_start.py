"""Laws of a start: what would fail at the end fails at the beginning, and nothing is written."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from PIL import Image
from tables import invented
from tiny import NAMES, tiny_images, tiny_model, tiny_recipe, tiny_training

import basisprune.deploy.export.runtime
from basisprune.callback import NullCallback
from basisprune.data import Splits
from basisprune.deploy.timing import wanted_shapes
from basisprune.errors import (
    BasisPruneError,
    BundleError,
    CheckpointError,
    ConfigError,
    DataError,
    MissingExtraError,
    PlanError,
)
from basisprune.errors import ModelError as NoModel
from basisprune.runs.job import Job, prepare_job
from basisprune.runs.output import OutputFolder
from basisprune.runs.settings import configure
from basisprune.runs.start import check_start


def job(data=None, **options) -> Job:
    config = configure({"recipe": tiny_recipe(tiny_training(epochs=1)), **options})
    return prepare_job(tiny_model(), tiny_images(60) if data is None else data, config)


def refused(given: Job, output: Path, kind: type[BasisPruneError], message: str) -> None:
    before = sorted(output.parent.rglob("*")) if output.parent.exists() else []
    with pytest.raises(kind, match=message):
        check_start(given, OutputFolder(output), given.to_dict())
    assert (sorted(output.parent.rglob("*")) if output.parent.exists() else []) == before


def test_a_sound_start_says_nothing_and_writes_nothing(tmp_path):
    check_start(job(), OutputFolder(tmp_path / "deep" / "out"), job().to_dict())
    check_start(job(), None, job().to_dict())
    assert list(tmp_path.iterdir()) == []


def test_an_output_in_the_folder_of_the_images_is_refused(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(6):
            Image.new("RGB", (16, 16), (ord(name), index, 0)).save(tmp_path / "photos" / name / f"{index}.png")
    given = job(str(tmp_path / "photos"))
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for place in ("photos", "photos/out", "photos/a/out", "link/out", "photos/../photos/out"):
        refused(given, tmp_path / place, ConfigError, "lies in the folder of the images")
    check_start(given, OutputFolder(tmp_path / "photos-out"), given.to_dict())


def test_packages_that_are_asked_for_and_not_installed_are_named_first(tmp_path, monkeypatch):
    monkeypatch.setattr(basisprune.deploy.export.runtime, "find_spec", lambda _name: None)
    refused(job(onnx=True), tmp_path / "out", MissingExtraError, r"basisprune\[onnx\]")
    refused(job(int8=True), tmp_path / "out", MissingExtraError, r"basisprune\[onnx\]")
    for given in (job(), job(int8=True, onnx=False)):
        check_start(given, OutputFolder(tmp_path / "out"), given.to_dict())
    check_start(job(), OutputFolder(tmp_path / "out"), job().to_dict())


def test_names_that_are_not_utf_8_are_refused(tmp_path):
    given = job()
    splits = given.splits
    odd = Splits(splits.train, splits.val, splits.test, ("\udcff", *NAMES[1:]))
    refused(Job(given.network, odd, given.config, "m", "d"), tmp_path / "out", DataError, "is not UTF-8; rename its")
    refused(Job(given.network, splits, given.config, "m", "d\udcff"), tmp_path / "out", ConfigError, "is not UTF-8")
    refused(given, tmp_path / "out\udcff", ConfigError, "is not UTF-8")


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    refused(job(), tmp_path / "file", CheckpointError, "is a file")
    refused(job(), tmp_path / "file" / "out", CheckpointError, "is a file")
    refused(job(), tmp_path / ("x" * 300), ConfigError, "File name too long")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(tmp_path)
    (tmp_path / "run" / "config.yaml.damaged").write_text("")
    refused(job(), tmp_path / "run", BundleError, "is a file or a link")
    monkeypatch.setattr(os, "access", lambda *_given: False)
    refused(job(), tmp_path / "out", ConfigError, "is read-only for you")


def test_a_disk_without_space_is_refused_and_one_with_little_is_told(tmp_path, monkeypatch):
    said: list[str] = []
    callback = NullCallback()
    callback.log = said.append
    usage = namedtuple("usage", "free")
    weights = sum(value.nbytes for value in tiny_model().state_dict().values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(5 * weights))
    refused(job(), tmp_path / "out", ConfigError, "bytes left, and this run needs at least")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(12 * weights))
    check_start(job(), OutputFolder(tmp_path / "out"), job().to_dict(), callback)
    assert "may need up to" in said[0]


@pytest.mark.parametrize("change", ["half", "double"])
def test_a_network_of_another_precision_is_refused(change, tmp_path):
    given = job()
    getattr(given.network, change)()
    refused(given, tmp_path / "out", NoModel, r"weights of torch\.float.*pass model\.float\(\)")


def test_a_start_without_gradients_or_with_another_default_is_refused(tmp_path):
    given = job()
    for block in (torch.no_grad(), torch.inference_mode()):
        with block:
            refused(given, tmp_path / "out", ConfigError, "called without gradients")
    torch.set_default_dtype(torch.float64)
    try:
        refused(given, tmp_path / "out", ConfigError, r"default dtype is torch\.float64")
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_device_file_for_another_network_is_refused_at_once(tmp_path):
    path = tmp_path / "device.json"
    path.write_text(invented(wanted_shapes(tiny_model(), (3, 16, 16)), block=2).to_json())
    given = job(device=str(path))
    for output in (None, OutputFolder(tmp_path / "out")):
        check_start(given, output, given.to_dict())
    path.write_text(invented(wanted_shapes(tiny_model(), (3, 24, 24)), block=2).to_json())
    refused(given, tmp_path / "out", PlanError, "profile it again")
    with pytest.raises(PlanError, match="profile it again"):
        check_start(given, None, given.to_dict())
    path.write_text("{}")
    refused(given, tmp_path / "out", ConfigError, "not a table of times")
    path.unlink()
    refused(given, tmp_path / "out", ConfigError, r"device\.json: cannot be read")
