"""Laws of writing: all or nothing, and nothing left beside it."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import basisprune.files
from basisprune.errors import CheckpointError, ConfigError
from basisprune.files import (
    atomic,
    checked,
    clear_leftovers,
    csv_rows,
    current,
    locked,
    parse_json,
    read_bytes,
    read_checked,
    replacing,
    sound_or_aside,
    sync,
    user_path,
    write_checked,
    write_text,
    write_together,
)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


@given(text=st.text())
def test_text_comes_back_as_it_was_written(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "new" / "folder" / "file.txt"
    write_text(path, text)
    assert path.read_bytes().decode() == text
    assert names(path.parent) == ["file.txt"]


def write_half(path: Path) -> None:
    with atomic(path) as file:
        file.write(b"half of")
        file.flush()
        raise KeyboardInterrupt


@pytest.mark.parametrize("before", [None, "old"])
def test_a_block_that_fails_leaves_what_was_there(tmp_path, before):
    path = tmp_path / "file.txt"
    if before is not None:
        path.write_text(before)
    with pytest.raises(KeyboardInterrupt):
        write_half(path)
    assert names(tmp_path) == ([] if before is None else ["file.txt"])
    assert before is None or path.read_text() == before


def test_what_writes_by_name_gets_a_hidden_path_with_the_suffix_beside_the_old_file(tmp_path):
    path = tmp_path / "program.pt2"
    with replacing(path) as partial:
        assert (partial.parent, partial.suffix, partial.name[0]) == (tmp_path, ".pt2", ".")
        partial.write_bytes(b"whole")
        assert not path.exists()
    assert names(tmp_path) == ["program.pt2"]


def test_a_block_that_writes_nothing_replaces_nothing(tmp_path):
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(FileNotFoundError), replacing(path):
        pass
    assert path.read_text() == "old"


def test_two_writers_at_once_do_not_meet(tmp_path):
    path = tmp_path / "file.txt"
    with atomic(path) as first, atomic(path) as second:
        first.write(b"first")
        second.write(b"second")
    assert path.read_text() == "first"
    assert names(tmp_path) == ["file.txt"]


def test_files_and_folders_can_be_brought_to_the_disk(tmp_path):
    sync(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync(tmp_path / "none")


# ------------------------------------------------------------------------------- killed at any moment

OLD, NEW = {"a.txt": b"old a", "b.txt": b"old b"}, {"a.txt": b"new a", "b.txt": b"new b"}
KILLED = """
import os, signal, sys
from pathlib import Path
from basisprune.files import write_checked, write_together

folder, stop = Path(sys.argv[1]), int(sys.argv[2])
count = 0

def watch(event, args):
    global count
    touches = event in ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "shutil.rmtree")
    if touches and str(folder) in str(args[0]):
        count += 1
        if count == stop:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(watch)
