"""Laws of folded networks as lists of operations: the same output without an architecture, or a refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from bundles import refused, same, seal
from networks import NETWORKS
from torch import Tensor, nn
from torch.nn import functional as F

import basisprune
from basisprune.deploy.allowed import set_item
from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.deploy.bundle.steps import from_steps
from basisprune.deploy.comparing import difference
from basisprune.deploy.fold import fold
from basisprune.errors import BundleError, LayerError
from basisprune.transfer.model import transfer_model


def test_a_module_of_which_only_parts_are_left_is_saved_as_a_graph_of_them(tmp_path):
    model = transfer_model(transfer_model("test_resnet", 3, input_size=32).backbone, 3, input_size=32)
    folded, x = fold(model, torch.zeros(2, 3, 32, 32)), torch.randn(2, 3, 32, 32)
    for factory in (None, "test_resnet"):
        folder = save_pretrained(folded, tmp_path / "b", factory=factory)
        assert same(from_pretrained(folder), folded, x)


class Foreign(nn.Module):
    """Does what no list of operations allows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward_features(self, x: Tensor) -> Tensor:
        return torch.special.expm1(self.conv(x))


def test_a_folded_network_that_no_file_can_hold_needs_a_factory(tmp_path):
    folded = fold(transfer_model(Foreign(), 3, input_size=32), torch.zeros(2, 3, 32, 32))
    with pytest.raises(LayerError, match=r"^backbone: calls .*expm1.* pass factory="):
        save_pretrained(folded, tmp_path / "b")
    folder = save_pretrained(folded, tmp_path / "b", factory=f"{__name__}:Foreign")
    assert same(from_pretrained(folder, trust_remote_code=True), folded, torch.randn(2, 3, 32, 32))


def test_a_folded_network_of_a_factory_needs_no_trust(tmp_path, monkeypatch):
    folded = fold(transfer_model("networks:Residual", 3, input_size=16), torch.zeros(2, 3, 16, 16))
    folder = save_pretrained(folded, tmp_path / "b")
    monkeypatch.setattr("importlib.import_module", None)
    loaded = from_pretrained(folder)
    assert loaded.source.backbone == "networks:Residual"
    assert same(loaded, folded, torch.randn(2, 3, 16, 16))


class Busy(nn.Module):
    """Does a bit of all that a list of operations can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 0.5))
        self.register_buffer("shift", torch.ones(8, 1, 1))

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.conv(x) * self.scale + self.shift
        count, channels = x.shape[0], x.size(1)
        halves = torch.chunk(x, 2, dim=1)
        x = torch.cat([halves[1], halves[0].relu()], 1)
        x = x.view(count, channels // 2, 2, x.shape[2], x.shape[3]).transpose(1, 2).flatten(1, 2)
        x = (x.narrow(1, 0, 4).repeat(1, 2, 1, 1) + x.select(1, 0)[:, None].tile(1, 8, 1, 1)).flip(1)
        x = x + x.narrow(1, 0, 4).repeat_interleave(2, 1) - x.amax(1, keepdim=True) - torch.amin(x, 1, keepdim=True)
        x = nn.functional.pad(x, (1, 0, 1, 0), value=float("inf"))[..., 1:, 1:]
        return nn.functional.silu(self.other(x).clamp(min=-2, max=float("inf")) / 3)


def busy_bundle(folder: Path) -> tuple[Path, nn.Module]:
    folded = fold(transfer_model(Busy(), 3, input_size=16), torch.zeros(2, 3, 16, 16))
    return save_pretrained(folded, folder), folded


def test_every_kind_of_operation_comes_back(tmp_path):
    folder, folded = busy_bundle(tmp_path / "b")
    loaded = from_pretrained(folder)
    for size in ((2, 3, 16, 16), (1, 3, 16, 16), (3, 3, 20, 12)):
        assert same(loaded, folded, torch.randn(size))
    again = from_pretrained(save_pretrained(loaded, tmp_path / "again"))
    assert same(again, folded, torch.randn(2, 3, 16, 16))
    assert json.loads((folder / "config.json").read_text())["network"]["graph"]


def step(op: str, target: str, *args: object, **kwargs: object) -> dict[str, object]:
    return {"op": op, "target": target, "args": list(args), "kwargs": kwargs}


X = {"step": 0}
FORBIDDEN = {
    "is not a function": [
        step("call_function", "torch.load", "/etc/passwd"),
        step("call_function", "torch.save", X, "x"),
        step("call_function", "builtins.eval", "1"),
        step("call_function", "operator.methodcaller", "x"),
        step("call_function", "getattr", X, "__class__"),
        step("call_function", "getattr", X),
        step("call_function", "getattr", X, {"step": 0}),
        step("call_function", "getattr", X, ["shape"]),
    ],
    "is not a method": [step("call_method", name, X) for name in ("numpy", "apply_", "share_memory_")],
    "one input comes first": [step("placeholder", "y"), step("output", "output", X)],
    "neither tensor nor number": [
        step("call_function", "operator.mul", [1], 10**9),
        step("call_function", "operator.mul", "a", 10**9),
        step("call_function", "operator.mod", "%999999999d", 1),
    ],
    "becomes too large": [step("call_function", "operator.mul", 10**9, 10**9)],
    "is not a value": [step("call_method", "add", X, {"step": 99}), step("call_method", "add", X, {"code": "x"})],
    "does not make sense": [step("exec", "x"), step("call_method", "a b", X)],
    "has no such module": [step("call_module", "nowhere", X), step("call_module", "", X)],
    "makes a tensor of": [step("call_method", "expand", X, 10**9, 3, 16, 16)],
}


@pytest.mark.parametrize("message", FORBIDDEN)
def test_only_operations_on_tensors_are_done(tmp_path, message):
    original, _ = busy_bundle(tmp_path / "b")
    for number, each in enumerate(FORBIDDEN[message]):
        folder = Path(shutil.copytree(original, tmp_path / str(number)))

        def change(config, each=each):
            steps = config["network"]["graph"]
            config["network"]["graph"] = [steps[0], each, steps[-1] | {"args": [{"step": 1}]}]

        seal(folder, change)
        refused(folder, message)


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
        lambda net, x: doubled(x) if net.training else x,
        lambda _net, x: x * x.shape[0] if int(x.shape[0]) else x,
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


def test_a_step_may_make_a_tensor_but_name_no_device_and_set_no_part_of_anything_else():
    first = {"op": "placeholder", "target": "x", "args": [], "kwargs": {}}
    last = {"op": "output", "target": "output", "args": [{"step": 1}], "kwargs": {}}

    def graph(target, args, **kwargs):
        return from_steps(
            [first, {"op": "call_function", "target": target, "args": args, "kwargs": kwargs}, last], parts
        )

    parts = nn.Module()
    assert len(graph("torch.ones", [[2, 3]], dtype={"dtype": "int64"}).nodes) == 3
    with pytest.raises(BundleError, match="given a device by name"):
        graph("torch.ones", [[2, 3]], device="cuda:0")
    with pytest.raises(BundleError, match="not a value that a bundle may hold"):
        graph("torch.ones", [[2, 3]], dtype={"dtype": "qint8"})
    for held in ({}, [1, 2]):
        with pytest.raises(LayerError, match="setitem is for tensors"):
            set_item(held, 0, 1)
