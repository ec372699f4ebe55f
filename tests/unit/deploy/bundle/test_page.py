"""Laws of the page beside a bundle; benchmarks/browser.py looks at it in a browser."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import tiny_model
from torch import nn

from basisprune.data.decode import to_pixels
from basisprune.data.transforms import prepare
from basisprune.deploy.bundle import load_bundle, save_pretrained
from basisprune.deploy.bundle.hub import page_files
from basisprune.deploy.export import export_onnx
from basisprune.errors import BundleError
from basisprune.files import digest

EVIL = ['"); import os; ("', "<script>alert(1)</script>", "it's {x}"]
WITHOUT_TORCH = """
import json, runpy, sys, types
class Part:
    def __init__(self, *args, **kwargs): self.args = args
sys.modules["gradio"] = types.SimpleNamespace(Interface=Part, Image=Part, Label=Part)
page = runpy.run_path(sys.argv[1])
from PIL import Image
answers = [page["classify"](Image.open(path)) for path in sys.argv[2:]]
assert page["classify"](None) == {} and page["page"].args[0] is page["classify"]
assert not {"torch", "basisprune", "torchvision", "timm"} & set(sys.modules)
print(json.dumps(answers))
"""


@pytest.fixture
def page(tmp_path):
    model = tiny_model()
    nn.init.normal_(model.classifier.weight, generator=torch.Generator().manual_seed(0))
    bundle = load_bundle(save_pretrained(model, tmp_path / "bundle", classes=EVIL))
    files = page_files(bundle, tmp_path / "bundle", wanted=True)
    (tmp_path / "page").mkdir()
    for name, content in files.items():
        (tmp_path / "page" / name).write_bytes(content)
    return model, tmp_path / "page"


def test_the_page_answers_as_the_network_does_without_torch(page, tmp_path):
    model, folder = page
    dice = np.random.default_rng(0)
    pictures = {
        "photo.png": Image.fromarray(dice.integers(0, 256, (20, 30, 3), dtype=np.uint8)),
        "grey.png": Image.fromarray(dice.integers(0, 256, (16, 16), dtype=np.uint8)),
        "clear.png": Image.fromarray(dice.integers(0, 256, (9, 9, 4), dtype=np.uint8)),
    }
    for name, picture in pictures.items():
        picture.save(tmp_path / name)
    command = [
        sys.executable,
        "-c",
        WITHOUT_TORCH,
        str(folder / "app.py"),
        *(str(tmp_path / name) for name in pictures),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for answer, picture in zip(json.loads(done.stdout), pictures.values(), strict=True):
        images = to_pixels(picture, model.input_spec.size)[None]
        with torch.no_grad():
            shares = model.eval()(prepare(images, model.input_spec)).softmax(-1)[0]
        assert answer == pytest.approx(dict(zip(EVIL, shares.tolist(), strict=True)), abs=1e-4)


def test_nothing_of_the_bundle_is_in_the_program(page):
    _, folder = page
    text = (folder / "app.py").read_text()
    assert not any(name in text for name in EVIL)
    compile(text, "app.py", "exec")
    assert (folder / "requirements.txt").read_text().split() == ["gradio", "numpy", "onnxruntime", "pillow"]


def test_the_file_that_was_delivered_is_taken_if_it_is_sound(tmp_path):
    model = tiny_model()
    path = export_onnx(model, tmp_path / "model.onnx", classes=EVIL, preprocess=True).path
    sums = {"model.onnx": digest(path.read_bytes())}
    bundle = load_bundle(save_pretrained(model, tmp_path / "model", metrics={"sha256": sums}))
    assert page_files(bundle, tmp_path / "model", wanted=None)["model.onnx"] == path.read_bytes()
    path.write_bytes(b"something else")
    assert page_files(bundle, tmp_path / "model", wanted=None)["model.onnx"] != path.read_bytes()


def test_a_network_without_onnx_has_no_page_unless_it_is_wanted(tmp_path):
    bundle = load_bundle(save_pretrained(nn.Sequential(nn.Linear(2, 2)), tmp_path / "b", input_shape=(2,)))
    assert page_files(bundle, None, wanted=None) == page_files(bundle, None, wanted=False) == {}
    with pytest.raises(BundleError, match=r"the page cannot be made: .*does not know how its images"):
        page_files(bundle, None, wanted=True)
