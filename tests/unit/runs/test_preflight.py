"""Laws of what is tried before a run: what would fail later fails first, by its reason, and nothing is written."""

from __future__ import annotations

import copy
import os
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tables import invented
from tiny import NAMES, Notes, differing, tiny_images, tiny_model, tiny_recipe, tiny_training
from torch import Tensor, nn
from trained import HINTS, PREPARED, SPEC, Own, trained

import basisprune.deploy.export.runtime
from basisprune.callback import NullCallback
from basisprune.data import Loaders, PreparedBatches, Splits, load_data
from basisprune.deploy.timing import wanted_shapes
from basisprune.errors import (
    BasisPruneError,
    BundleError,
    CheckpointError,
    ConfigError,
    DataError,
    LayerError,
    MissingExtraError,
    ModelError,
    PlanError,
    TooMuchError,
)
from basisprune.errors import ModelError as NoModel
from basisprune.recipes import RECIPES, find_framework
from basisprune.runs.compress import compress
from basisprune.runs.folder import OutputFolder
from basisprune.runs.load import Job, prepare_job
from basisprune.runs.network import check_classes
from basisprune.runs.preflight import Answers, _Sample, check_network, preflight, refuse_guessing, refuse_unprunable
from basisprune.runs.settings import configure
from basisprune.tasks import CLASSIFICATION, Predictions, segmentation
from basisprune.transfer.hints import Hints
from basisprune.transfer.model import KeptModel, kept_model, transfer_model


def job(network: nn.Module, **options) -> Job:
    recipe = tiny_recipe(tiny_training(epochs=1))
    config = configure({"recipe": recipe, "keep_head": True, **PREPARED, **options})
    return prepare_job(network, tiny_images(60), config)


def refused(network: nn.Module, message: str, kind: type[BasisPruneError] = ModelError, **options) -> None:
    given = job(network, **options)
    before = copy.deepcopy(given.network.state_dict())
    with pytest.raises(kind, match=message):
        check_network(given, prunes=True, saves=True, callback=NullCallback())
    assert all(torch.equal(value, before[name]) for name, value in given.network.state_dict().items())


class Changed(Own):
    """`change` is what happens to the scores."""

    def __init__(self, change) -> None:
        super().__init__()
        self.change = change

    def forward(self, images: Tensor) -> Tensor:
        return self.change(self, super().forward(images))


def only_in_eval(network: nn.Module, scores: Tensor):
    return (scores, scores) if network.training else scores


def written_over(_network: nn.Module, scores: Tensor) -> Tensor:
    out = scores.exp()
    out += 1
    return out * scores  # exp needs its own output, which is gone


def broken_in_training(network: nn.Module, scores: Tensor) -> Tensor:
    return scores.view(7, 7) if network.training else scores


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (only_in_eval, r"returns tuple in train mode for 2 images; one tensor of scores \(2, 3\)"),
        (lambda _, scores: scores.detach(), "cannot be trained: its output does not depend on its weights"),
        (written_over, "cannot be trained: RuntimeError: .*modified by an inplace operation"),
        (broken_in_training, "does not run in train mode: RuntimeError: shape"),
    ],
)
def test_a_network_that_cannot_be_trained_is_refused(change, message):
    refused(Changed(change), message)


def test_a_network_for_another_number_of_classes_is_refused_by_both_numbers():
    network = transfer_model(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), 10, input_size=16)
    given = prepare_job(network, tiny_images(60), configure({"recipe": tiny_recipe(tiny_training(epochs=1))}))
    with pytest.raises(ModelError, match="distinguishes 10 classes, and the data has 3; build it for 3 classes"):
        check_network(given, prunes=True, saves=True, callback=NullCallback())


def test_weights_that_are_no_numbers_are_refused_by_name():
    network = trained()
    with torch.no_grad():
        network.norm.bias[3] = float("nan")
    given = job(trained())
    given.network.network.norm.bias.data[3] = float("nan")
    with pytest.raises(LayerError, match=r"network\.norm\.bias: holds NaN or infinite values"):
        check_network(given, prunes=True, saves=False, callback=NullCallback())


def test_a_network_that_answers_at_random_is_refused():
    def noisy(_network: nn.Module, scores: Tensor) -> Tensor:
        return nn.functional.dropout(scores, 0.5, training=True)

    refused(Changed(noisy), "the output changes when folded|is the first layer whose output changes", LayerError)


