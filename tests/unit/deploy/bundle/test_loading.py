"""Laws of loading: nothing that a bundle holds is run, unless it is trusted."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bundles import content, damaged_or_equal, half_basis, refused, rewrite, same, seal
from tiny import tiny_decomposed, tiny_model

import basisprune
from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.deploy.fold import fold
from basisprune.errors import BundleError, ConfigError
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


def test_what_is_not_ours_is_never_replaced(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("config.json", "README.md", "model.safetensors"):
        (other / name).write_text("{}")
        with pytest.raises(BundleError, match="is not a bundle"):
            save_pretrained(tiny_model(), other)
        with pytest.raises(BundleError, match="is a file or a link"):
            save_pretrained(tiny_model(), other / name)
        assert content(other) == {name: b"{}"}
        (other / name).unlink()


def test_files_by_other_names_stay(tmp_path, saved):
    foreign = {".DS_Store": b"x", "notes.txt": b"mine", "sub/photo.png": b"y", "plot.new": b"z"}
    for folder in (saved, tmp_path / "fresh"):
        for name, data in foreign.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        save_pretrained(tiny_model(1), folder)
        assert same(from_pretrained(folder), tiny_model(1), torch.randn(2, 3, 16, 16))
        assert content(folder).keys() == {*foreign, "config.json", "model.safetensors", "plans.json", "README.md"}
        assert {name: (folder / name).read_bytes() for name in foreign} == foreign


def test_a_link_is_not_followed_to_write(tmp_path, saved):
    before = content(saved)
    (tmp_path / "link").symlink_to(saved)
    with pytest.raises(BundleError, match="is a file or a link"):
        save_pretrained(tiny_model(1), tmp_path / "link")
    from_pretrained(tmp_path / "link")
    (saved / "plans.json").rename(tmp_path / "plans.json")
    (saved / "plans.json").symlink_to(tmp_path / "plans.json")
    with pytest.raises(BundleError, match="is a link or a folder"):
        save_pretrained(tiny_model(1), saved)
    assert content(saved) == before


@pytest.mark.parametrize("left", [0, 10, -20])
def test_a_damaged_bundle_can_be_written_anew(saved, left):
    (saved / "config.json").write_bytes((saved / "config.json").read_bytes()[:left])
    save_pretrained(tiny_model(), saved)
    from_pretrained(saved)


def test_a_card_alone_makes_no_bundle(saved):
    for name in ("config.json", "model.safetensors", "plans.json"):
        (saved / name).unlink()
    with pytest.raises(BundleError, match=r"is not a bundle, and saving would replace its README\.md"):
        save_pretrained(tiny_model(), saved)


def test_a_write_that_fails_leaves_the_old_bundle_and_nothing_else(saved, monkeypatch):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def fail(*_):
        raise OSError("the disk is full")

    for name in ("os.fsync", "pathlib.Path.rename"):
        with monkeypatch.context() as patch:
            patch.setattr(name, fail)
            with pytest.raises(OSError, match="the disk is full"):
                save_pretrained(tiny_model(), saved)
        assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
        assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("name", ["model.safetensors", "plans.json"])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    refused(saved, f"{name}: cannot be read")


def test_a_folder_without_a_configuration_is_no_bundle_and_what_it_holds_is_said(saved):
    (saved / "config.json").unlink()
    refused(saved, "is neither a bundle nor a run: it holds README.md, model.safetensors, plans.json")


def test_a_newer_format_is_refused(saved):
    rewrite(saved, lambda config: config.update(basisprune_bundle=4))
    refused(saved, "format 4 is newer than 3.*update basisprune")


@pytest.mark.parametrize("number", [1, 2])
def test_a_bundle_of_an_older_format_is_read(saved, number):
    def change(config):
        config.update(basisprune_bundle=number, architecture=config.pop("network"))
        for key in ("num_classes", "label_names", "pretrained_cfg"):
            del config[key]
        for key in ("alone", "graph") if number == 1 else ():
            del config["architecture"][key]

    rewrite(saved, change)
    assert same(from_pretrained(saved), tiny_decomposed(), torch.randn(2, 3, 16, 16))


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "3", '{"model_type": "bert"}', "[" * 100_000, "\x80"])
def test_another_config_is_refused(saved, text):
    (saved / "config.json").write_bytes(text.encode("latin1"))
    refused(saved, r"config.json: is (damaged|not that of)")


def test_a_checksum_that_is_wrong_is_refused(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(config, indent=4))
    from_pretrained(saved)  # the layout of the text does not matter
    config["metrics"]["accuracy"] = 0.99
    (saved / "config.json").write_text(json.dumps(config))
    refused(saved, "config.json: is damaged or was changed, its checksum is wrong")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "plans.json"])
def test_flipped_cut_and_swapped_bytes_never_load_silently_wrong(saved, name):
    path, draw = saved / name, random.Random(name)
    whole = path.read_bytes()
    for _ in range(150):
        damaged = bytearray(whole)
        one, other = sorted(draw.sample(range(len(whole) + 1), 2))
        kind = draw.choice(["flip", "cut", "cut inside", "swap", "insert", "zero"])
        if kind == "flip":
            damaged[one] ^= 1 << draw.randrange(8)
        elif kind == "cut":
            del damaged[one:]
        elif kind == "cut inside":
            del damaged[one:other]
        elif kind == "swap":
            other = min(other, len(whole) - 1)
            damaged[one], damaged[other] = damaged[other], damaged[one]
        elif kind == "insert":
            damaged[one:one] = draw.randbytes(draw.randint(1, 9))
        else:
            damaged[one:other] = bytes(other - one)
        path.write_bytes(damaged)
        assert damaged_or_equal(saved) or name == "config.json" or bytes(damaged) == whole
    path.write_bytes(whole)
    assert not damaged_or_equal(saved)


def test_what_is_rewritten_without_a_change_is_loaded(saved):
    rewrite(saved)
    assert not damaged_or_equal(saved)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_files_of_two_bundles_do_not_go_together(saved, tmp_path, name, sealed):
    for number, other in enumerate([tiny_decomposed(1), half_basis(tiny_decomposed())[0], tiny_model()]):
        folder = save_pretrained(other, tmp_path / f"other{number}")
        mixed = Path(shutil.copytree(saved, tmp_path / f"mixed{number}"))
        shutil.copyfile(folder / name, mixed / name)
        if sealed:
            seal(mixed)
        with pytest.raises(BundleError):
            from_pretrained(mixed)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b'"\\ud800"', b"[" * 250 + b"]" * 250, b"[" * 10**6, b"{", b"1" * 5000]
)
@pytest.mark.parametrize("name", ["config.json", "plans.json", "model.safetensors"])
def test_what_is_no_text_or_too_deep_is_refused(saved, name, content):
    (saved / name).write_bytes(content)
    refused(saved, name)
    if name != "config.json":
        seal(saved)
        refused(saved, name)


def test_text_in_a_config_that_cannot_be_printed_is_refused(saved):
    rewrite(saved, lambda config: config.update(classes=["a", "b", "\ud800"]))
    refused(saved, "config.json: is damaged, no JSON")


def test_a_pipe_or_a_device_in_the_place_of_a_file_is_refused(saved):
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), listen, os.mkdir):
        (saved / "config.json").unlink()
        make(saved / "config.json")
        refused(saved, r"config.json: cannot be read \(it is a .*, no file\)")
        if (saved / "config.json").is_dir():
            break


def listen(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


def test_a_file_beyond_reason_is_refused_before_it_is_read(saved):
    for name, size in (("config.json", 1 << 40), ("plans.json", 1 << 40), ("model.safetensors", 1 << 42)):
        whole = (saved / name).read_bytes()
        os.truncate(saved / name, size)
        refused(saved, f"{name}: cannot be read .*bytes")
        (saved / name).write_bytes(whole)
