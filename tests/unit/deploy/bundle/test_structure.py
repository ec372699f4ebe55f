"""Laws of a bundle's structure: data that builds known layers, and nothing else."""

from __future__ import annotations

import pytest
import torch
from bundles import refused, rewrite, same

from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.deploy.fold import fold
from basisprune.errors import BundleError, LayerError
from basisprune.transfer.model import transfer_model


def test_a_module_of_which_only_parts_are_left_needs_a_factory(tmp_path):
    model = transfer_model(transfer_model("test_resnet", 3, input_size=32).backbone, 3, input_size=32)
    folded = fold(model, torch.zeros(2, 3, 32, 32))
    with pytest.raises(LayerError, match=r"^backbone: .* pass factory="):
        save_pretrained(folded, tmp_path / "b")
    loaded = from_pretrained(save_pretrained(folded, tmp_path / "b", factory="test_resnet"))
    assert same(loaded, folded, torch.randn(2, 3, 32, 32))


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
    refused(saved, r"does not fit|may not|makes? sense|no class|no such|not one|no children|missing")