class Odd(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).abs()


def test_layers_that_cannot_be_split_are_refused_by_name():
    network = trained()
    network.middle = Odd(8, 12, 3, stride=2, padding=1)
    refused(network, r"network\.middle: Odd does not compute a plain convolution", LayerError)
    network = trained()
    network.middle.register_forward_hook(lambda *_: None)
    refused(network, r"network\.middle: has hooks, which a rewrite would lose", LayerError)


def flat() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3))


class Frozen(nn.Module):
    """All of whose filters reach the output, and whose only conv is depthwise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, groups=3)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv(images).mean((2, 3))


def test_a_network_with_nothing_to_prune_is_refused():
    refused(flat(), r"nothing to prune in KeptModel: no layer can be split \(network\.1: the classifier", ModelError)
    refused(Frozen(), r"no layer can be split \(network\.conv: depthwise.*, and no filters can go", ModelError)


def test_ratios_ask_for_all_that_they_name_and_a_search_for_what_can_go():
    network = nn.Sequential(nn.Conv2d(3, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    refused(network, "no filters can go", filter_ratio=0.3)
    check_network(job(network), prunes=True, saves=False, callback=NullCallback())
    check_network(job(network, basis_ratio=0.3), prunes=True, saves=False, callback=NullCallback())


def test_frameworks_are_asked_only_for_what_they_prune():
    recipe, model = RECIPES["quick"], tiny_model()
    sample = _Sample.of(job(model))
    for name in ("basis", "l1", "loss+basis", "baseline"):
        refuse_unprunable(model, recipe, find_framework(name), None, sample)


class WithMiddle(Own):
    """`between` is what happens between its convs, with `part`."""

    def __init__(self, between, part: nn.Module | None = None) -> None:
        super().__init__()
        self.between, self.part = between, part

    def forward(self, images: Tensor) -> Tensor:
        x = self.between(self.part, torch.relu(self.first(images)))
        return self.last(torch.relu(self.norm(self.middle(x))).mean((2, 3)))


def without_gradients(_part: nn.Module | None, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x * 1


def checkpointed(part: nn.Module, x: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(part, x, use_reentrant=True)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_network_whose_layers_cannot_be_scored_is_refused():
    refused(WithMiddle(without_gradients), r"network\.middle: no gradient can reach it", LayerError)
    refused(WithMiddle(checkpointed, nn.Conv2d(8, 8, 1)), "cannot be scored: .*set use_reentrant=False")


def test_ratios_that_are_too_much_for_what_can_go_are_refused():
    def made_of_data(part: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, part(x.mean((0, 2, 3))).view(8, 8, 1, 1))

    refused(
        WithMiddle(made_of_data, nn.Linear(8, 64)), "would remove .* but what can go is", TooMuchError, filter_ratio=0.9
    )


def test_layers_that_take_no_part_and_computed_weights_are_no_hindrance():
    network = trained()
    network.spare = nn.Conv2d(3, 40, 3)
    nn.utils.parametrizations.weight_norm(network.middle)
    said: list[str] = []
    callback = NullCallback()
    callback.log = said.append
    options = {
        "recipe": tiny_recipe(tiny_training(epochs=1)),
        "keep_head": True,
        "basis_ratio": 0.3,
        "filter_ratio": 0.2,
    }
    result = compress(network, tiny_images(60), **options, **PREPARED, onnx=False, callback=callback)
    assert "  left as they are, because they take no part in what the network computes: network.spare" in said
    assert 0 < result.chosen.basis_ratio <= 0.3


class Branching(Own):
    """Cannot be written as a graph: what it computes depends on the images."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images * (2 if images.mean() > 9 else 1))


def test_a_network_that_cannot_be_exported_is_refused_if_that_is_asked_for_and_told_otherwise(monkeypatch):
    refused(Branching(), "cannot be exported", onnx=True)
    said: list[str] = []
    callback = NullCallback()
    callback.log = said.append
    monkeypatch.setattr("basisprune.runs.preflight._LONG", 0)
    check_network(job(Branching()), prunes=True, saves=True, callback=callback)
    assert "model.onnx cannot be written for this network" in said[0]
    check_network(job(Branching(), onnx=False), prunes=True, saves=True, callback=callback)
    assert not any("model.onnx" in line for line in said[1:])


