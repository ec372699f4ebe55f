"""Laws of the accuracy on labelled images."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny import NAMES, tiny_images

from basisprune.data import ArrayImages
from basisprune.errors import ConfigError, DataError
from basisprune.runs.accuracy import accuracy_on, is_own
from basisprune.runs.load import load_any


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
