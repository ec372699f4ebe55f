"""What an exported file says of itself: what it takes, its classes, and the same in the words of other readers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import cast, get_args

from torch import Tensor

from basisprune.deploy.export.common import PixelLayout
from basisprune.errors import ModelError
from basisprune.files import Json, parse_json
from basisprune.types import InputSpec


@dataclass(frozen=True)
class GraphInput:
    """What an exported graph takes: pixels that lie as `layout` says if it `prepares` them itself."""

    spec: InputSpec
    prepares: bool
    layout: PixelLayout


@dataclass(frozen=True)
class FileFacts:
    """What a file takes, and the names of its classes; None where it has none."""

    input: GraphInput
    classes: tuple[str, ...] | None


def input_facts(spec: InputSpec | None, layout: PixelLayout | None, example: Tensor) -> dict[str, object]:
    """What a graph takes, for its metadata; without a layout it takes prepared images."""
    facts: dict[str, object] = {
        "shape": list(example.shape[1:]),
        "layout": layout or "NCHW",
        "prepares": layout is not None,
    }
    return facts if spec is None else {**facts, **asdict(spec)}


def read_facts(path: Path, notes: Mapping[str, str]) -> FileFacts:
    """What the JSON texts `input` and `classes` of a file say; raises ModelError where they are missing or wrong."""
    try:
        wanted = _graph_input(parse_json(notes["input"].encode()))
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: does not say how it wants its images; export it with basisprune from a network with an input_spec"
        ) from error
    try:
        names = parse_json(notes["classes"].encode())
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise TypeError(f"{type(names).__name__} found")
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: has no class names; export it again with basisprune") from error
    return FileFacts(wanted, None if names is None else tuple(map(str, names)))


def _graph_input(facts: Json) -> GraphInput:
    if not isinstance(facts, dict):
        raise TypeError(f"{type(facts).__name__} found")
    known = {each.name: facts[each.name] for each in fields(InputSpec) if each.name in facts}
    spec = InputSpec.from_json(json.dumps(known))
    prepares, layout = facts["prepares"], facts["layout"]
    if not isinstance(prepares, bool) or layout not in get_args(PixelLayout):
        raise TypeError(f"prepares: {prepares!r}, layout: {layout!r}")
    if prepares and (spec is None or len(spec.size) != 2):
        raise ValueError(f"prepares: true, of inputs that are no images ({spec})")
    return GraphInput(spec, prepares, cast("PixelLayout", layout))


def for_ultralytics(spec: InputSpec, classes: Sequence[str]) -> dict[str, str]:
    """The entries of an ONNX file's metadata that Ultralytics' reader knows; values are Python literals.

    >>> for_ultralytics(InputSpec(size=(64, 64), mean=(0.5,), std=(0.5,)), ["it's"])["names"]
    '{0: "it\\'s"}'
    """
    return {
        "description": "an image classifier, made small by basisprune",
        "task": "classify",
        "stride": "1",
        "batch": "1",
        "channels": str(spec.channels),
        "imgsz": repr(list(spec.size)),
        "names": repr(dict(enumerate(classes))),
    }


def for_openvino(spec: InputSpec, layout: PixelLayout | None, classes: Sequence[str]) -> dict[str, str]:
    """The entries of `model_info` that OpenVINO's Model API knows.

    Its labels are parted by spaces, so a space in a name becomes an underscore there.

    >>> for_openvino(InputSpec(size=(64, 64), mean=(0.5,), std=(0.5,)), "NHWC", ["red fox", "owl"])["labels"]
    'red_fox owl'
    """
    mean, scale = ([0.0] * spec.channels, [1.0] * spec.channels)
    if layout is None:
        mean, scale = ([255 * value for value in values] for values in (spec.mean, spec.std))
    return {
        "model_type": "Classification",
        "task_type": "classification",
        "labels": " ".join("_".join(name.split()) or "_" for name in classes),
        "resize_type": "standard",
        "orig_width": str(spec.size[1]),
        "orig_height": str(spec.size[0]),
        "mean_values": " ".join(f"{value:g}" for value in mean),
        "scale_values": " ".join(f"{value:g}" for value in scale),
        "reverse_input_channels": str(spec.channels == 3),  # it reads images as BGR
        "multilabel": "False",
        "hierarchical": "False",
        "output_raw_scores": "True",
    }
