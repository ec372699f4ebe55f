"""A network that somebody has trained, from start to end: it keeps its head, and is what the budget is counted from."""

from __future__ import annotations

import json

import pytest
import torch
from commands import invoke
from PIL import Image
from safetensors.torch import save_file
from tiny import Notes, differing, tiny_images, tiny_recipe, tiny_training
from torch import nn
from trained import HINTS, PREPARED, own_network, trained

from basisprune.data import Splits, load_data
from basisprune.deploy.bundle import from_pretrained, load_bundle
from basisprune.errors import CheckpointError, ConfigError, ModelError
from basisprune.recipes import RECIPES
from basisprune.runs.compress import compress
from basisprune.training.evaluation import evaluate
from basisprune.transfer.model import KeptModel, kept_model

pytestmark = pytest.mark.usefixtures("one_thread")
IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
CLASSES = ("red", "green", "blue")


def data() -> Splits:
    return load_data(tiny_images(120), val_fraction=0.25, test_fraction=0.25)


def run(network: str | nn.Module, **settings):
    options = {"max_drop": 0.05, "recipe": tiny_recipe(tiny_training(epochs=1)), "keep_head": True, "onnx": False}
    return compress(network, data(), **{**options, **PREPARED, **settings})


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """The network, what became of it, where that is, and what was said."""
    network, folder, notes = trained(), tmp_path_factory.mktemp("own") / "out", Notes()
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    result = run(network, output=folder, callback=notes)
    torch.set_num_threads(before)
    return network, result, folder, notes.lines


def test_the_network_is_the_reference_and_is_not_trained(ours):
    network, result, _, lines = ours
    assert torch.allclose(result.original(IMAGES), network(IMAGES), atol=1e-4)
    assert not differing(network, trained())
    assert result.history[0].history == ()
    expected = evaluate(kept_model(network, input_hints=HINTS), result.data.val).accuracy
    assert result.history[0].accuracy == expected == 1.0
    assert "the network is taken as it is given, without training" in lines
    assert not any(line.startswith("dense: training") for line in lines)


def test_the_result_is_smaller_within_the_budget_and_has_the_same_classes(ours):
    _, result, folder, _ = ours
    assert result.chosen.passed
    assert result.chosen.parameters < result.history[0].parameters
    assert result.model(IMAGES).shape == (4, 3)
    assert torch.equal(from_pretrained(folder / "model")(IMAGES), result.model(IMAGES))


def test_the_same_run_goes_on_and_other_weights_are_refused(ours):
    _, result, folder, _ = ours
    again = run(trained(), output=folder)
    assert [each.steps for each in again.history] == [each.steps for each in result.history]
    other = trained()
    with torch.no_grad():
        other.last.bias += 1e-3  # of the head alone
    with pytest.raises(CheckpointError, match="created with other settings, weights or images"):
        run(other, output=folder)


def test_it_is_trained_first_if_that_is_asked_for():
    notes = Notes()
    result = run(trained((1, 2, 0)), tune_first=True, basis_ratio=0.5, max_drop=None, callback=notes)
    assert "dense: training for 1 epoch" in notes.lines
    assert len(result.history) == 2


@pytest.mark.parametrize("framework", ["basis+taylor", "l1"])
def test_other_frameworks_start_from_the_network_too(framework):
    ratios = {"filter_ratio": 0.3} if framework == "l1" else {"basis_ratio": 0.3, "filter_ratio": 0.3}
    result = run(trained(), framework=framework, max_drop=None, **ratios)
    assert torch.allclose(result.original(IMAGES), trained()(IMAGES), atol=1e-4)


def test_a_wrong_order_other_classes_and_odd_weights_are_refused_before_anything_is_written(tmp_path):
    output = tmp_path / "out"
    with pytest.raises(ModelError, match="with its classes in another order it would get 100"):
        run(trained((1, 2, 0)), output=output)
    with pytest.raises(ModelError, match="distinguishes 4 classes, and the data has 3"):
        run(type(trained())(4), output=output)
    save_file({"first.weight": torch.zeros(1)}, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match="weights do not fit Own"):
        run(own_network(), weights=str(tmp_path / "w.safetensors"), output=output)
    with pytest.raises(ConfigError, match="tune_first: given without keep_head"):
        run(trained(), keep_head=False, tune_first=True, output=output)
    assert not output.exists()


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Class folders that sort as the network has its classes, and one of its weights as Lightning writes them."""
    monkeypatch.setitem(RECIPES, "quick", tiny_recipe(tiny_training(epochs=1, batch_size=8)))
    images = tiny_images(90)
    for index in range(len(images)):
        pixels, label = images[index]
        folder = tmp_path / "photos" / f"{label}-{CLASSES[label]}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{index}.png")
    state = {f"net.{name}": value for name, value in trained().state_dict().items()}
    torch.save({"state_dict": state, "epoch": 4}, tmp_path / "own.ckpt")
    return tmp_path


def command(name: str, photos, *more: object):
    weights = ("--weights", photos / "own.ckpt", "--keep-head", "--mean", "0.5", "--std", "0.25,0.25,0.25")
    start = ("--model", "trained:own_network", "--data", photos / "photos", "--size", 16)
    return invoke(name, *start, *weights, *more)


def test_from_the_command_line_with_a_checkpoint_of_lightning(photos):
    out = photos / "out"
    done = command("compress", photos, "--basis-ratio", "50%", "--filter-ratio", "20%", "--no-onnx", "--output", out)
    assert done.exit_code == 0, done.output
    assert f"the weights are those in {photos / 'own.ckpt'} under 'state_dict', named net." in done.stderr
    bundle = load_bundle(out / "model")
    assert bundle.classes == ("0-red", "1-green", "2-blue")
    assert (bundle.input_spec.mean, bundle.input_spec.std) == ((0.5,) * 3, (0.25,) * 3)
    again = invoke("compress", "--config", out / "config.yaml", "--trust-code", "--output", photos / "again", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["candidates"][0]["accuracy"] == 1.0


def test_a_dry_run_says_that_it_is_taken_as_it_is(photos):
    done = command("compress", photos, "--dry-run", "--output", photos / "out")
    assert done.exit_code == 0, done.output
    assert "recipe   the model as it is, at most 1 epoch per candidate" in done.stdout
    wrong = command("compress", photos, "--dry-run", "--output", photos / "out", "--weights-key", "ema")
    assert (wrong.exit_code, "has no entry 'ema'" in wrong.stderr) == (1, True)


def test_train_goes_on_with_the_head_and_compress_with_its_model(photos):
    done = command("train", photos, "--epochs", 1, "--output", photos / "trained")
    assert done.exit_code == 0, done.output
    start = ("--model", photos / "trained" / "model", "--data", photos / "photos", "--trust-code", "--no-onnx")
    for more in (("--keep-head",), ()):
        out = photos / f"out{len(more)}"
        done = invoke("compress", *start, "--basis-ratio", "50%", "--output", out, *more)
        assert done.exit_code == 0, done.output
        assert (out / "model" / "config.json").exists()


def test_inspecting_it_shows_its_own_layers(photos):
    done = invoke("inspect", "trained:own_network", "--keep-head", "--weights", photos / "own.ckpt", "--size", 16)
    assert done.exit_code == 0, done.output
    assert "network.middle" in done.stdout


def test_a_kept_network_given_as_such_is_taken_too():
    result = run(kept_model(trained(), input_hints=HINTS), size=None, basis_ratio=0.5, max_drop=None)
    assert isinstance(result.trained, KeptModel)
