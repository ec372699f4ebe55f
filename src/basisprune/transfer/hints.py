"""What the files beside a network's weights say of its images and classes: those of timm and of Hugging Face."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

import timm.data
from pydantic import TypeAdapter
from torch import nn

from basisprune.data.arrays import distinct_names
from basisprune.errors import ConfigError, ModelError
from basisprune.files import Json, parse_json, read_bytes
from basisprune.types import InputSpec, Interpolation

_PILLOW = {0: "nearest", 2: "bilinear", 3: "bicubic"}  # the numbers of its filters, as Hugging Face writes them
_CONFIG, _PREPROCESSING = "config.json", "preprocessor_config.json"
_MOST_BYTES, _MOST_SHARDS, _MOST_CHANNELS, _LARGEST = 64 << 20, 1000, 64, 1e6
_DEFAULT_SIZE = (224, 224)


@dataclass(frozen=True)
class Hints:
    """How images are to be prepared, and what the classes are called, each as far as it is known."""

    size: tuple[int, int] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    interpolation: str | None = None
    classes: tuple[str, ...] | None = None

    def over(self, other: Hints) -> Hints:
        own = {each.name: value for each in fields(self) if (value := getattr(self, each.name)) is not None}
        return replace(other, **own)

    def spec(self, channels: int) -> InputSpec:
        """The preparation of images with that many channels; what is unknown is ImageNet's, at 224x224."""
        usual = Hints(_DEFAULT_SIZE, timm.data.IMAGENET_DEFAULT_MEAN, timm.data.IMAGENET_DEFAULT_STD, "bilinear")
        known = self.over(usual)
        mean, std = (_per_channel(name, getattr(known, name), channels) for name in ("mean", "std"))
        return InputSpec(known.size or _DEFAULT_SIZE, mean, std, known.interpolation or "bilinear")


NO_HINTS = Hints()


def _per_channel(name: str, values: Sequence[float], channels: int) -> tuple[float, ...]:
    if len(values) == 3 and channels == 1:  # of colours, for a network for grey images
        return (sum(values) / 3,)
    found = tuple(values) * channels if len(values) == 1 else tuple(values)
    if len(found) != channels:
        raise ConfigError(
            f"{name}: {len(values)} numbers given, and the network reads images of {channels} channels; pass one for "
            "each, or one for all"
        )
    return found


def hints_of_network(model: nn.Module) -> Hints:
    """What timm knows of a network that it has built; nothing of any other."""
    if not isinstance(getattr(model, "pretrained_cfg", None), dict):
        return NO_HINTS
    try:
        known = timm.data.resolve_model_data_config(model)
        return Hints(tuple(known["input_size"][1:]), tuple(known["mean"]), tuple(known["std"]), known["interpolation"])
    except Exception as error:
        raise ModelError(f"what its config.json says of images cannot be used ({error})") from error


def hints_of(folder: Path) -> Hints:
    """What config.json and preprocessor_config.json in a folder say; raises ModelError for one that is damaged."""
    config, images = _json(folder / _CONFIG), _json(folder / _PREPROCESSING)
    said = config.get("pretrained_cfg")
    if not isinstance(said, dict):
        said = {}
    shape, by = said.get("input_size"), said.get("interpolation")
    size = _size(shape[1:]) if isinstance(shape, list) and len(shape) == 3 else None
    interpolation = str(by) if by in get_args(Interpolation) else None
    of_timm = Hints(size, _numbers(said.get("mean")), _numbers(said.get("std")), interpolation, _classes(config))
    return _preprocessing(images).over(of_timm)


def _json(path: Path) -> dict[str, Json]:
    try:
        said = parse_json(read_bytes(path, most=_MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    return said if isinstance(said, dict) else {}


def _preprocessing(said: dict[str, Json]) -> Hints:
    size = said.get("size")
    if isinstance(size, dict):
        edge = size.get("shortest_edge")
        size = [size.get("height", edge), size.get("width", edge)]
    elif isinstance(size, int):
        size = [size, size]
    mean, std = _numbers(said.get("image_mean")), _numbers(said.get("image_std"))
    if said.get("do_normalize") is False:
        mean, std = (0.0,), (1.0,)
    resample = said.get("resample")
    return Hints(_size(size), mean, std, _PILLOW.get(resample) if isinstance(resample, int) else None)


def _classes(config: dict[str, Json]) -> tuple[str, ...] | None:
    names, numbered = config.get("label_names"), config.get("id2label")
    if isinstance(numbered, dict):
        names = [numbered.get(str(index)) for index in range(len(numbered))]
        if names == [f"LABEL_{index}" for index in range(len(names))]:
            return None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        return None
    return distinct_names([str(name) for name in names])


def _size(value: Json) -> tuple[int, int] | None:
    sides = [side for side in value if isinstance(side, int) and side > 0] if isinstance(value, list) else []
    return (sides[0], sides[1]) if len(sides) == 2 else None


def _numbers(value: Json) -> tuple[float, ...] | None:
    if not isinstance(value, list) or not 0 < len(value) <= _MOST_CHANNELS:
        return None
    found = tuple(float(each) for each in value if isinstance(each, int | float) and abs(each) < _LARGEST)
    return found if len(found) == len(value) else None


def shards_of(index: Path) -> dict[str, str]:
    """In which file beside the index each tensor is, as it says; raises ModelError unless these are some such files."""
    try:
        said = parse_json(read_bytes(index, most=_MOST_BYTES))
        places = TypeAdapter(dict[str, str]).validate_python(said["weight_map"] if isinstance(said, dict) else said)
    except (OSError, ValueError, KeyError) as error:
        said = f"{getattr(error, 'strerror', None) or error}"
        raise ModelError(
            f"{index}: its 'weight_map' of tensors and files cannot be read ({said}); fetch it again"
        ) from error
    names = set(places.values())
    if not 0 < len(names) <= _MOST_SHARDS:
        raise ModelError(f"{index}: names {len(names):,} files; 1 to {_MOST_SHARDS:,} are read")
    if odd := [name for name in names if Path(name).name != name or name in (".", "..")]:
        raise ModelError(f"{index}: names {odd[0][:100]!r}, which is not a file beside it")
    return places
