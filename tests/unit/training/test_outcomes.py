"""What a network does with each example."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from basisprune.basis.decompose import decompose
from basisprune.data import LoaderPart
from basisprune.errors import ConfigError, DataError, TrainingError
from basisprune.importance import basis_loss, score_filters, taylor_scores
from basisprune.tasks import CLASSIFICATION, regression, segmentation
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import evaluate
from basisprune.training.loop import Session, fit
from basisprune.training.outcomes import joined, judge


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 6, 3, padding=1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 3, 3, padding=1))


def signals(count: int = 24, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 2, 16, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())


def as_dicts(data: TensorDataset, size: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"x": inputs, "y": masks} for inputs, masks in DataLoader(data, size)]


MASKS = segmentation()
NAMED = segmentation(read=lambda batch: (batch["x"], batch["y"]))


def test_batches_of_any_form_and_size_say_the_same():
    model, data = network(), signals()
    whole = judge(model, [data.tensors], MASKS)
    assert whole.rows.shape == (24, 9)
    for given, task in ((DataLoader(data, 5), MASKS), (data, MASKS), (as_dicts(data), NAMED)):
        assert np.array_equal(judge(model, given, task).rows, whole.rows)
    found = evaluate(model, as_dicts(data), task=NAMED)
    assert (found.accuracy, found.count, found.metric) == (whole.value, 24, "mean IoU")
    with torch.no_grad():
        wanted = float(MASKS.loss(model.eval()(data.tensors[0]), data.tensors[1]))
    assert found.loss == pytest.approx(wanted, rel=1e-5)


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


def as_list(data: TensorDataset) -> list[tuple[torch.Tensor, ...]]:
    return [(inputs, masks) for inputs, masks in DataLoader(data, 8)]


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
    from basisprune.data import Augment

    data = as_list(signals())
    for settings, said in (
        ({"label_smoothing": 0.1}, "label_smoothing: 0.1 given; it is for classification only"),
        ({"augmentation": Augment(mixup=0.2)}, "mixup and cutmix given; they are for classification only"),
        ({"augmentation": Augment(flip=True)}, "it is for images that are read here"),
    ):
        with pytest.raises(ConfigError, match=said):
            fit(network(), data, None, TrainConfig(**settings), session=Session(task=MASKS))


def test_one_shot_generators_and_no_examples_are_refused():
    with pytest.raises(DataError, match="can be gone through only once"):
        evaluate(network(), iter(as_list(signals())), task=MASKS)
    with pytest.raises(DataError, match="contains no examples"):
        evaluate(network(), [], task=MASKS)
    with pytest.raises(DataError, match="rows of 1 and of 2 numbers"):
        joined(MASKS, [np.zeros((3, 1)), np.zeros((3, 2))])


def test_outputs_that_are_not_finite_are_noticed():
    model = nn.Sequential(nn.Conv1d(2, 1, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten())
    nn.init.constant_(model[0].weight, float("nan"))
    with pytest.raises(TrainingError, match="not finite"):
        judge(model, [(torch.zeros(2, 2, 8), torch.zeros(2))], regression())


def test_scores_read_the_batches_of_a_task():
    data = signals()
    pairs = decompose(network(), scale_init=1.0, basis="loss", batches=as_dicts(data), loss=NAMED)
    plain = [(inputs, masks) for inputs, masks in DataLoader(data, 8)]
    for scores in (taylor_scores, lambda *a, **k: basis_loss(*a, **k).scores):
        assert scores(pairs, as_dicts(data), loss=NAMED) == scores(pairs, plain, loss=nn.functional.cross_entropy)
    for method in ("taylor", "loss", "hrank"):
        named = score_filters(network(), method, ["0"], as_dicts(data), loss=NAMED)
        assert named == score_filters(network(), method, ["0"], plain)


def test_a_classifier_is_judged_on_anybodys_batches():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    batches = [(torch.randn(6, 1, 8, 8), torch.arange(6) % 3)]
    found = evaluate(model, batches)
    assert found == evaluate(model, LoaderPart(batches, CLASSIFICATION))
    logits = model.eval()(batches[0][0])
    assert found.accuracy == pytest.approx(float((logits.argmax(1) == batches[0][1]).float().mean()))
    trained = fit(model, batches, batches, TrainConfig(epochs=2, lr=0.01))
    assert len(trained.history) == 2
