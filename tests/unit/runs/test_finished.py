"""Laws of finished results: any format loads, damage is refused, accuracies and classes are right."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from bundles import seal
from PIL import Image
from sources import write_images
from tiny import NAMES, tiny_images, tiny_model
from torch import nn

from basisprune.data import ArrayImages
from basisprune.deploy.bundle import save_pretrained
from basisprune.deploy.fold import fold
from basisprune.errors import BundleError, CheckpointError, ConfigError, DataError, ModelError
from basisprune.files import digest
from basisprune.runs.finished import Loaded, accuracy_on, classify_files, image_files, is_own, load_any
from basisprune.training.evaluation import predict
from basisprune.transfer.model import transfer_model


@pytest.mark.parametrize("form", ["bundle", "pixels.onnx", "prepared.onnx"])
def test_every_form_says_what_the_model_says(forms, form):
    loaded = load_any(forms / form)
    expected, found = predict(tiny_model(), tiny_images()), predict(loaded.model, tiny_images())
    assert np.array_equal(expected.classes, found.classes)
    assert np.allclose(expected.probabilities, found.probabilities, atol=1e-3)
    assert loaded.classes == (("0", "1", "2") if form == "prepared.onnx" else NAMES)


def test_what_is_no_result_is_refused_by_name(forms, tmp_path):
    with pytest.raises(BundleError, match="does not exist"):
        load_any(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="is not a result"):
        load_any(tmp_path)
    (tmp_path / "config.yaml").write_text("model: x\n")
    with pytest.raises(BundleError, match="has not written its model yet"):
        load_any(tmp_path)
    (tmp_path / "bad.onnx").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="ONNX Runtime cannot take it"):
        load_any(tmp_path / "bad.onnx")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir, lambda _path: None])
def test_what_belongs_to_a_file_and_is_none_is_not_opened(make, tmp_path):
    (tmp_path / "model.xml").write_text("<net/>")
    make(tmp_path / "model.bin")
    with pytest.raises(ModelError, match=r"model\.bin: cannot be read \((it is a .*, no file|No such file.*)\)"):
        load_any(tmp_path / "model.xml")


def test_settings_are_taken_only_from_the_run_that_wrote_the_file(forms, tmp_path):
    for name in ("model.onnx", "mine.onnx"):
        (tmp_path / name).write_bytes((forms / "pixels.onnx").read_bytes())
    save_pretrained(tiny_model(), tmp_path / "model", classes=NAMES)
    for text in ("seed: 3\n", "- a list\n"):  # of something else
        (tmp_path / "config.yaml").write_text(text)
        assert load_any(tmp_path / "model.onnx").settings == {}
    text = "seed: 3\nversions: {torch: '2.6'}\n"
    (tmp_path / "config.yaml").write_text(f"{text}# sha256 {digest(text.encode())}\n")
    found = [load_any(tmp_path / name).settings.get("seed") for name in ("model", "model.onnx", "mine.onnx")]
    assert found == [3, 3, None]
    (tmp_path / "config.yaml").write_text(f"{text.replace('3', '2')}# sha256 {digest(text.encode())}\n")
    for name in ("model", "model.onnx"):
        with pytest.raises(CheckpointError, match=r"config\.yaml: is damaged, or was not written"):
            load_any(tmp_path / name)


@pytest.mark.parametrize(
    "facts",
    [
        *("[]", '{"size": 3}', "no JSON", "null", "3", "[" * 100_000),
        '{"size": [16, 16], "mean": [1e999], "std": [1], "interpolation": "x", "prepares": true, "layout": "NHWC"}',
        '{"size": [16, 1000000000], "mean": [1], "std": [1], "interpolation": "x", "prepares": true, "layout": "NHWC"}',
        '{"size": [16, 16], "mean": [1], "std": [1], "interpolation": "x", "prepares": 7, "layout": "NHWC"}',
        '{"size": [16, 16], "mean": [1], "std": [1], "interpolation": "x", "prepares": true, "layout": ["NHWC"]}',
    ],
)
def test_an_onnx_file_that_does_not_say_what_it_takes_is_refused(forms, facts, tmp_path):
    proto = onnx.load(forms / "pixels.onnx")
    next(entry for entry in proto.metadata_props if entry.key == "basisprune.input").value = facts
    onnx.save(proto, tmp_path / "odd.onnx")
    with pytest.raises(ModelError, match="does not say how it wants its images"):
        load_any(tmp_path / "odd.onnx")
    without = onnx.load(forms / "pixels.onnx")
    entry = next(entry for entry in without.metadata_props if entry.key == "basisprune.input")
    entry.value = json.dumps({key: value for key, value in json.loads(entry.value).items() if key != "prepares"})
    onnx.save(without, tmp_path / "odd.onnx")
    with pytest.raises(ModelError, match="does not say how it wants its images"):
        load_any(tmp_path / "odd.onnx")


@pytest.mark.parametrize(
    "classes", ["3", "{}", '["a", 2, 3]', "[1, 2, 3]", '"abc"', "no JSON", '["a", "b"]', "[" * 100_000]
)
def test_an_onnx_file_with_other_class_names_than_outputs_is_refused(forms, classes, tmp_path):
    proto = onnx.load(forms / "pixels.onnx")
    next(entry for entry in proto.metadata_props if entry.key == "basisprune.classes").value = classes
    onnx.save(proto, tmp_path / "odd.onnx")
    with pytest.raises(ModelError, match=r"has no class names|has 2 classes and outputs"):
        load_any(tmp_path / "odd.onnx")


@pytest.mark.parametrize("data", ["hf:owner/name", "torchvision:MNIST"])
def test_a_run_has_nothing_fetched_unless_its_data_is_named(forms, data):
    loaded = replace(load_any(forms / "bundle"), settings={"data": data})
    assert not is_own(loaded, None)
    assert is_own(loaded, data)
    with pytest.raises(ConfigError, match="pass --data"):
        accuracy_on(loaded)


def test_classes_are_matched_by_name_whatever_their_order(forms):
    loaded = load_any(forms / "bundle")
    images = tiny_images(60)
    same = ArrayImages(images.images.permute(0, 2, 3, 1).numpy(), images.labels, NAMES)
    turned = ArrayImages(images.images.permute(0, 2, 3, 1).numpy(), 2 - images.labels, NAMES[::-1])
    assert accuracy_on(loaded, same).accuracy == accuracy_on(loaded, turned).accuracy
    assert accuracy_on(loaded, same).images == 60
    with pytest.raises(DataError, match="the class '0', which the model does not know"):
        accuracy_on(loaded, images)
    with pytest.raises(ConfigError, match="pass --data"):
        accuracy_on(loaded)


def test_answers_come_in_the_order_of_the_files_with_all_classes(forms, tmp_path):
    from basisprune.runs.summary import picture_of

    images = tiny_images(40)
    for index in range(40):
        picture_of(images[index][0]).save(tmp_path / f"{index:02}.png")
    (tmp_path / "07.png").write_text("broken")
    answers = list(classify_files(load_any(forms / "bundle"), image_files([tmp_path])))
    assert [answer.file.name for answer in answers] == [f"{index:02}.png" for index in range(40)]
    assert [bool(answer.error) for answer in answers] == [index == 7 for index in range(40)]
    good = [answer for answer in answers if not answer.error]
    assert all(set(dict(answer.classes)) == set(NAMES) for answer in good)
    assert torch.allclose(torch.tensor([sum(dict(answer.classes).values()) for answer in good]), torch.ones(39))
    assert all(answer.classes[0][1] == max(dict(answer.classes).values()) for answer in good)
    best = list(classify_files(load_any(forms / "bundle"), image_files([tmp_path]), 1))  # no more is kept of each
    assert [answer.classes for answer in best] == [answer.classes[:1] for answer in answers]


def test_images_are_found_as_a_run_finds_them(tmp_path):
    write_images(tmp_path, {"class": 2, "class/deep": 1, ".hidden": 1})
    (tmp_path / "class" / "._0.png").write_text("what some systems leave beside a file")
    write_images(tmp_path / "elsewhere", {"more": 1})
    (tmp_path / "class" / "link").symlink_to(tmp_path / "elsewhere" / "more")
    found = [str(path.relative_to(tmp_path / "class")) for path in image_files([tmp_path / "class"])]
    assert found == ["0.png", "1.png", "deep/0.png", "link/0.png"]
    (tmp_path / "class" / "round").symlink_to(tmp_path / "class")
    with pytest.raises(DataError, match="read already; remove the link"):
        image_files([tmp_path / "class"])


def test_deep_images_are_read_with_the_white_that_the_network_knows(forms, tmp_path):
    loaded = load_any(forms / "bundle")
    values = (np.arange(256).reshape(16, 16) * 16).astype(np.uint16)
    values[0, 0] = 5  # nothing in this image tells that 4095 is white
    Image.fromarray(np.minimum(values, 250)).save(tmp_path / "deep.png")
    Image.fromarray((np.minimum(values, 250) * (255 / 4095) + 0.5).astype(np.uint8)).save(tmp_path / "flat.png")
    deep = replace(loaded, spec=replace(loaded.spec, white=4095))
    files = [tmp_path / "deep.png", tmp_path / "flat.png"]
    one, two = classify_files(deep, files)
    assert one.classes == two.classes
    one, two = classify_files(loaded, files)
    assert one.classes != two.classes


def test_a_file_that_may_not_be_read_spoils_nothing_and_a_machine_that_cannot_read_is_told(
    forms, tmp_path, monkeypatch
):
    write_images(tmp_path, {"class": 3})
    loaded, files, normal = load_any(forms / "bundle"), image_files([tmp_path]), open
    number = errno.EACCES

    def failing(name, *args, **options):
        if str(name) == str(files[1]):
            raise OSError(number, os.strerror(number), str(name))
        return normal(name, *args, **options)

    monkeypatch.setattr("builtins.open", failing)
    answers = list(classify_files(loaded, files))
    assert [answer.error for answer in answers] == ["", f"{files[1]}: Permission denied", ""]
    number = errno.EMFILE
    with pytest.raises(OSError, match="Too many open files"):
        list(classify_files(loaded, files))


class Shifted(nn.Module):
    """Is saved as a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) + x.shape[0] * 0


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_a_network_whose_output_is_no_tensor_is_refused(kind, tmp_path):
    network = fold(transfer_model(Shifted(), 3, input_size=16), torch.zeros(2, 3, 16, 16))
    folder = save_pretrained(network, tmp_path / "bundle")

    def change(config):
        last, known = config["network"]["graph"][-1], config["fingerprint"]
        scores, times = last["args"][0], 2 if kind == "tuple" else 1
        last["args"] = [{"tuple": [scores] * 2} if kind == "tuple" else {"dict": [["scores", scores]]}]
        values = known["values"] * times
        config["fingerprint"] = {"shape": [len(values)], "values": values, "norm": known["norm"] * times**0.5}

    seal(folder, change)
    with pytest.raises(ModelError, match=r"outputs a \w+, and no tensor"):
        load_any(folder)


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_network_of_another_precision_is_given_images_in_it(kind, tmp_path):
    save_pretrained(tiny_model().to(kind), tmp_path / "model", classes=NAMES)
    write_images(tmp_path / "photos", {"red": 2, "blue": 2})
    loaded, files = load_any(tmp_path / "model"), image_files([tmp_path / "photos"])
    answers = list(classify_files(loaded, files))
    assert [answer.error for answer in answers] == [""] * len(files)


class OnlyOne(nn.Module):
    """Takes one image at a time, as the graph of a stranger may."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.input_spec, self.classes = tiny_model(), tiny_model().input_spec, NAMES

    def forward(self, x):
        return self.inner(x.reshape(self.input_spec.shape)[None])


def test_a_network_that_fails_on_a_batch_is_an_error_that_names_it(tmp_path):
    write_images(tmp_path / "photos", {"red": 2, "blue": 2})
    model = OnlyOne().eval()
    loaded = Loaded(model, NAMES, model.input_spec)
    with pytest.raises(ModelError, match="the network fails on inputs"):
        list(classify_files(loaded, image_files([tmp_path / "photos"])))
