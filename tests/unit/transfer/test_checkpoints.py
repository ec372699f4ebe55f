"""Laws of checkpoints: whatever wrote them, their weights come back; what does not fit is listed, and not loaded."""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import functools
import json
import os
import time
import tracemalloc
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from basisprune.errors import BasisPruneError, ModelError
from basisprune.transfer.checkpoints import Checkpoint, fit_names, load_weights, messages, read_checkpoint, set_weights
from basisprune.transfer.hints import hints_of


def network() -> nn.Module:
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 1), norm=nn.BatchNorm2d(4), head=nn.Linear(4, 2)))


@pytest.fixture
def state():
    torch.manual_seed(3)
    return network().state_dict()


def same(model: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def renamed(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {prefix + name: value for name, value in state.items()}


WRITERS = {
    "plain": lambda state: state,
    "lightning": lambda state: {"epoch": 3, "state_dict": renamed(state, "model."), "optimizer_states": [{}]},
    "compiled": lambda state: {"model_state_dict": renamed(state, "_orig_mod.")},
    "compiled inside": lambda state: {"state_dict": renamed(state, "net._orig_mod.")},
    "parallel": lambda state: {"model": renamed(state, "module."), "args": {"lr": 0.1}},
    "both": lambda state: {"state_dict": renamed(state, "module.network.")},
    "nested": lambda state: {"model": {"state_dict": state}},
    "with a loss": lambda state: {"state_dict": {**renamed(state, "net."), "loss.weight": torch.ones(2)}},
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".pth.tar"])
def test_weights_come_back_from_whatever_wrote_them(writer, suffix, state, tmp_path):
    torch.save(WRITERS[writer](state), tmp_path / f"w{suffix}")
    model = network()
    load_weights(model, tmp_path / f"w{suffix}")
    assert same(model, state)


def test_what_was_decided_is_told(state, tmp_path):
    content = {"state_dict": {**renamed(state, "net."), "loss.weight": torch.ones(2)}, "state_dict_ema": state}
    torch.save(content, tmp_path / "w.ckpt")
    found = read_checkpoint(tmp_path / "w.ckpt")
    assert messages(found, set_weights(network(), found)) == [
        f"the weights are those in {tmp_path / 'w.ckpt'} under 'state_dict', named net....",
        "1 entries there are not the network's: loss.weight",
        f"{tmp_path / 'w.ckpt'} also has averaged weights: --weights-key state_dict_ema takes them",
    ]
    plain = read_checkpoint(tmp_path / "w.ckpt", key="state_dict_ema")
    assert [line for line in messages(plain, set_weights(network(), plain)) if "averaged" in line] == []


def test_averaged_weights_are_taken_if_they_are_asked_for(state, tmp_path):
    averaged = {name: value + 1 for name, value in state.items()}
    torch.save({"state_dict": state, "state_dict_ema": renamed(averaged, "module.")}, tmp_path / "w.pth")
    model = network()
    load_weights(model, tmp_path / "w.pth", key="state_dict_ema")
    assert same(model, averaged)
    with pytest.raises(ModelError, match=r"has no entry 'ema'; its entries are state_dict, state_dict_ema"):
        load_weights(model, tmp_path / "w.pth", key="ema")


def test_entries_that_might_be_meant_are_listed(state, tmp_path):
    torch.save({"generator": state, "critic": state, "epoch": 1}, tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"no state dict.*its entries are generator, critic: name.*--weights-key"):
        load_weights(network(), tmp_path / "w.pt")
    load_weights(network(), tmp_path / "w.pt", key="generator")


def test_all_that_does_not_fit_is_listed_and_nothing_is_loaded(state, tmp_path):
    other = {**renamed(state, "model."), "model.head.weight": torch.zeros(5, 4), "model.more": torch.zeros(1)}
    del other["model.conv.bias"]
    torch.save({"state_dict": other}, tmp_path / "w.ckpt")
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ModelError, match=r"\(from the entry 'state_dict', 'model\.' taken off the names\) do not fit"
    ) as no:
        load_weights(model, tmp_path / "w.ckpt")
    assert no.value.faults == (
        "1 missing: conv.bias",
        "1 of another shape: head.weight is 5x4, wanted 2x4",
        "1 unknown: more",
    )
    assert same(model, before)


