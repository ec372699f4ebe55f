"""Laws of a rehearsal: what a network's structure would fail at later is refused first, by its reason."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.utils.checkpoint
from tiny import differing, tiny_images, tiny_model, tiny_recipe, tiny_training
from torch import Tensor, nn
from trained import PREPARED, Own, trained

from basisprune.callback import NullCallback
from basisprune.data import Loaders
from basisprune.errors import BasisPruneError, DataError, LayerError, ModelError, TooMuchError
from basisprune.recipes import RECIPES, find_framework
from basisprune.runs import rehearsal
from basisprune.runs.compress import compress
from basisprune.runs.job import Job, prepare_job
from basisprune.runs.rehearsal import refuse_unprunable, rehearse
from basisprune.runs.settings import configure
from basisprune.runs.start import check_start
from basisprune.tasks import segmentation
from basisprune.transfer.model import transfer_model


def job(network: nn.Module, **options) -> Job:
    recipe = tiny_recipe(tiny_training(epochs=1))
    config = configure({"recipe": recipe, "keep_head": True, **PREPARED, **options})
    return prepare_job(network, tiny_images(60), config)


def refused(network: nn.Module, message: str, kind: type[BasisPruneError] = ModelError, **options) -> None:
    given = job(network, **options)
    before = copy.deepcopy(given.network.state_dict())
    with pytest.raises(kind, match=message):
        rehearse(given, prunes=True, saves=True, callback=NullCallback())
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
        rehearse(given, prunes=True, saves=True, callback=NullCallback())


def test_weights_that_are_no_numbers_are_refused_by_name():
    network = trained()
    with torch.no_grad():
        network.norm.bias[3] = float("nan")
    given = job(trained())
    given.network.network.norm.bias.data[3] = float("nan")
    with pytest.raises(LayerError, match=r"network\.norm\.bias: holds NaN or infinite values"):
        rehearse(given, prunes=True, saves=False, callback=NullCallback())


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
    rehearse(job(network), prunes=True, saves=False, callback=NullCallback())
    rehearse(job(network, basis_ratio=0.3), prunes=True, saves=False, callback=NullCallback())


def test_frameworks_are_asked_only_for_what_they_prune():
    recipe, model = RECIPES["quick"], tiny_model()
    for name in ("basis", "l1", "loss+basis", "baseline"):
        refuse_unprunable(model, recipe, find_framework(name))


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
    assert "  network.spare stays as it is: it takes no part in what the network computes" in said
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
    monkeypatch.setattr(rehearsal, "_LONG", 0)
    rehearse(job(Branching()), prunes=True, saves=True, callback=callback)
    assert "model.onnx cannot be written for this network" in said[0]
    rehearse(job(Branching(), onnx=False), prunes=True, saves=True, callback=callback)
    assert not any("model.onnx" in line for line in said[1:])


def test_a_network_that_no_bundle_can_hold_is_told():
    said: list[str] = []
    callback = NullCallback()
    callback.log = said.append
    rehearse(job(Branching()), prunes=True, saves=True, callback=callback)
    assert len(said) == 1
    assert "model/ cannot be written for this network" in said[0]
    rehearse(job(trained()), prunes=True, saves=True, callback=callback)
    assert len(said) == 1


def test_compress_refuses_before_anything_is_written(tmp_path):
    with pytest.raises(ModelError, match="nothing to prune"):
        compress(flat(), tiny_images(60), output=tmp_path / "out", keep_head=True, **PREPARED)
    assert list(tmp_path.iterdir()) == []


def test_the_network_stays_as_it_was():
    given = job(trained())
    twin = copy.deepcopy(given.network)
    rehearse(given, prunes=True, saves=True, callback=NullCallback())
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
    rehearse(given, prunes=True, saves=True, callback=callback)
    assert said == []  # it can be written as a graph, without its class
    assert all(torch.equal(value, before[name]) for name, value in given.network.state_dict().items())
    with pytest.raises(DataError, match="task segmentation: class 2 in a mask"):
        rehearse(segmenting(Segmenter(), largest=2), prunes=True, saves=False, callback=NullCallback())
    with pytest.raises(DataError, match="task segmentation: the network outputs shape"):
        rehearse(
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
            rehearse(segmenting(Segmenter(), task=task), prunes=True, saves=False, callback=NullCallback())


def test_a_network_of_another_task_that_is_trained_is_not_compared_with_guessing():
    check_start(segmenting(Segmenter(), keep_head=True), None, {})
