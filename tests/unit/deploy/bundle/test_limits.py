"""Laws of what a bundle may ask of a machine."""

from __future__ import annotations

import pytest
import torch
from bundles import refused, rewrite
from torch import nn
from torch.nn import functional as F

from basisprune.deploy.bundle import save_pretrained
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


def refusal(call, *, work: int = 10**15, memory: int = 1 << 40) -> str:
    """What is said of a call before it is made, within these bounds."""
    with torch.no_grad(), Bounded(work=work, memory=memory, largest=1 << 40):
        try:
            call()
        except BundleError as error:
            return str(error)
    return ""


SLOW_CONVS = {
    "float64": lambda: F.conv2d(torch.zeros(1, 1, 99, 99).double(), torch.zeros(1, 1, 20, 20).double()),
    "float16": lambda: F.conv2d(torch.zeros(1, 1, 99, 99).half(), torch.zeros(1, 1, 20, 20).half()),
    "groups": lambda: F.conv2d(torch.zeros(1, 2, 99, 99).double(), torch.zeros(2, 1, 20, 20).double(), groups=2),
    "transposed": lambda: F.conv_transpose2d(torch.zeros(1, 1, 80, 80).half(), torch.zeros(1, 1, 20, 20).half()),
    "volumes": lambda: F.conv3d(torch.zeros(1, 1, 2, 20, 2000), torch.zeros(1, 1, 1, 9, 300)),
}


@pytest.mark.parametrize("name", SLOW_CONVS)
def test_what_a_conv_writes_down_for_a_product_of_matrices_is_counted(name):
    assert "memory at a time" in refusal(SLOW_CONVS[name], memory=4 << 20)
    assert "floating-point operations" in refusal(SLOW_CONVS[name], work=10**9)


def test_a_conv_that_a_library_has_is_not_written_down():
    images, weight = torch.zeros(1, 8, 64, 64), torch.zeros(8, 8, 9, 9)
    assert refusal(lambda: F.conv2d(images, weight), work=10**9, memory=4 << 20) == ""
    assert refusal(lambda: F.conv2d(images.double(), weight.double()), memory=4 << 20) != ""
    assert refusal(lambda: F.conv2d(images.double(), weight[..., :1, :1].double()), memory=4 << 20) == ""


def test_what_is_expanded_is_copied_by_what_reads_it():
    long = torch.zeros(1, 1).expand(1000, 1000)
    assert refusal(lambda: long.amax(), memory=3 << 20) != ""
    assert refusal(lambda: long.contiguous().amax(), memory=9 << 20) == ""


def test_products_in_float16_are_slow_where_numbers_do_not_lie_in_a_row():
    matrix = torch.zeros(64, 128, dtype=torch.float16)
    assert refusal(lambda: matrix @ matrix.T, work=10**7) == ""
    assert refusal(lambda: matrix[:, ::2] @ matrix[:, ::2].T, work=10**7) != ""


def test_a_small_file_of_slow_convs_is_refused_while_it_is_loaded(tmp_path):
    model = nn.Sequential(*[nn.Conv2d(1, 1, 20, padding=10) for _ in range(4)]).double().eval()
    folder = save_pretrained(model, tmp_path / "b", input_shape=(1, 40, 40))
    rewrite(folder, lambda config: config["input"].update(shape=[1, 1400, 1400]))
    refused(folder, "memory at a time|floating-point operations")