def test_many_names_are_counted_and_the_first_are_named(tmp_path):
    save_file({f"x{index}": torch.zeros(1) for index in range(9)}, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"9 unknown: x0, x1, x2, x3, x4, \.\.\.$"):
        load_weights(network(), tmp_path / "w.safetensors")


def test_numbers_of_another_kind_do_not_fit(state, tmp_path):
    save_file({**state, "head.bias": torch.zeros(2, dtype=torch.int64)}, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match=r"head\.bias is of torch\.int64, wanted torch\.float32"):
        load_weights(network(), tmp_path / "w.safetensors")


class Stubborn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.register_load_state_dict_pre_hook(self.refuse)

    @staticmethod
    def refuse(_module, given, prefix, *_more) -> None:
        if float(given[f"{prefix}bias"].sum()) == 2:
            raise ValueError("not these")


def test_a_network_that_refuses_in_the_middle_is_as_it_was(tmp_path):
    model = Stubborn()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    save_file({name: torch.ones_like(value) for name, value in before.items()}, tmp_path / "w.safetensors")
    with pytest.raises(ModelError, match="Stubborn does not take these weights: not these"):
        load_weights(model, tmp_path / "w.safetensors")
    assert same(model, before)


@pytest.mark.parametrize("kind", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_of_hugging_face_is_read_whole_and_in_shards(kind, state, tmp_path):
    save = save_file if kind.endswith("safetensors") else torch.save
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    for folder in (whole, shards):
        folder.mkdir()
    save(state, whole / kind)
    names = sorted(state)
    stem, _, suffix = kind.rpartition(".")
    parts = {f"{stem}-0000{n}-of-00002.{suffix}": names[n - 1 :: 2] for n in (1, 2)}
    for file, inside in parts.items():
        save({name: state[name] for name in inside}, shards / file)
    where = {name: file for file, inside in parts.items() for name in inside}
    (shards / f"{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    for folder in (whole, shards):
        model = network()
        load_weights(model, folder)
        assert same(model, state)
    (shards / f"{kind}.index.json").write_text(json.dumps({"weight_map": {**where, "gone": next(iter(parts))}}))
    with pytest.raises(ModelError, match="1 of its tensors are in none of its files: gone"):
        load_weights(network(), shards)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("[", "cannot be read"),
        ("{}", "'weight_map'.*cannot be read"),
        ('{"weight_map": {"a": 3}}', "'weight_map'.*cannot be read"),
        ('{"weight_map": {"a": "../w.safetensors"}}', "is not a file beside it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "is not a file beside it"),
        ('{"weight_map": {"a": "none.safetensors"}}', "no such file"),
    ],
)
def test_an_index_that_is_wrong_is_refused(index, message, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match=message):
        load_weights(network(), tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"is a folder without model\.safetensors or pytorch_model\.bin"):
        load_weights(network(), tmp_path)


def test_files_that_would_run_code_are_refused_with_the_class_they_need(state, tmp_path):
    torch.save({"state_dict": state, "hyper_parameters": argparse.Namespace(lr=0.1)}, tmp_path / "w.ckpt")
    with pytest.raises(ModelError, match=r"could run code when read \(it needs argparse\.Namespace\); save only"):
        load_weights(network(), tmp_path / "w.ckpt")


def test_files_that_are_none_are_refused(state, tmp_path):
    save_file(state, tmp_path / "w.safetensors")
    whole = (tmp_path / "w.safetensors").read_bytes()
    spoilt = {
        "cut.safetensors": whole[:-9],
        "empty.safetensors": b"",
        "huge.safetensors": (2**62).to_bytes(8, "little") + whole[8:],
        "empty.pt": b"",
        "text.ckpt": b"hello",
    }
    for name, content in spoilt.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "nowhere.pt").symlink_to(tmp_path / "gone.pt")
    (tmp_path / "round.pt").symlink_to(tmp_path / "round.pt")
    os.mkfifo(tmp_path / "pipe.pt")
    for name in (*spoilt, "nowhere.pt", "round.pt", "pipe.pt", "w.h5", "none.pt"):
        with pytest.raises(ModelError, match=r"cannot be read|no such file|of this kind|damaged"):
            load_weights(network(), tmp_path / name)


