"""A result as a search makes it, for the tests of results and of the report."""

from __future__ import annotations

import json
import math
from typing import Any

from basisprune.results import RunSummary

PIXEL = (
    "data:image/png;base64,"
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


def summary(**parts: Any) -> RunSummary:
    """The sample as a value, with these parts, which are JSON values, in place of its own."""
    return RunSummary.from_json(json.dumps(sample() | parts))


def sample(candidates: int = 6, layers: int = 8) -> dict[str, Any]:
    """A result as a search makes it, as JSON values; the third last candidate is chosen."""
    tried = [candidate(number, candidates) for number in range(candidates)]
    return {
        "title": "resnet18 on digits",
        "command": "basisprune compress --model resnet18 --data digits --max-drop 1% --output out/",
        "config": {"model": "resnet18", "train": {"epochs": 5, "learning_rate": 0.01}, "layers": None},
        "seed": 7,
        "versions": {"basisprune": "0.1.0", "torch": "2.6.0"},
        "device": "cpu",
        "created": "2024-05-01 12:00",
        "verdict": "82% of the parameters removed for 0.4% accuracy",
        "budget": {"kind": "max_drop", "value": 0.01},
        "classes": [str(digit) for digit in range(4)],
        "reference": {
            "accuracy": 0.978,
            "interval": [0.968, 0.986],
            "parameters": 11_170_000,
            "macs": 1_800_000_000,
            "latency_ms": 21.3,
        },
        "candidates": tried,
        "layers": [layer(number) for number in range(layers)],
        "importance": {"layer1.0.conv1": {"scales": [1.0, 0.4, 0.9], "taylor": [2.0, 0.5, 4.0]}},
        "test": {
            "before": {"accuracy": 0.975, "interval": [0.965, 0.983], "parameters": 11_170_000, "macs": 1_800_000_000},
            "after": {"accuracy": 0.9712, "interval": [0.961, 0.98], "parameters": 2_010_345, "macs": 402_000_001},
        },
        "confusion": {
            "before": [[90, 1, 0, 0], [0, 88, 3, 0], [0, 2, 91, 0], [0, 0, 0, 99]],
            "after": [[89, 2, 0, 0], [0, 87, 4, 0], [1, 2, 90, 0], [0, 0, 0, 99]],
        },
        "changed": [{"image": PIXEL, "label": "2", "before": "2", "after": "0"}],
        "latency_by": "ONNX Runtime",
        "latency": {"rows": speed_rows(), "input_shape": [3, 32, 32], "threads": 1, "repeats": 20, "clock": "cpu"},
        "files": {
            "model": {"bytes": 8_049_000, "what": "for Python"},
            "model.onnx": {"bytes": 8_061_234, "what": "for ONNX Runtime"},
            "model.int8.onnx": {"bytes": 2_100_007, "what": "8 bits", "accuracy": 0.969, "interval": [0.96, 0.98]},
        },
        "runtimes": [runtime("openvino", "OpenVINO", "model.xml", 3.2), runtime("eager", "PyTorch", "", 8.1)],
    }


def runtime(name: str, title: str, file: str, milliseconds: float) -> dict[str, Any]:
    return {
        "name": name,
        "title": title,
        "file": file,
        "bytes": 8_050_000,
        "latency_ms": milliseconds,
        "spread_ms": 0.1,
        "threads": 1,
        "difference": 2e-6 if file else 0.0,
        "compared": 64,
        "accuracy": 0.9712,
        "interval": [0.961, 0.98],
        "images": 400,
    }


def speed_rows() -> list[dict[str, Any]]:
    seconds = {("before", 1): 0.02, ("after", 1): 0.008, ("before", 32): 0.32, ("after", 32): 0.16}
    return [
        {
            "model": model,
            "backend": backend,
            "batch_size": batch,
            "seconds": time,
            "spread": 0.001,
            "speedup": seconds["before", batch] / time,
        }
        for backend in ("eager", "onnxruntime")
        for (model, batch), time in seconds.items()
    ]


def candidate(number: int, count: int) -> dict[str, Any]:
    accuracy = 0.979 - 0.03 * (number / count) ** 3
    history = [
        {
            "epoch": epoch,
            "learning_rate": 0.01,
            "train_loss": math.exp(-epoch / 4),
            "train_accuracy": accuracy - 0.2 * math.exp(-epoch),
            "val_loss": 0.1 + math.exp(-epoch / 3),
            "val_accuracy": accuracy - 0.3 * math.exp(-epoch),
        }
        for epoch in range(1, 13)
    ]
    return {
        "name": f"basis {number}",
        "steps": [{"name": "decomposed", "ratio": None}, {"name": "basis", "ratio": 0.5}],
        "basis_ratio": round(0.9 * (number + 1) / count, 4),
        "filter_ratio": 0.1,
        "accuracy": accuracy,
        "interval": [accuracy - 0.011, accuracy + 0.008],
        "drop": 0.978 - accuracy,
        "drop_interval": [0.968 - accuracy, 0.988 - accuracy],
        "passed": number <= count - 3,
        "undecided": number == count - 2,
        "chosen": number == count - 3,
        "parameters": 11_170_000 - 9_000_123 * number // count,
        "macs": 1_800_000_000 - 1_400_000_123 * number // count,
        "latency_ms": 21.3 - 12 * number / count,
        "history": history,
    }


def layer(number: int) -> dict[str, Any]:
    whole = 64 * 2 ** (number // 40)
    return {
        "name": f"layer{number}.conv",
        "kind": "conv 3x3",
        "rank": None if number % 5 == 4 else max(1, whole * (number % 7 + 1) // 9),
        "full_rank": whole,
        "parameters": 1_000 * number + 17,
        "macs": 100_000 * number + 3,
        "note": "depthwise: a split gains nothing" if number % 5 == 4 else "",
        "channels": whole // 2,
        "full_channels": whole,
    }