def test_a_network_that_no_bundle_can_hold_is_told():
    said: list[str] = []
    callback = NullCallback()
    callback.log = said.append
    check_network(job(Branching()), prunes=True, saves=True, callback=callback)
    assert len(said) == 1
    assert "model/ cannot be written for this network" in said[0]
    check_network(job(trained()), prunes=True, saves=True, callback=callback)
    assert len(said) == 1


def test_compress_refuses_before_anything_is_written(tmp_path):
    with pytest.raises(ModelError, match="nothing to prune"):
        compress(flat(), tiny_images(60), output=tmp_path / "out", keep_head=True, **PREPARED)
    assert list(tmp_path.iterdir()) == []


def test_the_network_stays_as_it_was():
    given = job(trained())
    twin = copy.deepcopy(given.network)
    check_network(given, prunes=True, saves=True, callback=NullCallback())
    assert not differing(given.network, twin)
    assert [p.requires_grad for p in given.network.parameters()] == [p.requires_grad for p in twin.parameters()]


class Segmenter(nn.Sequential):
    def __init__(self, classes: int = 2) -> None:
        super().__init__(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, classes, 1))


def segmenting(network: nn.Module, largest: int = 1, **options) -> Job:
    masks = torch.zeros(4, 8, 8, dtype=torch.long)
    masks[:, 0] = largest
    loaders = Loaders(train=[(torch.ones(4, 1, 8, 8), masks)], val=[(torch.zeros(4, 1, 8, 8), masks)])
    return prepare_job(network, loaders, configure({"task": "segmentation", **options}))


def test_a_network_of_another_task_is_tried_on_a_batch_of_its_own():
    given = segmenting(Segmenter(), basis_ratio=0.3)
    before = copy.deepcopy(given.network.state_dict())
    said: list[str] = []
    callback = NullCallback()
    callback.log = said.append
    check_network(given, prunes=True, saves=True, callback=callback)
    assert said == []  # it can be written as a graph, without its class
    assert all(torch.equal(value, before[name]) for name, value in given.network.state_dict().items())
    with pytest.raises(DataError, match="task segmentation: class 2 in a mask"):
        check_network(segmenting(Segmenter(), largest=2), prunes=True, saves=False, callback=NullCallback())
    with pytest.raises(DataError, match="task segmentation: the network outputs"):
        check_network(
            segmenting(nn.Sequential(nn.Flatten(), nn.Linear(64, 2))), prunes=True, saves=False, callback=NullCallback()
        )


def test_a_task_that_fails_on_the_network_is_refused_by_its_name():
    def outcome(output, _targets):
        return output["missing"]

    for changes, said in (
        ({"outcome": outcome}, "Segmenter cannot be judged for the task mine: "),
        ({"loss": lambda output, targets: output["missing"]}, "Segmenter cannot be trained for the task mine: "),
    ):
        task = replace(segmentation(), name="mine", **changes)
        with pytest.raises(ModelError, match=said):
            check_network(segmenting(Segmenter(), task=task), prunes=True, saves=False, callback=NullCallback())


def test_a_network_of_another_task_that_is_trained_is_not_compared_with_guessing():
    preflight(segmenting(Segmenter(), keep_head=True), None, {})


def start_job(data=None, **options) -> Job:
    config = configure({"recipe": tiny_recipe(tiny_training(epochs=1)), **options})
    return prepare_job(tiny_model(), tiny_images(60) if data is None else data, config)


def refused_start(given: Job, output: Path, kind: type[BasisPruneError], message: str) -> None:
    before = sorted(output.parent.rglob("*")) if output.parent.exists() else []
    with pytest.raises(kind, match=message):
        preflight(given, OutputFolder(output), given.to_dict())
    assert (sorted(output.parent.rglob("*")) if output.parent.exists() else []) == before


def test_a_sound_start_says_nothing_and_writes_nothing(tmp_path):
    preflight(start_job(), OutputFolder(tmp_path / "deep" / "out"), start_job().to_dict())
    preflight(start_job(), None, start_job().to_dict())
    assert list(tmp_path.iterdir()) == []


