"""Laws of a bundle's structure: data that builds known layers, and nothing else."""

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
from basisprune.errors import BundleError
from basisprune.transfer.model import transfer_model


def test_a_network_whose_parts_have_other_names_than_python_allows_is_refused(tmp_path):
    model = nn.Sequential()
    model.add_module('a" if x else "b', nn.ReLU())
    with pytest.raises(BundleError, match="is not a name for a part of a network"):
        save_pretrained(model, tmp_path / "b", input_shape=(3,))
    assert list(tmp_path.iterdir()) == []


def test_parts_may_have_hyphens_in_their_names(tmp_path):
    model = nn.Sequential()
    model.add_module("block1-0", nn.Linear(3, 2))
    folder = save_pretrained(model, tmp_path / "b", input_shape=(3,))
    assert from_pretrained(folder).get_submodule("block1-0").out_features == 2


def test_another_architecture_is_refused(tmp_path):
    folder = save_pretrained(transfer_model("networks:Residual", 3, input_size=16), tmp_path / "b")
    for factory in ("networks:Concat", "networks:plain"):
        with pytest.raises(BundleError, match="architecture"):
            from_pretrained(folder, factory=factory)
    for factory in ("networks:missing", "no_such_package:f", "resnet_ninety"):
        with pytest.raises(BundleError, match="its architecture cannot be built"):
            from_pretrained(folder, factory=factory)


@pytest.mark.parametrize(
    "node",
    [
        {"class": "os.system", "args": {}},
        {"class": "torch.nn.init", "args": {}},
        {"class": "torch.nn.Linear", "args": {}},
        {"class": "torch.nn.Linear", "args": {"in_features": {"tuple": ["a"], "b": 1}}},
        {"class": "torch.nn.Identity", "args": {}, "attributes": {"_modules": {"tuple": []}}},
        {"class": "torch.nn.Identity", "args": {}, "attributes": {"__class__": "x"}},
        {"same": "nowhere"},
        {"take": "nowhere"},
        {},
        [],
        None,
        3,
    ],
)
def test_a_structure_that_makes_no_sense_is_refused(saved, node):
    rewrite(saved, lambda config: config.update(structure=node))
    refused(saved, r"does not fit|may not|may hold|makes? sense|not a class|no such|not one|no children|missing")


def nested(levels: int, inner: dict[str, object]) -> dict[str, object]:
    """A module that is met twice in one that is met twice, and so on."""
    for _ in range(levels):
        inner = {"class": "torch.nn.Sequential", "order": ["a", "b"], "children": {"a": inner, "b": None}}
    return inner


def test_parts_that_hold_each_other_over_and_over_are_refused(saved):
    node = nested(40, {"class": "torch.nn.Identity"})
    path, part = "dropout", node
    while "children" in part:
        part["children"]["b"] = {"same": f"{path}.a"}
        path, part = f"{path}.a", part["children"]["a"]
    rewrite(saved, lambda config: config["structure"]["children"].update(dropout=node))
    refused(saved, "more than 100,000 parts")
    node = {"class": "torch.nn.Sequential", "order": ["a"], "children": {"a": {"same": "dropout"}}}
    rewrite(saved, lambda config: config["structure"]["children"].update(dropout=node))
    refused(saved, "is inside itself")


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
