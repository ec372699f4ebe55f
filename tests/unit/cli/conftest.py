"""What the tests of all subcommands share: photos, a recipe for the tiny network, and a finished run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from commands import compress_into
from PIL import Image
from tiny import tiny_images, tiny_model, tiny_recipe, tiny_training

import basisprune.demo
from basisprune.data import load_data
from basisprune.recipes import RECIPES

COLOURS = ("red", "green", "blue")


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    images = tiny_images(120)
    for index in range(len(images)):
        pixels, label = images[index]
        (folder / COLOURS[label]).mkdir(exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / COLOURS[label] / f"{index}.png")
    return folder


@contextmanager
def tiny_quick() -> Iterator[None]:
    """The recipe "quick" is one for the tiny network, on one thread."""
    before, threads = RECIPES["quick"], torch.get_num_threads()
    RECIPES["quick"] = tiny_recipe(tiny_training(epochs=4, batch_size=8))
    torch.set_num_threads(1)
    try:
        yield
    finally:
        RECIPES["quick"] = before
        torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def ctrl_c():
    """Ctrl-C, which a stopped command no longer callback, stops the tests as before."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def quick_recipe():
    with tiny_quick():
        yield


@pytest.fixture(scope="session")
def compressed(photos, tmp_path_factory):
    """A finished run, with ONNX files, and what it printed; tests read it and leave it as it is."""
    folder = tmp_path_factory.mktemp("runs") / "out"
    with tiny_quick():
        done = compress_into(folder, photos, "--max-drop", "2%", "--int8", "--json")
    assert done.exit_code == 0, done.output
    return folder, done


@pytest.fixture
def tiny_demo(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # which the demo would set for good
    monkeypatch.setattr(basisprune.demo, "demo_model", lambda input_size: tiny_model())
    monkeypatch.setattr(basisprune.demo, "demo_data", lambda: load_data(tiny_images(90), val_fraction=0.2))
    monkeypatch.setattr(basisprune.demo, "demo_recipe", lambda: RECIPES["quick"])
    monkeypatch.setattr("basisprune.runs.deliver.has_onnx", lambda: False)
