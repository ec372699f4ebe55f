"""Laws of a bundle's structure: data that builds known layers, and nothing else."""

from __future__ import annotations

import pytest
from bundles import refused, rewrite
from torch import nn

from basisprune.deploy.bundle import from_pretrained, save_pretrained
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
