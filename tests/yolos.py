"""Small YOLO networks, and pictures with shapes for each of their tasks, on the disk as Ultralytics reads them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

SIDE = 64
BODY = """
nc: 2
kpt_shape: [1, 2]
scales: {n: [1.0, 0.125, 256]}
backbone:
  - [-1, 1, Conv, [64, 3, 2]]
  - [-1, 1, Conv, [128, 3, 2]]
  - [-1, 1, C3k2, [128, False, 0.5]]
  - [-1, 1, Conv, [256, 3, 2]]
  - [-1, 1, C3k2, [256, False]]
  - [-1, 1, Conv, [256, 3, 2]]
  - [-1, 1, SPPF, [256, 5]]
head:
"""
NECK = """
  - [-1, 1, nn.Upsample, [None, 2, nearest]]
  - [[-1, 4], 1, Concat, [1]]
  - [-1, 1, C3k2, [256, False]]
"""
HEADS = {
    "detect": f"{NECK}\n  - [[9, 6], 1, Detect, [nc]]\n",
    "segment": f"{NECK}\n  - [[9, 6], 1, Segment, [nc, 8, 64]]\n",
    "pose": f"{NECK}\n  - [[9, 6], 1, Pose, [nc, kpt_shape]]\n",
    "classify": "  - [-1, 1, Classify, [nc]]\n",
}
SUFFIXES = {"detect": "", "segment": "-seg", "pose": "-pose", "classify": "-cls"}
PARTS = {"train": 48, "val": 32, "confirm": 24, "test": 16}


def network_of(task: str, folder: Path) -> Path:
    """The YAML of a network for the task."""
    path = folder / f"yolo11n-tiny{SUFFIXES[task]}.yaml"
    path.write_text(BODY + HEADS[task])
    return path


def data_of(task: str, folder: Path, parts: dict[str, int] | None = None) -> Path:
    """A dataset of discs and boxes: its YAML, or its folder for a classifier."""
    parts = parts or PARTS
    for seed, (part, count) in enumerate(parts.items()):
        random = np.random.default_rng(seed)
        for number in range(count):
            picture = 0.3 * random.random((SIDE, SIDE, 3))
            kinds = [number % 2] if task == "classify" else random.integers(0, 2, random.integers(1, 3)).tolist()
            lines = [_drawn(picture, kind, task, random) for kind in kinds]
            place = folder / part / ("images" if task != "classify" else ("box", "disc")[kinds[0]])
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray((255 * picture).astype(np.uint8)).save(place / f"{number:03d}.png")
            if task != "classify":
                (folder / part / "labels").mkdir(exist_ok=True)
                (folder / part / "labels" / f"{number:03d}.txt").write_text("\n".join(lines))
    if task == "classify":
        return folder
    path, entries = folder / "data.yaml", "".join(f"{part}: {part}/images\n" for part in parts)
    path.write_text(f"path: {folder}\n{entries}names: {{0: box, 1: disc}}\nkpt_shape: [1, 2]\n")
    return path


def _drawn(picture: np.ndarray, kind: int, task: str, random: np.random.Generator) -> str:
    """Draw a box (0) or a disc (1), and return its label."""
    size = int(random.integers(SIDE // 4, SIDE // 2))
    left, top = random.integers(0, SIDE - size, 2).tolist()
    rows, columns = np.mgrid[:SIDE, :SIDE]
    x, y, half = left + size / 2, top + size / 2, size / 2
    across, down = abs(columns + 0.5 - x), abs(rows + 0.5 - y)
    inside = np.maximum(across, down) <= half if kind == 0 else across**2 + down**2 <= half**2
    picture[inside] = 0.5 + 0.5 * random.random(3)
    turns = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    outline = {0: [(-1, -1), (1, -1), (1, 1), (-1, 1)], 1: list(zip(np.cos(turns), np.sin(turns), strict=True))}[kind]
    numbers = {
        "detect": [x, y, size, size],
        "segment": [value for a, b in outline for value in (x + half * a, y + half * b)],
        "pose": [x, y, size, size, x, top],
        "classify": [],
    }[task]
    return " ".join([str(kind), *(f"{value / SIDE:.5f}" for value in numbers)])
