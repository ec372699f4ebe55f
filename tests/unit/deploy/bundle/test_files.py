"""Laws of a bundle's files: written whole or not at all, and damage is noticed."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from pathlib import Path

import pytest
import torch
from bundles import content, damaged_or_equal, half_basis, refused, rewrite, same, seal
from tiny import tiny_decomposed, tiny_model

from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.errors import BundleError


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
