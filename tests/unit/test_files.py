"""Laws of writing: all or nothing, and nothing left beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.files import atomic, replacing, sync, write_text


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
