from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
import torchvision
from classifiers import Tiny, refused
from huggingface_hub import PyTorchModelHubMixin
from networks import NETWORKS
from safetensors.torch import save_file
from torch import nn

from basisprune.errors import ModelError
from basisprune.transfer.backbones import build_backbone, own_factory
from basisprune.transfer.model import transfer_model


@pytest.mark.parametrize("kind", ["safetensors", "pth", "bin", "nested", "parallel"])
def test_weights_come_back_from_a_file(kind: str, tmp_path: Path) -> None:
    source = timm.create_model("mobilenetv3_small_050", num_classes=7)
    state = source.state_dict()
    path = tmp_path / f"w.{kind if kind in ('safetensors', 'bin') else 'pth'}"
    if kind == "safetensors":
        save_file(state, path)
    else:
        wrapped = {
            "nested": {"epoch": 3, "state_dict": state},
            "parallel": {"model": {f"module.{k}": v for k, v in state.items()}},
        }
        torch.save(wrapped.get(kind, state), path)
    model = transfer_model("mobilenetv3_small_050", 5, weights=path, input_size=64)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = source.eval().forward_features(x).mean((2, 3))
    torch.testing.assert_close(model.forward_features(x), expected)


def test_weights_of_the_body_alone_are_enough(tmp_path: Path) -> None:
    network, _ = NETWORKS["vgg_like"]()
    state = {key: value + 1 for key, value in network[:5].state_dict().items()}
    save_file(state, tmp_path / "w.safetensors")
    model = transfer_model(network, 5, weights=tmp_path / "w.safetensors", input_size=12)
    assert torch.equal(model.backbone[0].weight, network[0].weight + 1)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


def test_a_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"conv.weight": Bomb(tmp_path / "boom")}, tmp_path / "w.pth")
    refused("objects other than tensors.*save only the state dict", Tiny(), weights=tmp_path / "w.pth")
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("suffix", ["safetensors", "pth"])
def test_a_truncated_file_is_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"w.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(Tiny().state_dict(), path)
    path.write_bytes(path.read_bytes()[:-200])
    refused("cannot be read, perhaps damaged or cut off", Tiny(), weights=path)


def test_a_file_whose_pickle_is_damaged_is_refused(tmp_path: Path) -> None:
    torch.save(Tiny().state_dict(), tmp_path / "whole.pth")
    with zipfile.ZipFile(tmp_path / "whole.pth") as whole, zipfile.ZipFile(tmp_path / "w.pth", "w") as damaged:
        for name in whole.namelist():
            is_pickle = name.endswith("data.pkl")
            damaged.writestr(name, b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R." if is_pickle else whole.read(name))
    refused("cannot be read, perhaps damaged.*missing 6 required", Tiny(), weights=tmp_path / "w.pth")


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    state = {"conv.weight": torch.zeros(6, 3, 5, 5), "conv2.weight": torch.zeros(1)}
    save_file(state, tmp_path / "w.safetensors")
    path = tmp_path / "w.safetensors"
    with pytest.raises(ModelError, match="weights do not fit Tiny; pass the file that belongs") as caught:
        transfer_model(Tiny(), 3, weights=path)
    assert caught.value.faults == (
        "1 missing: conv.bias",
        "1 of another shape: conv.weight is 6x3x5x5, wanted 6x3x3x3",
        "1 unknown: conv2.weight",
    )


def test_files_of_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "w.h5").touch()
    torch.save({"epoch": 3}, tmp_path / "w.pth")
    refused("no such file", Tiny(), weights=tmp_path / "none.pth")
    refused("of this kind are not read; allowed are .safetensors", Tiny(), weights=tmp_path / "w.h5")
    refused("contains no state dict", Tiny(), weights=tmp_path / "w.pth")


def test_a_misspelt_name_is_met_with_the_nearest_ones() -> None:
    refused(r"no model 'resnet5O'\. Did you mean .*'resnet50'", "resnet5O")
    refused(r"no model 'qqqqqqqqqqqq'\. See timm.list_models", "qqqqqqqqqqqq")


def test_a_failed_download_names_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> nn.Module:
        raise OSError("no route to host")

    monkeypatch.setattr(timm, "create_model", offline)
    refused("resnet18: no pretrained weights could be loaded: OSError: no route.*weights=", "resnet18", pretrained=True)
    refused("resnet18: timm cannot build it: OSError", "resnet18")


