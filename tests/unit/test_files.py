"""Laws of the one writer of files: all or nothing."""

from __future__ import annotations

from basisprune.files import write_text


def test_text_is_written_whole_into_a_folder_that_may_not_exist(tmp_path):
    path = tmp_path / "a" / "b.json"
    write_text(path, "Grüße\n")
    write_text(path, "{}\n")
    assert path.read_text() == "{}\n"
    assert list(path.parent.iterdir()) == [path]
