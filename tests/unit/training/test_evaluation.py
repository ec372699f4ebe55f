"""Laws of measuring how good a network is."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from tiny import differing, tiny_decomposed, tiny_images, tiny_model, tiny_training
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from basisprune.basis.decompose import decompose
from basisprune.data import LoaderPart
from basisprune.errors import ConfigError, DataError, TrainingError
from basisprune.importance import score_filters, taylor_scores
from basisprune.tasks import CLASSIFICATION, regression, segmentation
from basisprune.training.config import TrainConfig
from basisprune.training.evaluation import evaluate, judge, predict, single_at_least
from basisprune.training.loop import fit, in_full_precision

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
        MASKS.outcomes([np.zeros((3, 1)), np.zeros((3, 2))])


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


def test_predictions_and_evaluation_agree_on_every_image():
    model, images = tiny_model(), tiny_images(48)
    said, found = predict(model, images, batch_size=7), evaluate(model, images, batch_size=16)
    assert said.value == pytest.approx(found.accuracy)
    assert np.array_equal(said.labels, images.labels)
    assert np.array_equal(said.hits, said.classes == said.labels)
    assert ((said.probabilities > 1 / 3 - 1e-6) & (said.probabilities <= 1)).all()
    assert np.array_equal(judge(model, images, CLASSIFICATION, batch_size=7).rows, said.rows)


def test_a_network_that_diverged_says_nothing_for_sure():
    model = tiny_model()
    nn.init.constant_(model.classifier.weight, math.nan)
    assert not predict(model, tiny_images(6)).probabilities.any()


DTYPES = [torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_network_is_trained_in_any_precision_and_keeps_it(dtype):
    model = decompose(tiny_model()).to(dtype)
    trained = fit(model, tiny_images(), tiny_images(), tiny_training()).model
    assert {part.dtype for part in trained.parameters()} == {dtype}
    assert {part.dtype for part in trained.buffers() if part.is_floating_point()} == {dtype}
    assert {part.dtype for part in model.parameters()} == {dtype}
    before, after = model.classifier.weight, trained.classifier.weight
    assert not torch.equal(before, after)
    assert evaluate(trained, tiny_images()).count == len(predict(trained, tiny_images()).labels) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_those_of_training_in_single_precision_but_for_rounding(dtype):
    model = tiny_model().to(dtype)
    expected = fit(model.float(), tiny_images(), None, tiny_training()).model
    found = fit(model.to(dtype), tiny_images(), None, tiny_training(), inplace=True).model
    assert found is model
    tolerance = 1e-5 if dtype == torch.float64 else 2 * torch.finfo(dtype).eps
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


def test_a_network_has_its_precision_back_when_training_fails():
    model = tiny_model().bfloat16()

    def fail() -> None:
        with in_full_precision(model):
            assert {part.dtype for part in model.parameters()} == {torch.float32}
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        fail()
    assert {part.dtype for part in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["taylor", "hrank", "loss"])
def test_scores_take_prepared_images_whatever_the_precision(dtype, method):
    model = decompose(tiny_model()).to(dtype)
    batches = [(torch.randn(4, *model.input_spec.shape), torch.tensor([0, 1, 2, 0]))]
    assert taylor_scores(model, batches).layers
    layers = [name for name, module in model.named_modules() if name.endswith("scaling")][:1]
    assert len(score_filters(model, method, layers, batches).layers) == 1


def test_a_loss_has_the_digits_of_single_precision_at_least():
    assert single_at_least(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32
    assert single_at_least(torch.zeros(1, dtype=torch.float64)).dtype == torch.float64