def test_a_link_to_a_sound_file_is_followed_as_the_cache_of_the_hub_has_it(state, tmp_path):
    save_file(state, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    model = network()
    load_weights(model, tmp_path / "model.safetensors")
    assert same(model, state)


def test_tensors_that_are_not_plain_are_refused(state, tmp_path):
    odd = {"sparse": torch.eye(2).to_sparse(), "without values": torch.zeros(2, device="meta")}
    for what, tensor in odd.items():
        torch.save({**state, "head.bias": tensor}, tmp_path / "w.pt")
        with pytest.raises(ModelError, match=rf"the tensor head\.bias is {what}"):
            load_weights(network(), tmp_path / "w.pt")


def test_what_the_files_beside_the_weights_say_is_known(state, tmp_path):
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "cat", "1": "dog"}}))
    said = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2] * 3, "size": {"shortest_edge": 48}, "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(said))
    hints = read_checkpoint(tmp_path).hints
    assert hints == hints_of(tmp_path)
    assert (hints.size, hints.mean, hints.interpolation) == ((48, 48), (0.5, 0.4, 0.3), "bicubic")
    assert hints.classes == ("cat", "dog")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BasisPruneError, match=r"config\.json: cannot be read"):
        read_checkpoint(tmp_path)


# ------------------------------------------------------------------------------------------- out of proportion


def shared_dicts(levels: int, width: int, leaf: object) -> object:
    made = leaf
    for _ in range(levels):
        made = dict.fromkeys([f"k{number}" for number in range(width)], made)
    return made


def shared_tuples(levels: int) -> bytes:
    """A dict with one key, whose hash takes 2 ** levels steps."""
    return b"\x80\x02}(" + b")q\x00" + b"h\x00h\x00\x86q\x00" * levels + b"K\x01u."


def nested(levels: int) -> bytes:
    return b"\x80\x02" + b"}U\x01a" * levels + b"}" + b"s" * levels + b"."


class Asking:
    """Pickled as a call for a gigabyte, or for as many bytes as a text has, over and over."""

    def __init__(self, *call: object) -> None:
        self.call = call

    def __reduce__(self):
        return self.call[0], tuple(self.call[1:])


def zip_bomb(path) -> None:
    inner = path.with_name("inner.pt")
    torch.save({"conv.weight": torch.zeros(1 << 20)}, inner)
    with zipfile.ZipFile(inner) as read, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name in read.namelist():
            packed.writestr(name, read.read(name))


def dumped(content: object):
    return lambda path: torch.save(content, path)


def legacy(content: object):
    return lambda path: torch.save(content, path, _use_new_zipfile_serialization=False)


def raw(pickled: bytes):
    def write(path) -> None:
        torch.save({}, path)
        with zipfile.ZipFile(path) as read:
            parts = {name: read.read(name) for name in read.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, part in parts.items():
                archive.writestr(name, pickled if name.endswith("data.pkl") else part)

    return write


TEXT = "x" * 1_000_000


def shouted(path) -> None:
    """A pickle that torch finds although its name has capital letters."""
    memo = b"".join(b"h" + bytes([place - 1]) + b"\x86q" + bytes([place]) for place in range(1, 64))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/DATA.PKL", b"\x80\x02})q\x00" + memo + b"K\x01s.")
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")


