"""Laws of training networks that are not in float32."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny_images, tiny_model, tiny_training

from basisprune.basis.decompose import decompose
from basisprune.importance import score_filters, taylor_scores
from basisprune.training.evaluation import evaluate, predict, single_at_least
from basisprune.training.loop import fit, in_full_precision

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
