"""Laws of running a network: its mode comes back, and what are its images."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from basisprune.errors import DataError
from basisprune.torchkit.running import images_of, mode


@pytest.mark.parametrize(
    ("batch", "kind"),
    [
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "torch.uint8 tensor"),
        ((torch.zeros(2, dtype=torch.int64), 1), "torch.int64 tensor"),
        ("images", "str"),
        ([], "list"),
        ({"image": torch.zeros(2)}, "dict"),
    ],
)
def test_batches_that_hold_no_prepared_images_are_refused(batch, kind):
    with pytest.raises(DataError, match=f"a {kind} given"):
        images_of(batch)


def test_images_are_the_batch_or_its_first_part():
    x = torch.randn(2, 3, 4, 4)
    assert images_of(x) is x
    assert images_of((x, torch.zeros(2))) is x
    assert images_of([x]) is x


@pytest.mark.parametrize("training", [False, True])
def test_the_mode_of_every_module_comes_back_even_after_an_error(training):
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout(), nn.ReLU())).train()
    model[1].eval()
    before = [module.training for module in model.modules()]
    with mode(model, training=training):
        assert all(module.training == training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    with pytest.raises(ZeroDivisionError), mode(model, training=training):
        _ = 1 / 0
    assert [module.training for module in model.modules()] == before
