"""Laws of merging the constants that are left of dropped branches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from basisprune.basis.layers import Shift
from basisprune.deploy.fold import fold, merge_shifts


class Sum(nn.Module):
    """Two branches added, then shifted."""

    def __init__(self, *, between: nn.Module) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 3, padding=1)
        self.norm, self.between = nn.BatchNorm2d(6), between
        self.shift = Shift(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(self.between(self.one(x) + self.norm(self.other(x)))).mean(dim=(2, 3))


def made(between: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Sum(between=between).double().eval(), torch.randn(2, 3, 5, 5, dtype=torch.float64)


def test_a_shift_behind_a_sum_goes_into_the_norm_before_it():
    model, x = made(nn.Identity())
    folded = fold(model, x)
    assert isinstance(folded.shift, nn.Identity)
    assert torch.allclose(folded(x), model(x), rtol=0, atol=1e-12)
    assert isinstance(model.shift, Shift)


def test_where_that_would_change_something_the_shift_stays_as_a_plain_layer():
    model, x = made(nn.ReLU())
    folded = fold(model, x)
    assert type(folded.shift) is nn.Conv2d
    assert torch.allclose(folded(x), model(x), rtol=0, atol=1e-12)


def test_a_model_without_shifts_is_left_as_it_is():
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    assert merge_shifts(model, (torch.zeros(1, 3, 4, 4),)) is model
