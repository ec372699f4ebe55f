"""Laws of loading: nothing that a bundle holds is run, unless it is trusted."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bundles import refused, rewrite, seal
from tiny import tiny_model

import basisprune
from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.deploy.fold import fold
from basisprune.errors import ConfigError
from basisprune.transfer.model import transfer_model


@pytest.fixture(scope="module")
def timm_bundle(tmp_path_factory) -> Path:
    folded = fold(transfer_model("test_resnet", 3, input_size=32), torch.zeros(2, 3, 32, 32))
    return save_pretrained(folded, tmp_path_factory.mktemp("timm") / "bundle")


def evil(target: Path) -> str:
    """The name of a module that torch.fx would paste into source."""
    code = f'getattr(__import__("os"),"mkdir")({json.dumps(str(target))})'
    return f'dropout" if [{code}] else "dropout'.replace(".", '"+chr(46)+"')


def test_a_name_never_becomes_code(timm_bundle, tmp_path):
    folder = Path(shutil.copytree(timm_bundle, tmp_path / "b"))
    name = evil(tmp_path / "pwned")

    def change(config):
        structure = config["structure"]
        order = structure.get("order", ["backbone", "pool", "dropout", "classifier"])
        structure["order"] = [name, *order]
        structure.setdefault("children", {})[name] = {"class": "torch.nn.Identity"}
        structure["children"]["dropout"] = {"same": name}

    seal(folder, change)
    refused(folder, "not a name for a part of a network")
    assert not (tmp_path / "pwned").exists()


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """The functions of a module of somebody else's that were called."""
    called: list[str] = []
    module = ModuleType("stranger")
    module.backbone = lambda: called.append("backbone") or tiny_model().backbone
    module.leave = lambda: called.append("leave") or sys.exit(0)
    monkeypatch.setitem(sys.modules, "stranger", module)
    return called


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("insert_norm", [None, True])
def test_what_a_bundle_names_is_imported_only_if_it_is_trusted(saved, calls, traced, insert_norm):
    told = {"backbone": "stranger:backbone", "insert_norm": insert_norm, "traced": traced, "alone": False}
    rewrite(saved, lambda config: config["network"].update(told))
    refused(saved, r"is built by 'stranger:backbone'.*trust_remote_code=True \(--trust-code")
    assert calls == []
    from_pretrained(saved, trust_remote_code=True)
    assert calls


@pytest.mark.parametrize("factory", ["stranger:leave", "no_such_module:x", ".relative:x", "sys:exit", "os:getcwd"])
def test_a_factory_that_ends_the_program_or_is_none_is_an_error_of_ours(saved, calls, factory):
    told = {"backbone": factory, "alone": False}
    rewrite(saved, lambda config: config["network"].update(told))
    refused(saved, "its architecture cannot be built", trust_remote_code=True)


def test_loading_compiles_nothing(timm_bundle, tmp_path, monkeypatch):
    folded = fold(transfer_model("networks:Residual", 3, input_size=16), torch.zeros(2, 3, 16, 16))
    folder = save_pretrained(folded, tmp_path / "b")
    monkeypatch.setattr("torch.fx.graph_module._exec_with_source", None)
    monkeypatch.setattr("torch.fx.graph.Graph.python_code", None)
    for each in (timm_bundle, folder):
        from_pretrained(each)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"folder": 3}, "folder: 3 given"),
        ({"folder": None}, "folder: None given"),
        ({"folder": b"x"}, "folder: b'x' given"),
        ({"folder": ""}, "which cannot be a path"),
        ({"folder": "x/" * 3000}, "which cannot be a path"),
        ({"folder": "~nouser/x"}, "home directory"),
        ({"factory": 3}, "factory: 3 given"),
        ({"revision": ["v1"]}, r"revision: \['v1'\] given"),
        ({"trust_remote_code": "yes"}, "trust_remote_code: 'yes' given"),
    ],
)
def test_arguments_of_wrong_types_are_refused_by_name(saved, given, message):
    with pytest.raises(ConfigError, match=message):
        basisprune.from_pretrained(**{"folder": saved, **given})
