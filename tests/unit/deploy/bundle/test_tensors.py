"""Laws of a bundle's tensors: all of them, as they were, and finite."""

from __future__ import annotations

import random

import pytest
import torch
from bundles import damaged_or_equal, refused, rewrite, same, seal
from networks import NETWORKS
from safetensors.torch import load_file
from tiny import tiny_model
from torch import Tensor, nn

from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.deploy.fold import fold


def test_a_folded_network_without_an_architecture_of_its_own_leaves_out_the_statistics(tmp_path):
    model, x = NETWORKS["concat"](dtype=torch.float32)
    folded = fold(model, x)
    folder = save_pretrained(folded, tmp_path / "b", factory="networks:Concat", input_shape=x.shape[1:])
    names = load_file(folder / "model.safetensors").keys()
    assert sorted(name for name in names if "norm" in name) == [
        f"norm{place}.{kind}" for place in (1, 2) for kind in ("bias", "weight")
    ]
    assert same(from_pretrained(folder, trust_remote_code=True), folded, x)


def test_dtype_and_memory_format_are_kept(tmp_path):
    for model in (tiny_model().double(), tiny_model().bfloat16(), tiny_model().to(memory_format=torch.channels_last)):
        loaded = from_pretrained(save_pretrained(model, tmp_path / "b"))
        for one, other in zip(model.parameters(), loaded.parameters(), strict=True):
            assert (one.dtype, one.stride()) == (other.dtype, other.stride())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.register_buffer("mask", torch.ones(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x)) * self.mask


def test_tied_weights_stay_tied_and_hidden_buffers_come_back(tmp_path):
    model = Tied()
    model.mask *= 3
    folder = save_pretrained(model, tmp_path / "b", factory=f"{__name__}:Tied", input_shape=(4,))
    loaded = from_pretrained(folder, trust_remote_code=True)
    assert loaded.two.weight is loaded.one.weight
    assert same(model, loaded, torch.randn(2, 4))
    assert "mask" not in loaded.state_dict()


def first(state: dict[str, Tensor]) -> str:
    return "backbone.0.basis.weight"


TAMPERED = {
    "1 tensors of the network are missing, first backbone.0.basis.weight": lambda state: state.pop(first(state)),
    "extra: the architecture has no such tensor": lambda state: state.update(extra=torch.zeros(3)),
    "does not run": lambda state: state.update({first(state): state[first(state)][:2].clone()}),
    "does not run on an input": lambda state: state.update({first(state): state[first(state)].half()}),
    "holds NaN": lambda state: state[first(state)].fill_(torch.nan),
    "does not output what it did": lambda state: state[first(state)].mul_(1.1),
    "not finite": lambda state: state[first(state)].fill_(torch.inf),
}


@pytest.mark.parametrize("message", TAMPERED)
def test_tensors_that_were_changed_with_their_checksums_are_refused(saved, message):
    rewrite(saved, tensors=TAMPERED[message])
    refused(saved, message)


def test_a_damaged_header_never_loads_silently_wrong_even_with_its_checksum(saved):
    path, draw = saved / "model.safetensors", random.Random(0)
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for _ in range(150):
        damaged = bytearray(whole)
        place = draw.randrange(draw.choice([8, end]))
        damaged[place] = draw.choice([damaged[place] ^ 1 << draw.randrange(8), draw.randrange(256)])
        path.write_bytes(damaged)
        seal(saved)
        damaged_or_equal(saved)
