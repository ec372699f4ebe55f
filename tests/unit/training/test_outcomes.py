"""What a network does with each example."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from basisprune.data import LoaderPart
from basisprune.errors import DataError, TrainingError
from basisprune.tasks import CLASSIFICATION, regression, segmentation
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import evaluate
from basisprune.training.loop import fit
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


def as_list(data: TensorDataset) -> list[tuple[torch.Tensor, ...]]:
    return [(inputs, masks) for inputs, masks in DataLoader(data, 8)]


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


def test_a_classifier_is_judged_on_anybodys_batches():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    batches = [(torch.randn(6, 1, 8, 8), torch.arange(6) % 3)]
    found = evaluate(model, batches)
    assert found == evaluate(model, LoaderPart(batches, CLASSIFICATION))
    logits = model.eval()(batches[0][0])
    assert found.accuracy == pytest.approx(float((logits.argmax(1) == batches[0][1]).float().mean()))
    trained = fit(model, batches, batches, TrainConfig(epochs=2, lr=0.01))
    assert len(trained.history) == 2
