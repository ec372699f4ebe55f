"""Laws of the embedded default: what its packages hold, and what the demo makes of it."""

from __future__ import annotations

import pytest
import torch
from PIL import Image
from tiny import tiny_images

import basisprune.demo
from basisprune.budget import Budget
from basisprune.data import load_data
from basisprune.demo import demo_data, demo_job, demo_model, demo_recipe, save_examples
from basisprune.errors import MissingExtraError
from basisprune.runs.folder import is_repeatable


def test_the_demo_data_are_ten_digits_split_evenly():
    splits = demo_data()
    assert {name: len(part) for name, part in splits.parts.items()} == {
        "train": 2000,
        "val": 500,
        "confirm": 2000,
        "test": 500,
    }
    assert splits.num_classes == 10
    for part in splits.parts.values():
        assert set(torch.bincount(torch.tensor(part.labels)).tolist()) == {len(part) // 10}
        image, _ = part[0]
        assert (image.shape, image.dtype) == ((1, 28, 28), torch.uint8)
    assert [(image.float() - other.float()).abs().sum() for (image, _), (other, _) in
            zip(list(splits.val)[:5], list(demo_data().val)[:5], strict=True)] == [0] * 5  # fmt: skip


def test_the_demo_model_reads_images_and_knows_imagenet():
    model = demo_model(input_size=64)
    with torch.no_grad():
        scores = model(torch.randn(2, *model.input_spec.shape))
    assert (model.input_spec.size, scores.shape) == ((64, 64), (2, 10))
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert len(norms) >= 49
    assert all((norm.running_var != 1).any() for norm in norms)


def test_a_missing_demo_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(basisprune.demo, "find_spec", lambda name: None)
    for build in (demo_model, demo_data):
        with pytest.raises(MissingExtraError, match=r"basisprune\[demo\]"):
            build()


def test_the_job_is_the_search_for_one_per_cent_by_a_short_recipe():
    job = demo_job(32)
    assert job.config.goal == Budget(max_drop=0.01)
    assert job.config.recipe == demo_recipe()
    assert job.network.input_spec.size == (32, 32)
    assert (job.to_dict()["size"], is_repeatable(job.to_dict())) == (32, False)


def test_an_image_of_each_class_that_was_held_out_is_written(tmp_path):
    splits = load_data(tiny_images(90), val_fraction=0.2)
    save_examples(splits, tmp_path / "digits")
    held_out = {image.numpy().tobytes() for image, _ in splits.test}
    for name in splits.classes:
        pixels = torch.frombuffer(
            bytearray(Image.open(tmp_path / "digits" / f"{name}.png").tobytes()), dtype=torch.uint8
        )
        assert pixels.view(16, 16, 3).permute(2, 0, 1).numpy().tobytes() in held_out