def test_an_output_in_the_folder_of_the_images_is_refused(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for index in range(6):
            Image.new("RGB", (16, 16), (ord(name), index, 0)).save(tmp_path / "photos" / name / f"{index}.png")
    given = start_job(str(tmp_path / "photos"))
    (tmp_path / "link").symlink_to(tmp_path / "photos")
    for place in ("photos", "photos/out", "photos/a/out", "link/out", "photos/../photos/out"):
        refused_start(given, tmp_path / place, ConfigError, "lies in the folder of the images")
    preflight(given, OutputFolder(tmp_path / "photos-out"), given.to_dict())


def test_packages_that_are_asked_for_and_not_installed_are_named_first(tmp_path, monkeypatch):
    monkeypatch.setattr(basisprune.deploy.export.runtime, "find_spec", lambda _name: None)
    refused_start(start_job(onnx=True), tmp_path / "out", MissingExtraError, r"basisprune\[onnx\]")
    refused_start(start_job(int8=True), tmp_path / "out", MissingExtraError, r"basisprune\[onnx\]")
    for sound in (start_job(), start_job(int8=True, onnx=False)):
        preflight(sound, OutputFolder(tmp_path / "out"), sound.to_dict())
    preflight(start_job(), OutputFolder(tmp_path / "out"), start_job().to_dict())


def test_names_that_are_not_utf_8_are_refused(tmp_path):
    given = start_job()
    splits = given.splits
    odd = Splits(splits.train, splits.val, splits.test, ("\udcff", *NAMES[1:]))
    refused_start(
        Job(given.network, odd, given.config, "m", "d"), tmp_path / "out", DataError, "is not UTF-8; rename its"
    )
    refused_start(
        Job(given.network, splits, given.config, "m", "d\udcff"), tmp_path / "out", ConfigError, "is not UTF-8"
    )
    refused_start(given, tmp_path / "out\udcff", ConfigError, "is not UTF-8")


def test_a_place_that_cannot_be_written_to_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    refused_start(start_job(), tmp_path / "file", CheckpointError, "is a file")
    refused_start(start_job(), tmp_path / "file" / "out", CheckpointError, "is a file")
    refused_start(start_job(), tmp_path / ("x" * 300), ConfigError, "File name too long")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model").symlink_to(tmp_path)
    (tmp_path / "run" / "config.yaml.damaged").write_text("")
    refused_start(start_job(), tmp_path / "run", BundleError, "is a file or a link")
    monkeypatch.setattr(os, "access", lambda *_given: False)
    refused_start(start_job(), tmp_path / "out", ConfigError, "is read-only for you")


def test_a_disk_without_space_is_refused_and_one_with_little_is_told(tmp_path, monkeypatch):
    said: list[str] = []
    callback = NullCallback()
    callback.log = said.append
    usage = namedtuple("usage", "free")
    weights = sum(value.nbytes for value in tiny_model().state_dict().values())
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(5 * weights))
    refused_start(start_job(), tmp_path / "out", ConfigError, "bytes left, and this run needs at least")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(12 * weights))
    preflight(start_job(), OutputFolder(tmp_path / "out"), start_job().to_dict(), callback)
    assert "may need up to" in said[0]


@pytest.mark.parametrize("change", ["half", "double"])
def test_a_network_of_another_precision_is_refused(change, tmp_path):
    given = start_job()
    getattr(given.network, change)()
    refused_start(given, tmp_path / "out", NoModel, r"weights of torch\.float.*pass model\.float\(\)")


def test_a_start_without_gradients_or_with_another_default_is_refused(tmp_path):
    given = start_job()
    for block in (torch.no_grad(), torch.inference_mode()):
        with block:
            refused_start(given, tmp_path / "out", ConfigError, "called without gradients")
    torch.set_default_dtype(torch.float64)
    try:
        refused_start(given, tmp_path / "out", ConfigError, r"default dtype is torch\.float64")
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_device_file_for_another_network_is_refused_at_once(tmp_path):
    path = tmp_path / "device.json"
    path.write_text(invented(wanted_shapes(tiny_model(), (3, 16, 16)), block=2).to_json())
    given = start_job(device=str(path))
    for output in (None, OutputFolder(tmp_path / "out")):
        preflight(given, output, given.to_dict())
    path.write_text(invented(wanted_shapes(tiny_model(), (3, 24, 24)), block=2).to_json())
    refused_start(given, tmp_path / "out", PlanError, "profile it again")
    with pytest.raises(PlanError, match="profile it again"):
        preflight(given, None, given.to_dict())
    path.write_text("{}")
    refused_start(given, tmp_path / "out", ConfigError, "not a table of times")
    path.unlink()
    refused_start(given, tmp_path / "out", ConfigError, r"device\.json: cannot be read")


