"""Exported files and what they compute, for the tests of exports."""

from __future__ import annotations

import json
from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

NAMES = ["red", "green", "blue"]


def run(path: Path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": x.numpy()})[0])


def close(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and (one - other).abs().max() <= 1e-4 * one.abs().max()


def pixels(count: int = 5) -> Tensor:
    return torch.randint(0, 256, (count, 16, 16, 3), dtype=torch.uint8)


def metadata(path: Path) -> dict:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    return {key: json.loads(value) for key, value in facts.items() if key.startswith("basisprune.")}
