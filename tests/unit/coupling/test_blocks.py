"""Laws of dropping whole residual branches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from basisprune.basis.decompose import decompose
from basisprune.basis.layers import Shift, basis_pairs
from basisprune.coupling.blocks import drop_blocks, find_blocks
from basisprune.errors import PlanError
from basisprune.types import Block


class Branch(nn.Module):
    """x + f(x), or relu(x + f(x))."""

    def __init__(self, width: int, *, rectifies: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.rectifies = rectifies

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.norm(self.conv2(self.conv1(x).relu()))
        return y.relu() if self.rectifies else y


class Scaled(Branch):
    """Not a sum: 2 x + f(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def network(*kinds: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    made = {"plain": lambda: Branch(8, rectifies=False), "relu": lambda: Branch(8, rectifies=True)}
    made["scaled"] = lambda: Scaled(8, rectifies=False)
    blocks = nn.Sequential(*(made[kind]() for kind in kinds))
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), blocks, nn.Conv2d(8, 4, 1), nn.Flatten())
    for norm in (module for module in net.modules() if isinstance(module, nn.BatchNorm2d)):
        nn.init.normal_(norm.bias)
        nn.init.normal_(norm.running_mean)
    return decompose(net.double().eval(), scale_init=1.0), torch.randn(2, 3, 6, 6, dtype=torch.float64)


def test_blocks_are_found_by_what_they_do():
    model, x = network("plain", "relu", "scaled")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert find_blocks(model, x) == (Block("2.0", "2.0.conv2", False), Block("2.1", "2.1.conv2", True))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("kind", ["plain", "relu"])
def test_dropping_a_block_whose_branch_is_zero_changes_nothing(kind):
    model, x = network("plain", kind)
    for parameter in (model[2][1].norm.weight, model[2][1].norm.bias):
        nn.init.zeros_(parameter)
    blocks = find_blocks(model, x)
    small = drop_blocks(model, blocks[1:], {})
    assert len(basis_pairs(small)) == len(basis_pairs(model)) - 2
    assert torch.allclose(small(x), model(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["plain", "relu"])
def test_what_stays_is_the_mean_of_what_the_branch_added(kind):
    model, x = network(kind)
    (block,) = find_blocks(model, x)
    pair, seen = basis_pairs(model)[block.last], []
    handle = pair.scaling.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    features = model[1](model[0](x))
    branch = model[2][0].norm(model[2][0].conv2(model[2][0].conv1(features).relu()))
    handle.remove()
    small = drop_blocks(model, [block], {block.last: tuple(seen[0].mean(dim=(0, 2, 3)).tolist())})
    expected = features + branch.mean(dim=(0, 2, 3), keepdim=True)
    expected = expected.relu() if kind == "relu" else expected
    assert torch.allclose(small[2][0](features), expected, rtol=0, atol=1e-10)
    shift = small[2][0][0] if kind == "relu" else small[2][0]
    assert isinstance(shift, Shift)
    assert shift.bias.dtype == torch.float64


def test_a_block_that_the_model_does_not_have_is_refused():
    model, x = network("plain", "scaled")
    with pytest.raises(PlanError, match="find its blocks again"):
        drop_blocks(model, [Block("2.7", "2.7.conv2")], {})
    with pytest.raises(PlanError, match="does not add a branch"):
        drop_blocks(model, [Block("2.1", "2.1.conv2")], {})
    assert len(find_blocks(model, x)) == 1