def test_pretrained_is_for_timm_names() -> None:
    refused("pretrained=True is for timm names and torchvision:NAME, and a Tiny is none", Tiny(), pretrained=True)
    refused("'torchvision.models:resnet18' is none", "torchvision.models:resnet18", pretrained=True)


@pytest.fixture
def zoo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("a_zoo")
    vars(module).update(tiny=Tiny, ready=Tiny(), number=lambda: 3, wants=lambda size: size, constant=3, leave=sys.exit)
    monkeypatch.setitem(sys.modules, "a_zoo", module)
    return module


@pytest.mark.usefixtures("zoo")
def test_a_factory_is_called() -> None:
    assert isinstance(transfer_model("a_zoo:tiny", 5, input_size=16).backbone, Tiny)


@pytest.mark.usefixtures("zoo")
@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("a_zo:tiny", "cannot import a_zo: No module named"),
        ("a_zoo:large", "a_zoo has no 'large'"),
        ("a_zoo:constant", "'a_zoo:constant' is a int; write"),
        ("a_zoo:ready", "'a_zoo:ready' is a Tiny; write .*a function that builds the network"),
        ("a_zoo:number", "returned int; it must return a torch.nn.Module"),
        ("a_zoo:wants", "calling it without arguments failed: TypeError"),
        (":tiny", "is not a factory; write"),
        ("a_zoo:", "is not a factory; write"),
        (".rel:x", "is not a factory; write"),
        ("a_zoo:x.y", "is not a factory; write"),
        ("a_zoo:leave", "calling it without arguments failed: it ends the program"),
    ],
)
def test_a_factory_that_is_none_is_refused(reference: str, message: str) -> None:
    refused(message, reference)


@pytest.mark.parametrize(("line", "message"), [("1 / 0", "ZeroDivisionError"), ("exit(0)", "it ends the program")])
def test_a_module_that_fails_when_it_is_imported_is_refused(
    line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_zoo.py").write_text(f"{line}\n")
    monkeypatch.syspath_prepend(tmp_path)
    refused(f"cannot import broken_zoo: {message}", "broken_zoo:tiny")


def test_what_is_neither_name_nor_network_is_refused() -> None:
    refused("int given; a timm name", 3)


def test_a_network_that_cannot_be_copied_is_refused() -> None:
    network = Tiny()
    network.cache = Lock()
    refused("Tiny cannot be copied.*factory", network)


class Noting(nn.Module):
    """A class whose objects tell most of what they were built with."""

    def __init__(
        self, width: int, depth: int = 2, *rest: int, pretrained: bool = True, weights: str = "imagenet"
    ) -> None:
        super().__init__()
        self.width = width
        self.depth = depth


class Mixed(nn.Module, PyTorchModelHubMixin):
    """A class that huggingface_hub notes the arguments of, those of **options too."""

    def __init__(
        self, width: int, encoder_weights: str | None = "imagenet", names: tuple[str, ...] = (), **options: int
    ):
        super().__init__()


def test_a_network_tells_what_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ModuleType("a_library")
    for kind in (Noting, Mixed):
        monkeypatch.setattr(kind, "__module__", "a_library")
        setattr(place, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, "a_library", place)
    assert own_factory(Noting(8)) == "a_library:Noting(width=8, pretrained=False, weights=None)"
    assert own_factory(Noting(8, 3)) == "a_library:Noting(width=8, depth=3, pretrained=False, weights=None)"
    wanted = "a_library:Mixed(width=4, encoder_weights=None, extra=5)"
    assert own_factory(Mixed(4, extra=5)) == wanted
    assert own_factory(Mixed(4, None, (), extra=5)) == wanted
    named = build_backbone("a_library:Noting(width=6)")
    assert (named.width, own_factory(named)) == (6, "a_library:Noting(width=6)")
    assert own_factory(timm.create_model("test_resnet", num_classes=3)) == "test_resnet"


def test_a_network_that_does_not_tell_is_not_guessed() -> None:
    del (hidden := Noting(8)).width
    assert own_factory(hidden) is None
    assert own_factory(torchvision.models.resnet18()) is None
    assert own_factory(nn.Sequential()) is None
    assert own_factory(type("Local", (nn.Module,), {})()) is None