ORDER = (1, 2, 0)


def splits() -> Splits:
    found = load_data(tiny_images(60), val_fraction=0.5)
    return Splits(found.train, found.val, found.test, NAMES)


def network(order=(0, 1, 2), hints: Hints = HINTS) -> KeptModel:
    return kept_model(trained(order), input_hints=hints)


def judged(model: KeptModel) -> list[str]:
    notes = Notes()
    refuse_guessing(model, splits(), callback=notes)
    return notes.lines


def test_a_network_that_knows_its_images_passes():
    assert judged(network()) == []


def test_classes_in_another_order_are_refused_and_told_from_other_images():
    with pytest.raises(ModelError, match=r"gets 0\.0% of 30 validation images right, and guessing gets 3") as caught:
        judged(network(ORDER))
    assert "with its classes in another order it would get 100.0%" in str(caught.value)
    assert "sorted by name: r, g, b" in str(caught.value)


def test_images_that_are_prepared_in_another_way_are_refused():
    with pytest.raises(ModelError, match=r"prepared in another way: pass the mean, std, size and interpolation"):
        judged(network(hints=Hints((16, 16), (0.0,), (1e4,))))


def test_the_number_of_classes_must_be_that_of_the_data():
    two = load_data(tiny_images(60), val_fraction=0.5)
    odd = Splits(two.train, two.val, two.test, ("a", "b"))
    with pytest.raises(
        ModelError, match=r"distinguishes 3 classes, and the data has 2 \(a, b\); pass the data.*new head"
    ):
        check_classes(network(), odd, None, NullCallback())


def test_names_that_are_known_are_compared():
    notes = Notes()
    for names in (None, NAMES):
        check_classes(network(), splits(), names, notes)
    assert notes.lines == []
    with pytest.raises(ModelError, match="in the order b, g, r, and the data in the order r, g, b"):
        check_classes(network(), splits(), ("b", "g", "r"), notes)
    check_classes(network(), splits(), ("red", "green", "blue"), notes)
    assert notes.lines == ["the network's classes red, green, blue are taken for r, g, b, in this order"]


def outcome(answers, labels, classes=2) -> Answers:
    return Answers.of(Predictions(np.array(answers), np.ones(len(answers)), np.array(labels)), classes)


def test_a_rare_class_does_not_make_a_good_network_look_like_guessing():
    labels = [0] * 190 + [1] * 10
    good = [0] * 188 + [1] * 9 + [0, 1, 1]
    assert not outcome(good, labels).is_guessing
    assert outcome([0] * 200, labels).is_guessing  # 95%, and it knows nothing


def test_too_few_images_decide_only_against_what_is_worse_than_guessing():
    assert not outcome([0, 1], [0, 1]).is_guessing
    assert outcome([1, 0], [0, 1]).is_guessing


def test_another_order_is_known_only_where_it_is_one():
    assert outcome([0, 0, 1, 1], [1, 1, 1, 1]).reordered is None
    assert outcome([0, 1] * 8, [1, 0] * 8).fits_another_order


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 10), st.integers(2, 200), st.integers(0, 10_000))
def test_some_order_that_suits_answers_at_random_is_not_told_of(classes, images, seed):
    said, labels = np.random.default_rng(seed).integers(classes, size=(2, images))
    assert not outcome(said, labels, classes).fits_another_order


def test_nine_images_do_not_tell_of_another_order():
    assert outcome([0, 1, 2] * 3, [1, 2, 0, 1, 2, 0, 2, 0, 1], 3).reordered is None


def test_a_loader_of_ones_own_is_gone_through_as_it_is(monkeypatch):
    class Counted(list):
        passes = 0

        def __iter__(self):
            Counted.passes += 1
            return super().__iter__()

    known = list(PreparedBatches(tiny_images(60, seed=1), SPEC, batch_size=12))
    data = Loaders(train=known, val=Counted(known)).splits(CLASSIFICATION)
    len(data.val)
    monkeypatch.setattr("basisprune.runs.preflight.MOST_IMAGES", 10)
    Counted.passes = 0
    refuse_guessing(network(), data, callback=Notes())
    assert Counted.passes == 1
