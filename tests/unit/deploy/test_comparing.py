"""Laws of comparing two forms of a network: whatever differs anywhere is found, and nothing is changed."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple

import pytest
import torch
from networks import NETWORKS
from torch import Tensor, nn

from basisprune.deploy.comparing import alike, difference, varied_inputs

Pair = namedtuple("Pair", ["one", "other"])


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_is_itself_in_both_modes_and_is_not_changed(name: str) -> None:
    model, x = NETWORKS[name]()
    before = copy.deepcopy(model.state_dict())
    assert difference(model, copy.deepcopy(model), x.shape[1:], [x]) is None
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert not model.training


class Sometimes(nn.Module):
    """Does something else under a condition."""

    def __init__(self, when) -> None:
        super().__init__()
        self.layer, self.norm, self.when = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), when

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x))
        return y * 2 if self.when(self, x) else y


CONDITIONS = {
    "training": lambda net, _x: net.training,
    "many images": lambda _net, x: len(x) > 2,
    "a single image": lambda _net, x: len(x) == 1,
    "only positive numbers": lambda _net, x: bool((x >= 0).all()),
    "large images": lambda _net, x: x.shape[-1] > 16,
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_what_differs_now_and_then_is_found(name: str) -> None:
    odd = Sometimes(CONDITIONS[name])
    even = copy.deepcopy(odd)
    even.when = lambda _net, _x: False
    assert difference(odd, even, (3, 16, 16))
    assert difference(even, odd, (3, 16, 16))


def test_what_only_real_inputs_show_is_found() -> None:
    odd = Sometimes(lambda _net, x: bool((x > 50).any()))
    even = copy.deepcopy(odd)
    even.when = lambda _net, _x: False
    assert difference(odd, even, (3, 16, 16)) is None
    assert difference(odd, even, (3, 16, 16), [torch.full((2, 3, 16, 16), 60.0)])


def test_dropout_is_compared_with_the_same_random_numbers_which_are_put_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    state = torch.get_rng_state()
    assert difference(model, copy.deepcopy(model), (4,)) is None
    assert difference(model, nn.Sequential(model[0], nn.Dropout(0.4)), (4,))
    assert torch.equal(state, torch.get_rng_state())


def test_what_the_network_cannot_do_is_not_asked_of_the_other() -> None:
    fixed = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4))
    assert difference(fixed, copy.deepcopy(fixed), (3, 16, 16)) is None
    assert difference(fixed, nn.Flatten(), (3, 16, 16))
    sizes = {tuple(batch.shape) for batch in varied_inputs(fixed, (3, 16, 16))}
    assert len({shape[0] for shape in sizes}) > 2
    assert len({shape[2] for shape in sizes}) == 2


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2).double(), False),
        (torch.ones(2), torch.ones(1, 2), False),
        ({"out": torch.ones(2)}, OrderedDict(out=torch.ones(2)), True),
        ({"out": torch.ones(2)}, {"aux": torch.ones(2)}, False),
        ([torch.ones(2)], (torch.ones(2),), False),
        (Pair(torch.ones(2), None), Pair(torch.ones(2), None), True),
        (Pair(torch.ones(2), None), (torch.ones(2), None), False),
        (torch.ones(2), None, False),
    ],
)
def test_outputs_are_alike_in_numbers_and_in_how_they_are_read(one: object, other: object, same: bool) -> None:
    assert alike(one, other) == same
