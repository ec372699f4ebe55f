"""Names the class of each image: python predict_onnx.py model.onnx image.png ..."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image


def predict(model: str, images: list[str]) -> list[tuple[str, float]]:
    """The most likely class of each image and its probability."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    facts = session.get_modelmeta().custom_metadata_map
    spec, classes = json.loads(facts["basisprune.input"]), json.loads(facts["basisprune.classes"])
    height, width = spec["size"]
    filters = {"bicubic": Image.Resampling.BICUBIC, "nearest": Image.Resampling.NEAREST}
    how = filters.get(spec["interpolation"], Image.Resampling.BILINEAR)
    kind = "L" if len(spec["mean"]) == 1 else "RGB"
    opened = [Image.open(image).convert(kind).resize((width, height), how) for image in images]
    pixels = np.stack([np.asarray(image).reshape(height, width, -1) for image in opened])
    if not spec["prepares"]:
        pixels = ((pixels / 255 - spec["mean"]) / spec["std"]).astype(np.float32)
    batch = pixels if spec["layout"] == "NHWC" else pixels.transpose(0, 3, 1, 2)
    scores = session.run(None, {session.get_inputs()[0].name: np.ascontiguousarray(batch)})[0]
    shares = np.exp(scores - scores.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    return [(classes[row.argmax()] if classes else str(row.argmax()), float(row.max())) for row in shares]


if __name__ == "__main__":
    for path, (name, share) in zip(sys.argv[2:], predict(sys.argv[1], sys.argv[2:]), strict=True):
        print(f"{path}: {name} ({share:.1%})")