"""


def killed_at(stop: int, folder: Path, work: str) -> bool:
    """Whether a process that does the work is killed before it ends: at its file operation of number `stop`."""
    environment = os.environ | {"PYTHONPATH": str(Path(basisprune.files.__file__).parents[1])}
    ended = subprocess.run([sys.executable, "-c", KILLED + work, folder, str(stop)], env=environment, check=False)
    assert ended.returncode in (0, -signal.SIGKILL)
    return ended.returncode != 0


def held(folder: Path) -> dict[str, bytes]:
    """What a reader finds."""
    return {name: path.read_bytes() for name in OLD if (path := current(folder, name)).exists()}


def in_new_folders(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    for stop in itertools.count(1):
        folder = tmp_path / str(stop) / "folder"
        folder.parent.mkdir()
        yield stop, folder


@pytest.mark.parametrize("before", [{}, OLD])
def test_files_that_belong_together_are_all_old_or_all_new_whenever_the_writer_is_killed(tmp_path, before):
    for stop, folder in in_new_folders(tmp_path):
        if before:
            write_together(folder, before, lambda _: None)
            (folder / "notes.txt").write_text("mine")
        killed = killed_at(stop, folder, f"write_together(folder, {NEW}, lambda _: None)")
        assert held(folder) in (before, NEW)
        write_together(folder, OLD, lambda _: None)
        assert held(folder) == OLD
        assert names(folder) == [*OLD, *(["notes.txt"] if before else [])]
        if not killed:
            break
    assert stop > 8


def test_a_killed_writer_of_one_file_leaves_the_old_one_and_nothing_that_stays(tmp_path):
    for stop, folder in in_new_folders(tmp_path):
        write_checked(folder / "a.pt", b"old")
        killed = killed_at(stop, folder, 'write_checked(folder / "a.pt", b"new")')
        assert read_checked(folder / "a.pt") in (b"old", b"new")
        clear_leftovers(folder)
        assert names(folder) == ["a.pt"]
        if not killed:
            break
    assert stop > 3


def test_what_a_writer_at_work_has_is_not_cleared(tmp_path):
    with atomic(tmp_path / "file.txt") as file:
        clear_leftovers(tmp_path)
        file.write(b"whole")
    assert (tmp_path / "file.txt").read_bytes() == b"whole"


def test_files_that_fail_the_check_are_not_put_in_place(tmp_path):
    def fail(folder: Path) -> None:
        assert names(folder) == ["a.txt", "b.txt"]
        raise ValueError("no")

    for folder, before in ((tmp_path / "new", {}), (tmp_path / "old", OLD)):
        if before:
            write_together(folder, before, lambda _: None)
        with pytest.raises(ValueError, match="no"):
            write_together(folder, NEW, fail)
        assert held(folder) == before
        assert folder.exists() == bool(before)
    assert names(tmp_path / "old") == [*OLD]


# ------------------------------------------------------------------------------- checksums


@given(data=st.binary(max_size=200), place=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_one_flipped_bit_anywhere_is_noticed(tmp_path_factory, data, place, bit):
    path = tmp_path_factory.getbasetemp() / "bits" / "file.pt"
    write_checked(path, data)
    assert read_checked(path) == data
    damaged = bytearray(path.read_bytes())
    damaged[place % len(damaged)] ^= 1 << bit
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"file.pt: is damaged"):
        read_checked(path)


@given(data=st.binary(min_size=1, max_size=200), cut=st.integers(1, 10**6))
def test_a_file_that_was_cut_off_is_noticed(tmp_path_factory, data, cut):
    path = tmp_path_factory.getbasetemp() / "bits" / "file.pt"
    write_checked(path, data)
    whole = path.read_bytes()
    path.write_bytes(whole[: -(cut % len(whole)) or 0])
    with pytest.raises(CheckpointError, match="is damaged"):
        read_checked(path)


def test_a_network_is_written_with_its_checksum_without_being_held_twice(tmp_path):
    path = tmp_path / "file.pt"
    with checked(path) as file:
        torch.save({"weight": torch.arange(1000)}, file)
    state = torch.load(io.BytesIO(read_checked(path)), weights_only=True)
    assert torch.equal(state["weight"], torch.arange(1000))


def test_a_damaged_file_is_set_aside_and_named(tmp_path):
    path, said = tmp_path / "plan.json", []
    assert sound_or_aside(path, said.append) is None
    assert said == []
    for number in range(3):
        write_checked(path, b"{}")
        assert sound_or_aside(path, said.append) == b"{}"
        path.write_bytes(b"x" * 100)
        assert sound_or_aside(path, said.append) is None
        assert len(said) == number + 1
    assert all(str(path) in line and "is made again" in line for line in said)
    assert names(tmp_path) == ["plan.json.damaged", "plan.json.damaged2", "plan.json.damaged3"]


# ------------------------------------------------------------------------------- what comes from outside


def test_what_is_no_file_is_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    for name, kind in (("pipe", "a pipe"), ("device", "a device"), (".", "a folder")):
        with pytest.raises(OSError, match=f"it is {kind}, no file"):
            read_bytes(tmp_path / name)


def test_no_more_is_read_than_is_sound(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    assert read_bytes(tmp_path / "file", most=5) == b"12345"
    with pytest.raises(OSError, match="it has 5 bytes, and at most 4 are read"):
        read_bytes(tmp_path / "file", most=4)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(value=JSON)
def test_json_comes_back(value):
    assert parse_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{", b"NaN", b"[Infinity]", b"1e999", b"-1e999", b"9" * 5000, b"\xff", b'"\\ud800"', b"[" * 10**6),
        *(b"[" * 201 + b"]" * 201, b'{"a":' * 300 + b"1" + b"}" * 300),
    ],
)
def test_json_beyond_reason_is_a_value_error(content):
    with pytest.raises(ValueError, match=r"."):
        parse_json(content)


@given(content=st.binary(max_size=50))
def test_any_bytes_are_json_or_a_value_error(content):
    with contextlib.suppress(ValueError):
        parse_json(content)


@pytest.mark.parametrize("given", [None, 3, b"x", "", "a\0b", "x" * 5000, "x/" * 3000, "~nouser/x", "x" * 300])
def test_what_cannot_be_a_path_is_refused(given):
    with pytest.raises(ConfigError, match=r"^here: .* given"):
        user_path(given, "here")


def test_a_path_is_taken_with_its_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_path("~/x", "here") == tmp_path / "x"
    assert user_path(tmp_path, "here") == tmp_path


def test_what_is_ready_is_put_in_place_only_where_no_link_is(tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    for place in (outside, folder):
        place.mkdir()
    (outside / "theirs").write_text("theirs")
    (folder / ".basisprune-ready").symlink_to(outside)
    assert current(folder, "theirs") == folder / "theirs"
    with pytest.raises(CheckpointError, match=r"basisprune-ready: is a link"):
        clear_leftovers(folder)
    (folder / ".basisprune-ready").unlink()
    (folder / ".basisprune-ready").mkdir()
    (folder / ".basisprune-ready" / "mine").symlink_to(outside / "theirs")
    with pytest.raises(CheckpointError, match="mine: is a link"):
        write_together(folder, {"a": b"1"}, lambda _: None)
    assert [path.name for path in outside.iterdir()] == ["theirs"]


@pytest.mark.parametrize("text", ["9" * 5000, "-" + "9" * 200, "[" * 100_000, '{"a": ' * 5000])
def test_json_beyond_reason_is_refused_in_words(text):
    with pytest.raises(ValueError, match=r"digits is given|nested more than"):
        parse_json(text.encode())


def test_json_of_very_many_lists_is_refused_before_it_is_read():
    with pytest.raises(ValueError, match="lists and mappings"):
        parse_json(b"[" + b"[]," * 2_000_000 + b"0]")


@pytest.mark.parametrize("there", [True, False])
def test_a_lock_that_is_a_link_is_not_followed(there, tmp_path):
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    folder.mkdir()
    if there:
        outside.write_text("theirs")
    (folder / ".basisprune-lock").symlink_to(outside)
    with pytest.raises(CheckpointError, match=r"basisprune-lock: is a link"), locked(folder):
        pass
    assert outside.read_text() == "theirs" if there else not outside.exists()


def test_a_folder_that_is_a_link_is_locked_by_its_own_name(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with locked(tmp_path / "link"), pytest.raises(CheckpointError, match="another run"), locked(tmp_path / "folder"):
        pass


def test_rows_are_read_one_by_one_and_are_not_too_many(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    path.write_bytes("\ufeffa,1\n\n'b',\"2\n3\"\n".encode())
    assert list(csv_rows(path, most=100)) == [(1, ["a", "1"]), (3, ["'b'", "2\n3"])]
    monkeypatch.setattr(basisprune.files, "_MOST_ROWS", 1)
    with pytest.raises(csv.Error, match="more than 1 rows"):
        list(csv_rows(path, most=100))
    with pytest.raises(OSError, match="at most 5"):
        list(csv_rows(path, most=5))
