"""Laws of networks as graphs: a folded network of any class that can be traced stands alone, or is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import timm
import torch
import torchvision
from networks import NETWORKS
from torch import Tensor, nn
from torch.nn import functional as F

import basisprune
from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.deploy.comparing import difference
from basisprune.deploy.fold import fold
from basisprune.errors import BundleError, LayerError


def saved(model: nn.Module, x: Tensor, folder) -> tuple[nn.Module, nn.Module]:
    """The folded network, and what comes back of it when nothing may be imported for it."""
    folded = fold(model, x)
    return folded, from_pretrained(save_pretrained(folded, folder / "b", input_shape=x.shape[1:]))


@pytest.mark.parametrize("name", NETWORKS)
def test_a_folded_network_of_any_class_stands_alone(tmp_path, name):
    model, x = NETWORKS[name]()
    folded, loaded = saved(model, x, tmp_path)
    assert difference(folded, loaded, x.shape[1:], [x]) is None
    assert getattr(loaded, "input_spec", None) is None
    again = from_pretrained(save_pretrained(loaded, tmp_path / "again", input_shape=x.shape[1:]))
    assert difference(folded, again, x.shape[1:]) is None


LIBRARIES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{
        name: (lambda name=name: timm.create_model(name, num_classes=5), 64)
        for name in ("test_resnet", "test_efficientnet", "test_convnext", "test_byobnet")
    },
    "swin": (
        lambda: timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=24, depths=(2, 1), num_heads=(2, 4)
        ),
        64,
    ),
    "shufflenet": (lambda: torchvision.models.shufflenet_v2_x0_5(num_classes=5), 64),
    "mobilenet": (lambda: torchvision.models.mobilenet_v3_small(num_classes=5), 64),
}


@pytest.mark.parametrize("name", LIBRARIES)
def test_networks_of_timm_and_torchvision_stand_alone_once_they_are_folded(tmp_path, name):
    build, side = LIBRARIES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = build().eval(), torch.randn(2, 3, side, side)
    folded, loaded = saved(model, x, tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(x[:1]), folded(x[:1]))


class Skips(nn.Module):
    """Adds what it is given if that is a tensor."""

    def __init__(self, asks) -> None:
        super().__init__()
        self.conv, self.asks = nn.Conv2d(8, 8, 3, padding=1), asks

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        y = self.conv(x)
        return y + skip if self.asks(skip) else y


class Asking(nn.Module):
    """Has code that looks at its inputs; `asks` is what about a tensor, `does` what with the features."""

    def __init__(self, asks=lambda x: isinstance(x, Tensor), does=lambda _net, x: x) -> None:
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 8, 3), Skips(asks), nn.Linear(8, 4)
        self.does = does

    def forward(self, x: Tensor, scale: float | None = None) -> Tensor:
        x = self.does(self, self.stem(x if scale is None else x * scale))
        return self.head(torch.relu(self.block(x, x)).mean((2, 3)))


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: isinstance(x, Tensor),
        lambda x: torch.is_tensor(x),
        lambda x: x is not None,
        lambda x: not isinstance(x, tuple | list),
        lambda x: not isinstance(x, nn.Parameter),
        lambda x: isinstance(x.chunk(2), tuple),
    ],
)
def test_code_that_asks_for_the_type_of_a_tensor_is_written_as_it_runs(tmp_path, asks):
    folded, loaded = saved(Asking(asks), torch.randn(2, 3, 12, 12), tmp_path)
    assert difference(folded, loaded, (3, 12, 12)) is None


@pytest.mark.parametrize(
    "does",
    [
        lambda net, x: F.dropout(x, 0.3, net.training),
        lambda net, x: F.dropout2d(input=x, p=0.3, training=net.training),
        lambda net, x: x + F.dropout(F.dropout(x, training=net.training), training=net.training),
    ],
)
def test_dropout_by_a_function_is_that_in_training_too(tmp_path, does):
    folded, loaded = saved(Asking(does=does), torch.randn(2, 3, 12, 12), tmp_path)
    assert difference(folded, loaded, (3, 12, 12)) is None
    x = torch.randn(2, 3, 12, 12)
    assert not torch.equal(loaded.train()(x), loaded(x))


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.parametrize(
    "does",
    [
        lambda _net, x: doubled(x) if type(x) is Tensor else x,
        lambda _net, x: x if hasattr(x, "anything") else doubled(x),
        lambda net, x: doubled(x) if net.training else x,
        lambda _net, x: doubled(x) if len(x.shape) == 4 and x.shape[0] > 100 else x,
        lambda _net, x: x * float(x.detach().abs().mean()),
        lambda _net, x: x.to(torch.float32) * torch.zeros(8, 1, 1).add_(x.detach().mean()),
    ],
)
def test_what_a_graph_cannot_be_sure_to_do_is_refused_and_nothing_is_written(tmp_path, does):
    with pytest.raises((BundleError, LayerError), match="factory="):
        saved(Asking(does=does), torch.randn(2, 3, 12, 12), tmp_path)
    assert list(tmp_path.iterdir()) == []


class Doubling(Asking):
    def __init__(self) -> None:
        super().__init__(does=lambda _net, x: doubled(x) if type(x) is Tensor else x)


def test_a_network_that_no_graph_can_be_is_saved_by_its_factory(tmp_path):
    folded = fold(Doubling(), torch.randn(2, 3, 12, 12))
    folder = save_pretrained(folded, tmp_path / "b", input_shape=(3, 12, 12), factory=f"{__name__}:Doubling")
    assert difference(folded, from_pretrained(folder, trust_remote_code=True), (3, 12, 12)) is None


def test_inputs_to_compare_on_are_batches(tmp_path):
    with pytest.raises(ValueError, match="check_inputs: 3 given"):
        basisprune.save_pretrained(nn.Conv2d(3, 4, 1), tmp_path / "b", input_shape=(3, 8, 8), check_inputs=3)


def test_the_network_is_compared_on_the_inputs_that_are_given(tmp_path, monkeypatch):
    seen = []
    real = difference
    monkeypatch.setattr(
        "basisprune.deploy.bundle.saving.difference",
        lambda one, other, shape, given=(): seen.append(given) or real(one, other, shape, given),
    )
    batch = torch.randn(5, 3, 8, 8)
    save_pretrained(nn.Sequential(nn.Conv2d(3, 4, 1)), tmp_path / "b", input_shape=(3, 8, 8), check_inputs=[batch])
    assert seen == [[batch]]
