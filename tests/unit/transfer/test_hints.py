"""Laws of hints: what is known of images is taken from whoever says it, nearest first, and nonsense says nothing."""

from __future__ import annotations

import json

import pytest
import timm
from torch import nn

from basisprune.errors import ConfigError
from basisprune.transfer.hints import NO_HINTS, Hints, hints_of, hints_of_network


def test_what_is_unknown_is_that_of_imagenet():
    spec = NO_HINTS.spec(3)
    assert (spec.size, spec.mean, spec.interpolation) == ((224, 224), (0.485, 0.456, 0.406), "bilinear")
    assert NO_HINTS.spec(1).mean == pytest.approx((0.449,))


def test_one_number_is_for_every_channel_and_others_must_fit():
    assert Hints(mean=(0.5,), std=(0.25,)).spec(3).mean == (0.5, 0.5, 0.5)
    with pytest.raises(ConfigError, match="mean: 2 numbers given, and the network reads images of 3 channels"):
        Hints(mean=(0.5, 0.4)).spec(3)
    with pytest.raises(ConfigError, match=r"std: .* all must be positive"):
        Hints(std=(0.0,)).spec(3)


def test_timm_knows_its_own_networks_only():
    assert hints_of_network(timm.create_model("mobilenetv3_small_050")).mean == (0.485, 0.456, 0.406)
    assert hints_of_network(nn.Linear(2, 2)) == NO_HINTS


def test_a_folder_of_timm_says_how_images_are_prepared(tmp_path):
    prepared = {"input_size": [3, 40, 50], "mean": [0.1] * 3, "std": [0.2] * 3, "interpolation": "bicubic"}
    (tmp_path / "config.json").write_text(json.dumps({"pretrained_cfg": prepared, "label_names": ["a", "b"]}))
    assert hints_of(tmp_path) == Hints((40, 50), (0.1,) * 3, (0.2,) * 3, "bicubic", ("a", "b"))


@pytest.mark.parametrize(
    "said",
    [
        {"pretrained_cfg": {"input_size": [3, -1, "x"], "mean": ["a"], "std": [10**90], "interpolation": ["x"]}},
        {"pretrained_cfg": 3, "id2label": {"0": 3}, "label_names": [None]},
        {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}},
        [],
    ],
)
def test_nonsense_says_nothing(said, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert hints_of(tmp_path) == NO_HINTS


def test_images_that_are_not_normalised_stay_as_they_are(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"do_normalize": False, "size": 32}))
    assert hints_of(tmp_path) == Hints((32, 32), (0.0,), (1.0,))
