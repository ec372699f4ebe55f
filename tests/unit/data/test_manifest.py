"""Laws of the manifest: what was written comes back, and what is not as it was written is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from basisprune.data.manifest import Entry, LeftOut, Manifest, changes, read_manifest, write_manifest
from basisprune.errors import CheckpointError, ConfigError

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9)
entries = st.lists(st.builds(Entry, names, st.integers(0, 1), names), min_size=1, max_size=4).map(tuple)
manifests = st.builds(
    Manifest,
    st.tuples(names, names),
    st.fixed_dictionaries({"train": entries}, optional={"val": entries, "confirm": entries, "test": entries}),
    st.none() | st.integers(1, 65535),
    st.lists(st.builds(LeftOut, names, names), max_size=2).map(tuple),
)
TINY = Manifest(("ant", "bee"), {"train": (Entry("a.png", 0, "12"), Entry("b.png", 1, "34"))})


@given(manifest=manifests)
def test_what_is_written_comes_back(tmp_path_factory, manifest):
    path = tmp_path_factory.getbasetemp() / "images.json"
    write_manifest(path, manifest)
    assert read_manifest(path) == manifest


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:-20],
        lambda text: text.replace('"a.png"', '"c.png"'),
        lambda text: text.replace(",1,", ",0,"),
        lambda text: text.replace(",1,", ",2,"),
        lambda text: text.replace(",1,", ',"1",'),
        lambda text: text.replace("train", "trian"),
        lambda text: text.replace('"white":null', '"white":null,"more":1'),
        lambda text: text.replace("12", "13"),
        lambda text: "",
        lambda text: "[]",
    ],
)
def test_a_damaged_manifest_is_refused_with_the_way_out(tmp_path, damage):
    path = tmp_path / "images.json"
    write_manifest(path, TINY)
    path.write_text(damage(path.read_text()))
    with pytest.raises(CheckpointError, match=r"images\.json: the list of the run's images.*another folder"):
        read_manifest(path)


def test_a_missing_manifest_and_bytes_that_are_no_text_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="No such file"):
        read_manifest(tmp_path / "images.json")
    (tmp_path / "images.json").write_bytes(b"\xff\xfe{")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_manifest(tmp_path / "images.json")


def test_a_manifest_is_json_that_others_can_read(tmp_path):
    write_manifest(tmp_path / "images.json", TINY)
    assert json.loads((tmp_path / "images.json").read_text())["images"]["parts"] == {
        "train": [["a.png", 0, "12"], ["b.png", 1, "34"]]
    }


def test_the_digest_tells_images_roles_and_labels_apart_but_not_what_was_left_out():
    a, b = TINY.parts["train"]
    others = [
        Manifest(("ant", "cat"), TINY.parts),
        Manifest(TINY.classes, TINY.parts, white=255),
        Manifest(TINY.classes, {"train": (b, a)}),
        Manifest(TINY.classes, {"train": (a,), "val": (b,)}),
        Manifest(TINY.classes, {"train": (a, b._replace(label=0))}),
        Manifest(TINY.classes, {"train": (a, b._replace(sha256="56"))}),
    ]
    assert len({each.digest for each in [TINY, *others]}) == 1 + len(others)
    assert Manifest(TINY.classes, TINY.parts, left_out=(LeftOut("c", "cut"),)).digest == TINY.digest


def test_changes_are_told_by_number_and_name():
    a, b = TINY.parts["train"]
    new = Manifest(("ant", "cat"), {"train": (a._replace(sha256="9"), Entry("c.png", 0, "")), "val": ()}, white=255)
    said = changes(TINY, new)
    assert said[0] == "classes: ['ant', 'bee'] -> ['ant', 'cat']"
    assert said[1:] == [
        "white: None -> 255",
        "1 images missing: b.png",
        "1 images new: c.png",
        "1 images of another content: a.png",
    ]
    many = Manifest(TINY.classes, {"train": tuple(Entry(f"{index:02}", 0, "") for index in range(12))})
    assert "12 images new: 00, 01, 02, 03, 04, 05, 06, 07, 08, 09, ..." in changes(TINY, many)
    assert "order or number" in changes(TINY, Manifest(TINY.classes, {"train": (b, a)}))[0]


def test_a_manifest_without_training_images_or_with_labels_out_of_range_cannot_be_made():
    with pytest.raises(ConfigError, match="no training images"):
        Manifest(("a", "b"), {"val": TINY.parts["train"]})
    with pytest.raises(ConfigError, match=r"b\.png: label 1 for 1 classes"):
        Manifest(("a",), TINY.parts)
