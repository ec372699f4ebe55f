"""What a training learns from a batch of any task."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from basisprune.data import Augment
from basisprune.errors import ConfigError
from basisprune.tasks import segmentation
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import evaluate
from basisprune.training.loop import fit
from basisprune.training.trainer import Session

MASKS = segmentation()
NAMED = segmentation(read=lambda batch: (batch["x"], batch["y"]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 3, 3, padding=1))


def signals(count: int = 24, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 16, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


def as_dicts(data: TensorDataset, size: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"x": inputs, "y": masks} for inputs, masks in DataLoader(data, size)]


def as_list(data: TensorDataset) -> list[tuple[torch.Tensor, ...]]:
    return [(inputs, masks) for inputs, masks in DataLoader(data, 8)]


def test_a_network_is_trained_for_any_task_and_comes_back_the_same_after_a_stop(tmp_path):
    model, data = network(), signals(48)
    config = TrainConfig(epochs=4, lr=0.05, train="all", weight_lr=1.0)
    session = Session(task=NAMED)
    before = evaluate(model, as_dicts(data), task=NAMED)
    whole = fit(model, as_dicts(data), as_dicts(data), config, session=session)
    assert whole.history[-1].val_accuracy > before.accuracy
    assert whole.history[-1].train_accuracy is not None
    stop = Session(task=NAMED, stop=lambda history: len(history) == 2)
    path = tmp_path / "state.pt"
    fit(model, as_dicts(data), as_dicts(data), config, session=stop, checkpoint=path)
    resumed = fit(model, as_dicts(data), as_dicts(data), config, session=session, checkpoint=path)
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name])


def test_a_network_that_computes_its_loss_itself_is_trained_by_it():
    data = signals()
    own = segmentation()
    own = type(own)(
        "own", None, own.outcome, own.metric, model_loss=lambda net, x, y: nn.functional.cross_entropy(net(x), y)
    )
    found = fit(network(), as_list(data), as_list(data), TrainConfig(epochs=2, lr=0.05), session=Session(task=own))
    assert found.history[0].train_accuracy is None  # nobody saw its outputs
    assert found.history[1].train_loss < found.history[0].train_loss


def test_a_teacher_is_followed_if_the_task_says_how_far_away_it_is():
    data, teacher = signals(), network()
    taught = fit(
        network(),
        as_list(data),
        None,
        TrainConfig(epochs=1, distill=1.0, lr=1e-4),
        session=Session(teacher, task=MASKS),
    )
    assert taught.history[0].train_loss == pytest.approx(0, abs=0.2)
    stubborn = type(MASKS)("mine", MASKS.loss, MASKS.outcome, MASKS.metric)
    with pytest.raises(ConfigError, match=r"the task mine does not say how far two outputs are apart"):
        fit(network(), as_list(data), None, TrainConfig(distill=0.5), session=Session(teacher, task=stubborn))


def test_settings_for_images_and_classes_are_refused():
    data = as_list(signals())
    for settings, said in (
        ({"label_smoothing": 0.1}, "label_smoothing: 0.1 given; it is for classification only"),
        ({"augmentation": Augment(mixup=0.2)}, "mixup and cutmix given; they are for classification only"),
        ({"augmentation": Augment(flip=True)}, "it is for images that are read here"),
    ):
        with pytest.raises(ConfigError, match=said):
            fit(network(), data, None, TrainConfig(**settings), session=Session(task=MASKS))