def two_directories(path) -> None:
    """A file in which torch finds a directory where its end says, and Python one that much behind what lies before."""
    harmless, bomb = b"\x80\x02}.", b"\x80\x02cbuiltins\nbytearray\nJ\x00\x00\x00\x7f\x85R."
    archives = []
    for pickled in (bomb, harmless.ljust(len(bomb), b"\0")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("archive/data.pkl", pickled)
            archive.writestr("archive/version", "3\n")
        archives.append(path.read_bytes())
    path.write_bytes(archives[0][:-22] + archives[1])


def late_directory(path) -> None:
    """A file of torch whose directory says that it lies where another one does."""
    torch.save({"a": torch.zeros(1)}, path)
    content = bytearray(path.read_bytes())
    content[-98 + 48 : -98 + 56] = bytes(8)
    path.write_bytes(content)


BOMBS = {
    "dicts": dumped({"model": shared_dicts(5, 200, torch.zeros(1))}),
    "dicts of old files": legacy({"model": shared_dicts(5, 200, torch.zeros(1))}),
    "lists": dumped({"model": {"a": functools.reduce(lambda made, _: [made] * 50, range(8), [1])}}),
    "tuples that are hashed": raw(shared_tuples(60)),
    "depth": raw(nested(10_000)),
    "compressed": zip_bomb,
    "the same in other letters": shouted,
    "a gigabyte": dumped({"a": Asking(bytearray, 1 << 30)}),
    "a text made bytes": dumped([Asking(codecs.encode, TEXT, "latin1") for _ in range(100)]),
}


@pytest.mark.parametrize("name", ["is_complex", "is_floating_point", "shape", "detach", "layout"])
def test_attributes_in_a_file_do_not_hide_those_of_a_tensor(name, tmp_path):
    model, weights = network(), network().state_dict()
    with contextlib.suppress(AttributeError):  # of those that cannot be hidden
        setattr(weights["conv.weight"], name, 5)
    torch.save(weights, tmp_path / "w.pt")
    load_weights(model, tmp_path / "w.pt")
    assert torch.equal(model.conv.weight, weights["conv.weight"])


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_is_far_larger_than_its_file_is_refused_before_it_is_made(bomb, tmp_path):
    BOMBS[bomb](tmp_path / "w.pt")
    tracemalloc.start()
    started = time.process_time()
    try:
        with pytest.raises(ModelError, match=r"w\.pt: is not read, because it"):
            read_checkpoint(tmp_path / "w.pt")
        assert tracemalloc.get_traced_memory()[1] < 200 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - started < 20


ENDS = {
    "two directories": two_directories,
    "a directory elsewhere": late_directory,
    "a comment": lambda path: (torch.save({}, path), path.write_bytes(path.read_bytes()[:-2] + b"\1\0x")),
    "no directory": lambda path: path.write_bytes(b"PK\3\4"),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_archive_in_which_others_may_find_another_directory_is_refused(name, tmp_path):
    ENDS[name](tmp_path / "w.pt")
    with pytest.raises(ModelError, match=r"w\.pt: cannot be read.*directory"):
        read_checkpoint(tmp_path / "w.pt")


def test_dicts_that_share_dicts_or_hold_themselves_are_walked_once(state, tmp_path):
    shared = shared_dicts(4, 40, 1)
    content = {"state_dict": state, "a": shared, "b": [shared] * 3, "c": [["long"] * 30_000] * 2}
    content["itself"] = content
    torch.save(content, tmp_path / "w.pt")
    model = network()
    load_weights(model, tmp_path / "w.pt")
    assert same(model, state)


def test_a_file_of_very_many_names_is_read_in_time(tmp_path):
    one = torch.zeros(1)
    names = [f"block{number}.weight" for number in range(100_000)] + [".".join("a" * 5000) + ".weight"]
    started = time.process_time()
    wide = {name: torch.zeros(2) for name in ("weight", *(f"l{number}.weight" for number in range(500)))}
    found = fit_names(wide, Checkpoint(tmp_path, dict.fromkeys(names, one)))
    assert found.faults
    assert time.process_time() - started < 10


# ------------------------------------------------------------------------------------------- several networks


def student_and_teacher(state) -> dict[str, torch.Tensor]:
    return {
        **renamed(state, "student."),
        **renamed({name: value + 1 for name, value in state.items()}, "teacher.module."),
    }


@pytest.mark.parametrize("under", [None, "state_dict", "mine"])
def test_of_two_networks_that_fit_none_is_taken_until_it_is_named(under, state, tmp_path):
    both = student_and_teacher(state)
    torch.save(both if under is None else {under: both}, tmp_path / "w.pt")
    key = "mine" if under == "mine" else None
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"2 different networks that fit.*student.*teacher\.module.*--weights-key"):
        load_weights(model, tmp_path / "w.pt", key=key)
    assert same(model, before)
    start = "mine." if key else ""
    load_weights(model, tmp_path / "w.pt", key=f"{start}student")
    assert same(model, state)
    load_weights(model, tmp_path / "w.pt", key=f"{start}teacher")
    assert same(model, {name: value + 1 for name, value in state.items()})
    with pytest.raises(ModelError, match=r"has no entry '.*tutor'"):
        load_weights(model, tmp_path / "w.pt", key=f"{start}tutor")


def test_a_plain_network_beside_another_one_is_not_taken_unasked(state):
    beside = {**state, **student_and_teacher(state)}
    with pytest.raises(ModelError, match=r"different networks that fit.*\(no prefix\), student, teacher"):
        fit_names(state, Checkpoint(Path("w.pt"), beside))


def test_several_copies_of_one_network_are_one(state, tmp_path):
    torch.save({**renamed(state, "student."), **renamed(state, "teacher.")}, tmp_path / "w.pt")
    model = network()
    load_weights(model, tmp_path / "w.pt")
    assert same(model, state)


def test_what_fits_only_in_part_beside_what_fits_is_no_other_network(state, tmp_path):
    half = dict(list(state.items())[:3])
    odd = {name: torch.zeros(7, *value.shape) for name, value in state.items()}
    torch.save({**renamed(state, "net."), **renamed(half, "other."), **renamed(odd, "wide.")}, tmp_path / "w.pt")
    model = network()
    load_weights(model, tmp_path / "w.pt")
    assert same(model, state)


def test_different_weights_in_two_usual_entries_are_told_apart_by_name(state, tmp_path):
    torch.save({"model": state, "net": {name: value + 1 for name, value in state.items()}}, tmp_path / "w.pt")
    with pytest.raises(ModelError, match="in its entries model and net"):
        load_weights(network(), tmp_path / "w.pt")
    model = network()
    load_weights(model, tmp_path / "w.pt", key="model")
    assert same(model, state)


def test_weights_that_are_there_compiled_and_not_are_refused(state):
    with pytest.raises(ModelError, match="compiled and not"):
        fit_names(state, Checkpoint(Path("w.pt"), {**state, **renamed(state, "_orig_mod.")}))


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.EACCES])
def test_faults_of_the_machine_are_none_of_the_file(number, state, tmp_path, monkeypatch):
    torch.save(state, tmp_path / "w.pt")

    def failing(*_args: object, **_options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(torch, "load", failing)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        read_checkpoint(tmp_path / "w.pt")
    assert caught.value.errno == number


class Hiding:
    """Pickled as an OrderedDict with an attribute that hides a method."""

    def __init__(self, content: dict[str, torch.Tensor], name: str) -> None:
        self.content, self.name = content, name

    def __reduce__(self):
        return OrderedDict, (), {self.name: 5}, None, iter(self.content.items())


@pytest.mark.parametrize("name", ["items", "get", "values", "keys"])
def test_attributes_in_a_file_do_not_hide_those_of_a_mapping(name, state, tmp_path):
    torch.save({"state_dict": Hiding(state, name)}, tmp_path / "w.pt")
    model = network()
    load_weights(model, tmp_path / "w.pt")
    assert same(model, state)
