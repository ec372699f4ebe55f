"""Laws of folded networks as lists of operations: the same output without an architecture, or a refusal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bundles import refused, same, seal
from torch import Tensor, nn

from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.deploy.fold import fold
from basisprune.errors import LayerError
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
    "is not a method": [step("call_method", name, X) for name in ("__reduce_ex__", "numpy", "apply_", "share_memory_")],
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
