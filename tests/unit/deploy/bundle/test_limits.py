"""Laws of what a bundle may ask of a machine."""

from __future__ import annotations

import pytest
import torch
from bundles import refused, rewrite
from torch import nn

from basisprune.deploy.bundle.limits import Bounded
from basisprune.errors import BundleError

HUGE = {
    "a tensor of": {"class": "torch.nn.ZeroPad2d", "args": {"padding": {"tuple": [10**6] * 4}}},
    "more than 2,000 operations": {
        "class": "timm.layers.CondConv2d",
        "args": {"in_channels": 1, "out_channels": 1, "num_experts": 10**6},
    },
    "is not a class": {"class": "torch.nn.LSTM", "args": {"input_size": 1, "hidden_size": 1, "num_layers": 10**9}},
    "a tensor of ": {"class": "torch.nn.Linear", "args": {"in_features": 10**6, "out_features": 10**6}},
    "numbers beyond": {"class": "torch.nn.Linear", "args": {"in_features": 10**12, "out_features": 10**12}},
}


@pytest.mark.parametrize("message", HUGE)
def test_a_part_that_would_take_the_whole_machine_is_refused(saved, message):
    def change(config):
        config["structure"]["children"]["dropout"] = HUGE[message]
        config["structure"]["children"]["pool"] = HUGE[message]

    rewrite(saved, change)
    refused(saved, message)


def test_many_parts_that_are_slow_to_make_are_refused(saved):
    slow = {"class": "timm.layers.RotaryEmbeddingMixed"}
    slow["args"] = {"dim": 8, "depth": 1, "num_heads": 1, "feat_shape": [1, 1]}

    def change(config):
        inner = {str(number): slow for number in range(2_000)}
        config["structure"]["children"]["pool"] = {
            "class": "torch.nn.Sequential",
            "children": inner,
            "order": list(inner),
        }

    rewrite(saved, change)
    refused(saved, "operations to build")


def test_work_is_counted_before_it_is_done():
    weight = torch.empty(1 << 14, 1 << 14, device="meta")

    def work() -> None:
        with Bounded():
            for _ in range(100):
                weight @ weight

    with pytest.raises(BundleError, match="floating-point operations"):
        work()


def test_what_is_allowed_gives_what_it_gives():
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), torch.randn(2, 3, 8, 8)
    with Bounded() as bounded:
        output = model(x)
    assert torch.equal(output, model(x)) or model.training
    assert bounded.operations >= 3
