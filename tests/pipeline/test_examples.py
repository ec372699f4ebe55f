"""The examples run as they are, and make networks smaller."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import basisprune as bp
from basisprune.torchkit.running import tensors_in

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.usefixtures("one_thread")


FILES = {"report.html", "summary.json", "model", "model.onnx"}


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore")  # of MONAI and transformers
@pytest.mark.parametrize("name", ["segmentation", "signals", "detection", "transformers_segformer", "monai_vnet"])
def test_an_example_gives_a_smaller_network_of_about_the_same_quality(name, tmp_path, capsys):
    module = example(name)
    result = module.main(*["unet"] * (name == "monai_vnet"), str(tmp_path / "out"))
    summary, said = result.summary, capsys.readouterr().out
    assert "before" in said
    assert "after" in said
    assert summary.task == module.main.__module__ or summary.task in ("segmentation", "regression", "detection")
    assert summary.test.before.accuracy > 0.7  # it had learnt something
    assert summary.test.before.accuracy - summary.test.after.accuracy < 0.1
    assert summary.chosen.parameters < 0.7 * summary.reference.parameters
    assert summary.certificate.tests  # on examples that nothing had seen
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert written >= FILES - {"model"}
    assert "model" in written or (name == "transformers_segformer" and "model" in summary.not_written)
    if "model" not in written:
        return
    images = next(iter(result.data.test))[0]
    loaded = bp.from_pretrained(tmp_path / "out" / "model")  # none of them needs its class, or trust
    with torch.no_grad():
        found, expected = (list(tensors_in(each(images))) for each in (loaded, result.model))
    assert all(map(torch.equal, found, expected))


@pytest.mark.filterwarnings("ignore")
def test_a_v_net_is_pruned_down_to_its_files(tmp_path):
    result = example("monai_vnet").main("vnet", str(tmp_path / "out"), 0.7, 8)
    before, after = result.summary.test.before, result.summary.test.after
    assert after.parameters < 0.3 * before.parameters
    assert after.accuracy > before.accuracy - 0.1
    assert {path.name for path in (tmp_path / "out").iterdir()} >= FILES
