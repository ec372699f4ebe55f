"""Laws of the manifest: what was written comes back, and what is not as it was written is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from sources import arrays, sizes, write_images, write_npz
from tiny import Notes
from torch.utils.data import Dataset, TensorDataset

from basisprune.callback import NullCallback
from basisprune.data import ArrayImages, load_data, take
from basisprune.data.load import Reading
from basisprune.data.manifest import (
    Entry,
    LeftOut,
    Manifest,
    changes,
    keep_images,
    manifest_of,
    read_manifest,
    write_manifest,
)
from basisprune.data.split import names_of
from basisprune.errors import CheckpointError, ConfigError, DataError

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
    assert json.loads((tmp_path / "images.json").read_text())["parts"] == {
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


@pytest.fixture
def photos(tmp_path):
    return write_images(tmp_path / "photos", {"ant": 20, "bee": 20})


def again(source, manifest, **options):
    return load_data(source, reading=Reading(manifest=manifest, **options))


def test_images_are_named_by_their_files_or_their_places(photos, tmp_path):
    names = names_of(load_data(photos, confirm_fraction=0.5))
    assert list(names) == ["train", "val", "confirm", "test"]
    every = sorted(name for part in names.values() for name in part)
    assert every == sorted(f"{kind}/{number}.png" for kind in ("ant", "bee") for number in range(20))
    split = names_of(load_data(write_npz(tmp_path, **arrays())))
    assert split["test"] == ["test[0]", "test[1]", "test[2]"]
    assert sorted(split["train"] + split["val"]) == sorted(f"train[{index}]" for index in range(30))


def test_exact_copies_stay_in_one_part(photos):
    for number in range(20, 50):  # thirty copies of one image, under two labels
        shutil.copy(photos / "ant" / "0.png", photos / ("ant", "bee")[number % 2] / f"{number}.png")
    for seed in range(3):
        splits = load_data(photos, seed=seed, confirm_fraction=0.5)
        copies = {"ant/0.png", *(f"{('ant', 'bee')[number % 2]}/{number}.png" for number in range(20, 50))}
        assert [role for role, names in names_of(splits).items() if copies & set(names)] == ["train"]
        assert set(splits.parts) == {"train", "val", "confirm", "test"}


def test_copies_of_what_judges_are_units_and_stay_so_when_a_run_goes_on(tmp_path):
    random = np.random.default_rng(0)
    for kind in ("ant", "bee"):
        (tmp_path / "photos" / kind).mkdir(parents=True)
        for number in range(12):
            image = Image.fromarray(random.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize((48, 48))
            for copy in range(10):
                pixels = np.array(image)
                pixels[0, 0, 0] ^= copy % 2  # half of them are exact
                Image.fromarray(pixels).save(tmp_path / "photos" / kind / f"{number}-{copy}.png")
    splits = load_data(tmp_path / "photos", val_fraction=0.5, confirm_fraction=0.5)
    held = {role: {(name[:3], name.split("-")[0]) for name in names} for role, names in names_of(splits).items()}
    assert sum(map(len, held.values())) == 24  # none is divided
    for part in (splits.val, splits.confirm):
        assert part.independent * 10 == len(part)
    assert splits.train.units is None
    manifest = manifest_of(splits)
    write_manifest(tmp_path / "images.json", manifest)
    assert read_manifest(tmp_path / "images.json") == manifest
    resumed = load_data(tmp_path / "photos", reading=Reading(manifest=manifest))
    assert resumed.confirm.units.tolist() == splits.confirm.units.tolist()
    assert manifest_of(resumed).digest == manifest.digest
    assert replace(manifest, units={}).digest != manifest.digest
    assert take(splits.confirm, [0, 3]).units.tolist() == splits.confirm.units[[0, 3]].tolist()


def test_near_copies_that_the_data_has_in_several_parts_are_left_out(tmp_path):
    for seed, part in enumerate(("train", "val")):
        for kind in ("ant", "bee"):
            (tmp_path / part / kind).mkdir(parents=True)
            random = np.random.default_rng((seed, kind == "ant"))
            for number in range(6):
                image = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8)).resize((60, 60))
                image.save(tmp_path / part / kind / f"{number}.png")
    with Image.open(tmp_path / "train" / "ant" / "3.png") as image:
        image.resize((50, 50)).save(tmp_path / "val" / "bee" / "new.jpg")
    notes = Notes()
    splits = load_data(tmp_path, reading=Reading(callback=notes), test_fraction=0)
    assert sizes(splits) == {"train": 12, "val": 12}
    assert any("1 of 13 images of val are near copies of images of train" in line for line in notes.lines)


def test_groups_are_units_of_arrays_and_datasets():
    random = np.random.default_rng(0)
    images, labels = random.integers(0, 256, (120, 8, 8, 3), dtype=np.uint8), np.arange(120) % 2
    groups = np.arange(120) // 6
    listed = TensorDataset(torch.from_numpy(images).permute(0, 3, 1, 2), torch.from_numpy(labels))
    listed.groups = groups
    for source in (ArrayImages(images, labels, groups=groups), listed):
        splits = load_data(source, val_fraction=0.6, confirm_fraction=0.5)
        assert splits.confirm.independent * 6 == len(splits.confirm)
        without = load_data(ArrayImages(images, labels), val_fraction=0.6, confirm_fraction=0.5)
        assert without.confirm.units is None


def test_images_that_the_data_has_in_several_parts_are_left_out_and_refused_with_strict(tmp_path):
    for part in ("train", "val", "test"):
        write_images(tmp_path / part, {"ant": 5, "bee": 5})
    shutil.copy(tmp_path / "train" / "ant" / "1.png", tmp_path / "test" / "bee" / "9.png")
    notes = Notes()
    splits = load_data(tmp_path, reading=Reading(callback=notes))
    assert sizes(splits) == {"train": 10, "val": 10, "test": 10}
    assert "test/bee/9.png" not in names_of(splits)["test"]
    _, line = notes.lines
    assert "1 of 11 images of test are exact copies of images of train" in line
    assert "test/bee/9.png and train/ant/1.png" in line
    with pytest.raises(DataError, match=r"9\.png and train/ant/1\.png"):
        load_data(tmp_path, reading=Reading(strict=True))
    shutil.rmtree(tmp_path / "val")
    shutil.copytree(tmp_path / "train", tmp_path / "val")
    with pytest.raises(DataError, match="all images of val are also in another part"):
        load_data(tmp_path, reading=Reading(callback=notes))


def test_images_of_one_group_stay_in_one_part(photos, tmp_path):
    lines = [f"{kind}/{number}.png,{kind}{number // 4}" for kind in ("ant", "bee") for number in range(18)]
    groups = tmp_path / "groups.csv"
    groups.write_text("file,group\n" + "\n".join(lines))
    group_of = dict(line.split(",") for line in lines)
    splits = load_data(photos, confirm_fraction=0.5, reading=Reading(groups=groups))
    held = {role: {group_of.get(name, name) for name in names} for role, names in names_of(splits).items()}
    assert sum(map(len, held.values())) == len(set().union(*held.values()))
    assert all(set(part.labels) == {0, 1} for part in splits.parts.values())
    groups.write_text("ant/99.png,a\n")
    with pytest.raises(DataError, match=r"images that the data does not have; .* as ant/0\.png: ant/99\.png"):
        load_data(photos, reading=Reading(groups=groups))


def test_groups_of_an_npz_and_of_a_dataset_are_kept(tmp_path):
    content = arrays(count=30)
    splits = load_data(write_npz(tmp_path, **content, groups=np.arange(30) // 6), test_fraction=0)
    held = [{int(name[6:-1]) // 6 for name in names_of(splits)[part]} for part in ("train", "val")]
    assert not held[0] & held[1]
    for wrong in (np.arange(29), np.zeros(30), np.zeros((30, 2), dtype=int)):
        with pytest.raises(DataError, match=r"x_train: groups .* given for 30 images"):
            load_data(write_npz(tmp_path, **content, groups=wrong))

    class Bursts(Dataset):
        groups = tuple(f"burst {index // 5}" for index in range(30))

        def __len__(self) -> int:
            return 30

        def __getitem__(self, index):
            return content["x_train"][index], int(content["y_train"][index])

    splits = load_data(Bursts(), test_fraction=0)
    held = [set(splits.parts[part].groups) for part in ("train", "val")]
    assert held[0] | held[1] == set(Bursts.groups)
    assert not held[0] & held[1]


def test_groups_that_the_data_has_in_several_parts_are_left_out_of_all_but_one(tmp_path):
    content = arrays()
    path = write_npz(
        tmp_path, **content, x_val=255 - content["x_test"], y_val=content["y_test"], groups=np.arange(30),
        groups_val=np.array([3, 40, 41]),
    )  # fmt: skip
    with pytest.warns(UserWarning, match=r"1 of 3 images of val are of the same groups(?s:.*)val\[0\] and train\[3\]"):
        splits = load_data(path)
    assert names_of(splits)["val"] == ["val[1]", "val[2]"]


def test_the_manifest_of_a_run_gives_exactly_its_images_back(photos, tmp_path):
    splits = load_data(photos, seed=3, confirm_fraction=0.5, limit=20)
    keep_images(tmp_path, splits)
    manifest = read_manifest(tmp_path / "images.json")
    write_images(photos, {"ant": 40, "cat": 3})  # the same twenty, twenty more, and another class
    found = again(photos, manifest)
    assert names_of(found) == names_of(splits)
    assert found.classes == ("ant", "bee")
    assert [part.labels.tolist() for part in found.parts.values()] == [p.labels.tolist() for p in splits.parts.values()]
    assert manifest_of(found).digest == manifest.digest
    keep_images(tmp_path, found)
    with pytest.raises(CheckpointError, match=r"uses other images(?s:.*)in another part"):
        keep_images(tmp_path, load_data(photos / ".." / "photos", seed=4, confirm_fraction=0.5))


def test_images_are_not_decoded_again(photos, monkeypatch):
    manifest = manifest_of(load_data(photos))
    monkeypatch.setattr("basisprune.data.decode._decoded", None)
    manifest_of(again(photos, manifest))


def test_what_was_left_out_is_in_the_manifest(photos):
    (photos / "ant" / "4.png").write_bytes(b"")
    manifest = manifest_of(load_data(photos, reading=Reading(callback=NullCallback())))
    assert [(each.name, "not an image" in each.reason) for each in manifest.left_out] == [("ant/4.png", True)]
    (photos / "ant" / "4.png").unlink()
    again(photos, manifest)


def test_missing_and_replaced_files_are_listed(photos):
    manifest = manifest_of(load_data(photos))
    (photos / "ant" / "2.png").unlink()
    Image.new("RGB", (6, 5), (1, 2, 3)).save(photos / "bee" / "5.png")
    with pytest.raises(DataError, match="is not as it was when the run started; put the images back") as error:
        again(photos, manifest)
    said = sorted(error.value.faults)
    assert len(said) == 2
    assert said[0].startswith("ant/2.png: missing (")
    assert said[1].startswith("bee/5.png: replaced")


def test_images_in_arrays_are_found_again_and_changed_ones_refused(tmp_path):
    content = arrays()
    path = write_npz(tmp_path, **content)
    manifest = manifest_of(load_data(path, seed=5))
    assert manifest_of(again(path, manifest)).digest == manifest.digest
    more = {**content, "x_train": np.concatenate([content["x_train"], content["x_train"][:3] ^ 255])}
    more["y_train"] = np.concatenate([content["y_train"], content["y_train"][:3]])
    assert manifest_of(again(write_npz(tmp_path, **more), manifest)).digest == manifest.digest
    fewer = {**content, "x_train": content["x_train"][:29], "y_train": content["y_train"][:29]}
    with pytest.raises(DataError, match=r"train\[29\]: missing"):
        again(write_npz(tmp_path, **fewer), manifest)
    with pytest.raises(DataError, match=r"train\[\d+\]: replaced"):
        again(write_npz(tmp_path, **{**content, "x_train": content["x_train"] ^ 1}), manifest)
    with pytest.raises(DataError, match=r"train\[\d+\]: has another label"):
        again(write_npz(tmp_path, **{**content, "y_train": content["y_train"][::-1]}), manifest)
    with pytest.raises(DataError, match="classes: "):
        again(write_npz(tmp_path, **{**content, "y_train": content["y_train"] + 1, "y_test": [1, 2, 3]}), manifest)


def test_a_manifest_that_leads_out_of_the_folder_is_refused(photos):
    manifest = manifest_of(load_data(photos))
    entry, *others = manifest.parts["train"]
    for name in ("../secret.png", "/etc/secret.png"):
        text = manifest.to_json().replace(json.dumps(entry.name), json.dumps(name))
        with pytest.raises(DataError, match=r"are no files in it: .*secret"):
            again(photos, type(manifest).from_json(text))
    assert others


def test_splits_that_are_given_are_set_aside_from_and_otherwise_as_they_are():
    images = ArrayImages(arrays()["x_train"], arrays()["y_train"])
    splits = load_data(images)
    assert load_data(splits) is splits
    divided = load_data(splits, confirm_fraction=0.5)
    assert sizes(divided) == {"train": 21, "val": 3, "confirm": 3, "test": 3}
    assert load_data(divided, confirm_fraction=0.5).confirm is divided.confirm
