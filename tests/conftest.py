"""What tests of several folders ask for by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

settings.register_profile("busy machine", deadline=None)  # how long an example takes says nothing
settings.load_profile("busy machine")

SLOW = (
    *("pipeline/", "experiments/", "tools/test_fuzz", "unit/cli/", "unit/data/test_loaders", "unit/deploy/export/"),
    *("unit/deploy/bundle/test_saving", "unit/deploy/bundle/test_steps", "unit/report/test_html"),
    *("unit/integrations/", "unit/runs/test_deliver", "unit/training/test_choosing"),
)
"""What trains networks, starts processes or writes the files of other runtimes; `make quick` leaves it out."""


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    tests = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(tests) and item.path.relative_to(tests).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)


_PILLOWS = Image.open


@pytest.fixture(autouse=True)
def pillows_own_open() -> Iterator[None]:
    """Ultralytics replaces Pillow's `open` by its own when it is imported; the tests after that want Pillow's."""
    Image.open = _PILLOWS
    yield
    Image.open = _PILLOWS


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One CPU thread, on which sums come out the same, bit for bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ultralytics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Ultralytics, offline and with its settings in a folder of their own; how arrays are printed stays as it was."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("YOLO_CONFIG_DIR", str(tmp_path_factory.mktemp("ultralytics")))
        patch.setenv("YOLO_AUTOINSTALL", "false")
        patch.setenv("YOLO_OFFLINE", "true")
        with np.printoptions():
            module = import_module("ultralytics")
        torch.set_printoptions(profile="default")
        yield module
