"""Laws of groups: what a file lists, and which images hang together by them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.data.groups import read_groups, refuse_unknown, units_of
from basisprune.errors import DataError


def written(folder, content: str | bytes):
    path = folder / "groups.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    "content",
    [
        "a/0.png,x\nb/1.png,y\n",
        "file,group\na/0.png,x\nb/1.png,y",
        "\ufeffFile, Group\r\n./a/0.png, x\r\n\r\nb/1.png,y\r\n",
        '"a/0.png","x"\nb/1.png,y\na/0.png,x\n',
    ],
)
def test_a_file_lists_names_and_groups(tmp_path, content):
    assert read_groups(written(tmp_path, content)) == {"a/0.png": "x", "b/1.png": "y"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a,\xff\n", "no CSV file in UTF-8"),
        ('a,"x\n', "no CSV file in UTF-8"),
        ("", "no line file,group found"),
        ("file,group\n", "no line file,group found"),
        ("a,x,y\n", "line 1: 'a,x,y' found; file,group is needed"),
        ("a,x\nb,\n", "line 2: 'b,' found"),
        ("a,x\na,y\n", "line 2: a is in group y, but in x before"),
    ],
)
def test_what_is_no_list_of_groups_is_refused_by_line(tmp_path, content, said):
    with pytest.raises(DataError) as error:
        read_groups(written(tmp_path, content))
    assert said in str(error.value)
    assert "groups.csv" in str(error.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.csv: cannot be read \(No such file"):
        read_groups(tmp_path / "none.csv")


def test_images_that_the_data_does_not_have_are_listed(tmp_path):
    refuse_unknown({"a": "x"}, ["a", "b"], tmp_path)
    with pytest.raises(DataError, match=r"images that the data does not have; .* as b") as error:
        refuse_unknown({"a": "x", "c": "x"}, ["b"], tmp_path)
    assert error.value.faults == ("a", "c")


keys_of = st.lists(st.tuples(st.sampled_from(["", "a", "b", "c", "d"]), st.sampled_from(["", "x", "y"])), max_size=12)


@given(keys=keys_of)
def test_images_that_share_a_key_have_one_unit_and_units_are_no_larger_than_that(keys):
    units = units_of(keys).tolist()
    linked = [[any(p and p == q for p, q in zip(one, two, strict=True)) for two in keys] for one in keys]
    for i, row in enumerate(linked):
        reached, pending = {i}, [i]
        while pending:
            now = pending.pop()
            new = {j for j, link in enumerate(linked[now]) if link} - reached
            reached |= new
            pending += new
        assert {j for j, unit in enumerate(units) if unit == units[i]} == reached
        assert row is linked[i]
