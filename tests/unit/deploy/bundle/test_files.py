"""Laws of a bundle's files: written whole or not at all, and damage is noticed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from bundles import damaged_or_equal, half_basis, refused, rewrite, same, seal
from tiny import tiny_decomposed, tiny_model

from basisprune.deploy.bundle import from_pretrained, save_pretrained
from basisprune.errors import BundleError


def test_only_a_bundle_or_an_empty_folder_is_replaced(tmp_path, saved):
    empty = tmp_path / "empty"
    empty.mkdir()
    save_pretrained(tiny_model(), empty)
    save_pretrained(tiny_model(1), saved)
    assert same(from_pretrained(saved), tiny_model(1), torch.randn(2, 3, 16, 16))
    (saved / "notes.txt").write_text("mine")
    with pytest.raises(BundleError, match=r"holds notes.txt"):
        save_pretrained(tiny_model(), saved)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    with pytest.raises(BundleError, match="is no bundle"):
        save_pretrained(tiny_model(), other)
    with pytest.raises(BundleError, match="is a file or a link"):
        save_pretrained(tiny_model(), other / "config.json")


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


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "plans.json"])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    refused(saved, f"{name}: cannot be read")


def test_a_newer_format_is_refused(saved):
    rewrite(saved, lambda config: config.update(basisprune_bundle=2))
    refused(saved, "format 2 is newer than 1.*update basisprune")


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
