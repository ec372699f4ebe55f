"""What the tests of bundles share: one bundle, copied for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from bundles import NAMES
from tiny import tiny_decomposed

from basisprune.deploy.bundle import save_pretrained


@pytest.fixture(scope="session")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "bundle"
    return save_pretrained(tiny_decomposed(), folder, classes=NAMES, metrics={"accuracy": 0.9})


@pytest.fixture
def saved(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "bundle"))
