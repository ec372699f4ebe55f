"""Laws of config.json: every name and number in it is checked, and nothing in it gives another network."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import pytest
import torch
from bundles import damaged_or_equal, refused, rewrite, seal
from safetensors.torch import load_file, save_file

ODD = ['a"b', "a.b c", "a\nb", "", "0x1", "a-b", "a b", "\u202ea", "1.5", "é\u0301\u0000", "__import__('os')"]


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("place", ["children", "order", "parameters", "buffers", "attributes", "args"])
def test_every_name_in_a_structure_is_checked(saved, name, place):
    if place in ("children", "order"):
        name = name.replace("a-b", "a-")  # hyphens may stand between words, as in torchvision's block1-0
    value = [name] if place == "order" else {name: {"children": {}, "buffers": [True, True]}.get(place, True)}
    if place == "children":
        value = {name: {"class": "torch.nn.Identity"}}
    rewrite(saved, lambda config: config["structure"].setdefault("children", {}).update(extra={place: value}))
    refused(saved, "not a name for a part of a network")


@pytest.mark.parametrize("name", [name for name in ODD if name not in ("", "1.5") and "\0" not in name])
def test_every_name_of_a_tensor_is_checked(saved, name):
    state = load_file(saved / "model.safetensors")
    save_file(state | {f"backbone.{name}": torch.zeros(2)}, saved / "model.safetensors", {"format": "pt"})
    seal(saved)
    refused(saved, "not a name for a part of a network")
    for place in ("shared", "aliases"):
        rewrite(saved, lambda config, place=place: config["tensors"].update({place: {name: "backbone.0.weight"}}))
        refused(saved, "not a name for a part of a network")


def forged(saved: Path, *path: str, value: object) -> None:
    def change(config):
        home = config
        for key in path[:-1]:
            home = home[key]
        home[path[-1]] = value

    rewrite(saved, change)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [("input", "spec", "mean"), ("input", "spec", "std"), ("fingerprint", "norm")])
def test_numbers_that_are_not_finite_are_refused(saved, place, number):
    forged(saved, *place, value=number if place[-1] == "norm" else [number] * 3)
    refused(saved, "is damaged, no JSON")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 5000])
def test_numbers_beyond_reason_are_refused(saved, number):
    forged(saved, "fingerprint", "norm", value=4711)
    text = (saved / "config.json").read_text().replace("4711", number)
    (saved / "config.json").write_text(text)
    refused(saved, "is damaged, no JSON")


def test_a_norm_that_would_excuse_every_output_excuses_none(saved):
    forged(saved, "fingerprint", "norm", value=1e300)
    rewrite(saved, tensors=lambda state: state["backbone.0.basis.weight"].mul_(1.1))
    refused(saved, "does not output what it did")


@pytest.mark.parametrize("shape", [[3, 10**6, 10**6], [0], [], [-3, 16, 16], [3.5], [10**30]])
def test_shapes_beyond_reason_are_refused_before_memory_is_taken(saved, shape):
    forged(saved, "input", "shape", value=shape)
    refused(saved, "does not make sense")


@pytest.mark.parametrize("classes", [["a"], ["a", "b", "c", "d"], [], ["a", "b", 3], "abc"])
def test_classes_that_do_not_match_the_outputs_are_refused(saved, classes):
    forged(saved, "classes", value=classes)
    refused(saved, "names . classes and outputs|does not make sense")


@pytest.mark.parametrize(
    "key", ["network", "structure", "tensors", "input", "classes", "metrics", "versions", "fingerprint", "files"]
)
@pytest.mark.parametrize("value", [None, 3, "x", [], {}, ...])
def test_a_part_that_is_missing_or_of_another_kind_never_gives_another_network(saved, key, value):
    def change(config):
        config.pop(key)
        if value is not ...:
            config[key] = value

    rewrite(saved, change)
    damaged_or_equal(saved)


def leaves(value, path=()):
    """The path to everything in JSON that holds nothing itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [leaf for key, item in inner for leaf in leaves(item, (*path, key))] or [path]


def test_a_changed_field_never_loads_silently_wrong_even_with_its_checksum(saved):
    config = json.loads((saved / "config.json").read_text())
    draw = random.Random(0)
    for path in leaves(config):
        if path[0] in ("checksum", "files"):
            continue
        changed = copy.deepcopy(config)
        home = changed
        for key in path[:-1]:
            home = home[key]
        old = home[path[-1]]
        others = [None, True, -1, 0, 2, 1e9, "x", [], {}, {"tuple": [7, 7]}]
        home[path[-1]] = draw.choice([other for other in others if other != old])
        (saved / "config.json").write_text(json.dumps(changed))
        seal(saved)
        damaged_or_equal(saved)
