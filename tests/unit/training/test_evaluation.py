"""Laws of measuring how good a network is."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from tiny import differing, tiny_decomposed, tiny_images, tiny_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from basisprune.errors import ConfigError, DataError
from basisprune.tasks import segmentation
from basisprune.training.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("one_thread")


def test_evaluate_counts_every_image_once_and_changes_nothing():
    model = tiny_decomposed().train()
    before = copy.deepcopy(model)
    images = tiny_images(50)
    results = [evaluate(model, images, batch_size=size) for size in (1, 7, 16, 50, 64)]
    assert {result.count for result in results} == {50}
    assert len({result.accuracy for result in results}) == 1
    assert [result.loss for result in results] == pytest.approx([results[0].loss] * 5, rel=1e-5)
    assert not differing(model, before)
    assert all(module.training for module in model.modules())


def test_the_accuracy_is_the_fraction_that_is_right():
    model = tiny_model()
    nn.init.zeros_(model.classifier.weight)
    model.classifier.bias.data = torch.tensor([0.0, 1.0, 0.0])
    result = evaluate(model, tiny_images(48))
    assert result.accuracy == pytest.approx(1 / 3)
    assert result.loss == pytest.approx(math.log(2 + math.e) - 1 / 3, rel=1e-5)


def test_a_task_is_given_by_its_name_or_as_a_value():
    net, images = nn.Conv2d(1, 2, 1), torch.randn(4, 1, 6, 6)
    batches = [(images, (images[:, 0] > 0).long())]
    assert evaluate(net, batches, task="segmentation") == evaluate(net, batches, task=segmentation())
    with pytest.raises(ConfigError, match="Did you mean 'segmentation'"):
        evaluate(net, batches, task="segmentaton")


def test_data_without_images_is_refused():
    empty = DataLoader(TensorDataset(torch.zeros(0, 3, 16, 16), torch.zeros(0).long()))
    with pytest.raises(DataError, match="the data contains no images"):
        evaluate(tiny_decomposed(), empty)
