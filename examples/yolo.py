"""A YOLO network that Ultralytics has trained, made smaller within a loss of mAP50-95 that is certified.

    python examples/yolo.py [FOLDER]

The pictures are drawn here: discs and boxes on noise, in folders as Ultralytics reads them. Replace `drawn`
by your own dataset and `trained` by your own best.pt; then two lines are left. It needs Ultralytics, which is under the
AGPL-3.0: pip install 'basisprune[onnx,report,ultralytics]'.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from PIL import Image
from ultralytics import YOLO

import basisprune as bp
from basisprune.integrations import ultralytics as yolo

SIDE = 96
PARTS = {"train": 320, "val": 96, "confirm": 192, "test": 96}
SETTINGS = {"imgsz": SIDE, "batch": 16, "workers": 0}


def drawn(folder: Path, parts: dict[str, int]) -> Path:
    """The YAML of a dataset with so many pictures in each part; those under `confirm:` certify the budget."""
    for seed, (part, count) in enumerate(parts.items()):
        random = np.random.default_rng(seed)
        for name in ("images", "labels"):
            (folder / part / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            picture = 0.2 * random.random((SIDE, SIDE, 3)) + 0.2 * random.random(3)
            lines = [shape(picture, int(kind), random) for kind in random.integers(0, 2, random.integers(1, 4))]
            Image.fromarray((255 * picture).astype(np.uint8)).save(folder / part / "images" / f"{number:04d}.png")
            (folder / part / "labels" / f"{number:04d}.txt").write_text("\n".join(lines))
    entries = "".join(f"{part}: {part}/images\n" for part in parts)
    (folder / "data.yaml").write_text(f"path: {folder.absolute()}\n{entries}names: {{0: disc, 1: box}}\n")
    return folder / "data.yaml"


def shape(picture: np.ndarray, kind: int, random: np.random.Generator) -> str:
    """Draw a disc (0) or a box (1) into the picture, and return its label: class, centre, width and height."""
    width, height = random.integers(SIDE // 5, SIDE // 2, 2).tolist()
    height = width if kind == 0 else height
    x, y = random.integers(0, SIDE - width) + width / 2, random.integers(0, SIDE - height) + height / 2
    rows, columns = np.mgrid[:SIDE, :SIDE] + 0.5
    across, down = abs(columns - x) / width, abs(rows - y) / height  # 1/2 at the border
    picture[(across**2 + down**2 <= 0.25) if kind == 0 else (np.maximum(across, down) <= 0.5)] = (
        0.4 + 0.6 * random.random(3)
    )
    return f"{kind} {x / SIDE:.5f} {y / SIDE:.5f} {width / SIDE:.5f} {height / SIDE:.5f}"


def trained(model: str, data: Path, folder: Path, epochs: int) -> Path:
    """The best.pt of a training by Ultralytics, from random weights; yours may take hours on a GPU."""
    network = YOLO(model)
    options = {
        "mosaic": 0.0,
        "optimizer": "AdamW",
        "lr0": 2e-3,
        "warmup_epochs": 1,
        "amp": False,
        "plots": False,
        "val": False,
    }
    network.train(
        data=str(data), epochs=epochs, project=str(folder), name="trained", device="cpu", **SETTINGS, **options
    )
    return Path(network.trainer.best)


def main(
    folder: str | Path = "yolo-example",
    model: str = "yolo11n.yaml",
    parts: dict[str, int] = PARTS,
    epochs: tuple[int, int] = (25, 2),
    **options: object,
) -> bp.Compressed:
    folder = Path(folder)
    data = drawn(folder / "data", parts)
    best = trained(model, data, folder, epochs[0])
    budget = options or {"max_drop": 0.05, "search": bp.SearchConfig(polish=False, tolerance=0.5)}

    result = yolo.compress(best, data, output=folder / "small", settings=SETTINGS, epochs=epochs[1], **budget)
    small = YOLO(folder / "small" / "yolo.pt")  # predict, val and export as usual

    before, after = result.summary.test.before, result.summary.test.after
    print(result.summary.verdict)
    print(f"mAP50-95 on the test images: {before.accuracy:.1%} before, {after.accuracy:.1%} after")
    print(f"parameters: {before.parameters:,} before, {after.parameters:,} after")
    found = small.val(data=str(data), split="test", rect=False, plots=False, verbose=False, **SETTINGS)
    print(f"the same by Ultralytics, of small/yolo.pt: {found.box.map:.1%}")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:2])
