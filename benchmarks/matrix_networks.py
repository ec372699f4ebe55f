"""The networks of the matrix: which, how they are built, and what of a detector is compared.

As a module it is also where bundles of networks that neither timm nor a plain structure can build anew find their
factories: `matrix_networks:fcn_resnet50` is torchvision's network of that name without weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn import functional as F

FAMILIES = Path(__file__).parent / "matrix_models.json"
SHORTENED: dict[str, dict[str, int]] = {"deepseek_vit_412m": {"depth": 2}, "gemma4_vit_167m": {"depth": 2}}
"""Arguments for networks of timm whose whole family is too large for the matrix."""

SMALLEST = (64, 96, 128, 160, 192, 224)
MOST_PARAMETERS = 150_000_000
_MODELS = torchvision.models
_TASKS = {"classification": _MODELS, "segmentation": _MODELS.segmentation, "detection": _MODELS.detection}
_DETECTOR_SIDE = 160


class RawDetector(nn.Module):
    """What a detector of torchvision computes before it chooses boxes: a dict of tensors.

    The heads of a two-stage detector see the finest map as if it were one region.
    """

    def __init__(self, detector: nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        detector: Any = self.detector
        maps = list(detector.backbone(images).values())
        if not hasattr(detector, "rpn"):
            return dict(detector.head(maps))
        objectness, deltas = detector.rpn.head(maps)
        found = {f"objectness{level}": scores for level, scores in enumerate(objectness)}
        found |= {f"deltas{level}": offsets for level, offsets in enumerate(deltas)}
        roi = detector.roi_heads
        scores, boxes = roi.box_predictor(roi.box_head(F.interpolate(maps[0], roi.box_roi_pool.output_size)))
        found |= {"box_scores": scores, "boxes": boxes}
        for kind in ("mask", "keypoint"):
            if getattr(roi, f"{kind}_head", None) is not None:
                region = F.interpolate(maps[0], getattr(roi, f"{kind}_roi_pool").output_size)
                found[kind] = getattr(roi, f"{kind}_predictor")(getattr(roi, f"{kind}_head")(region))
        return found


def torchvision_network(name: str) -> nn.Module:
    """torchvision's network of that name with random weights; a detector without its choice of boxes."""
    if name in _MODELS.list_models(module=_MODELS):
        given: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
        classifier: nn.Module = _MODELS.get_model(name, weights=None, **given)
        return classifier
    options: dict[str, Any] = {"weights": None, "weights_backbone": None}
    if name in _MODELS.list_models(module=_MODELS.segmentation):
        segmenting: nn.Module = _MODELS.get_model(name, **options)
        return segmenting
    if not name.startswith("ssd"):
        options |= {"min_size": _DETECTOR_SIDE, "max_size": _DETECTOR_SIDE}
    return RawDetector(_MODELS.get_model(name, **options))


def __getattr__(name: str) -> Callable[[], nn.Module]:
    if name in SHORTENED:
        return partial(timm.create_model, name, pretrained=False, **SHORTENED[name])
    if name in _MODELS.list_models():
        return partial(torchvision_network, name)
    raise AttributeError(name)


def torchvision_names() -> list[tuple[str, str]]:
    """Every classifier, segmentation network and detector of torchvision, with its task."""
    return [(task, name) for task, home in _TASKS.items() for name in _MODELS.list_models(module=home)]


def all_networks() -> list[tuple[str, str, dict[str, str]]]:
    """Library, name and family or task of every network, the small ones first."""
    found = [(size, "timm", name, {"family": family}) for family, name, size in timm_families()]
    for task, name in torchvision_names():
        size = _parameters(partial(torchvision_network, name)) or 20_000_000  # regnets do not build without memory
        found.append((size, "torchvision", name, {"task": task}))
    return [(library, name, about) for _, library, name, about in sorted(found, key=lambda each: each[0])]


def timm_families() -> list[tuple[str, str, int]]:
    """Each of timm's families, a small network of it and its parameters, as the file says."""
    families = json.loads(FAMILIES.read_text())
    return [(family, about["name"], about["parameters"]) for family, about in families.items()]


def choose_families() -> dict[str, dict[str, object]]:
    """The smallest network of each of timm's modules, counted on the meta device; its test networks do not count."""
    chosen: dict[str, dict[str, object]] = {}
    for family in timm.list_modules():
        sizes = {}
        for name in timm.list_models(module=family):
            if not name.startswith("test_"):
                sizes[name] = _parameters(partial(timm.create_model, name, pretrained=False))
        known = {name: size for name, size in sizes.items() if size is not None}
        if known:
            name = min(known, key=known.__getitem__)
            chosen[family] = {"name": name, "parameters": known[name]}
    return chosen


def _parameters(build: Callable[[], nn.Module]) -> int | None:
    try:
        with torch.device("meta"):
            return sum(part.numel() for part in build().parameters())
    except Exception:  # some cannot be built without memory
        return None


if __name__ == "__main__":
    FAMILIES.write_text(json.dumps(choose_families(), indent=1) + "\n")
