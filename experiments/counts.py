"""Total and trainable parameters after decomposition (the paper's Table 4), from networks with random weights.

    python experiments/counts.py

Writes results/counts.json. The paper counts as Keras does, with BN's running statistics, and Keras' ResNet-50 has a
bias in every conv, which BN makes superfluous and ours leaves out; it is added here.
"""

from __future__ import annotations

import json
from pathlib import Path

from torch import nn

from basisprune import decompose, measure, transfer_model
from basisprune.files import write_text
from basisprune.torchkit.surgery import find_layers
from basisprune.training.trainable import set_trainable

COUNTS = Path(__file__).parent / "results" / "counts.json"


def count(name: str) -> dict[str, int]:
    """The parameters of the decomposed network for ten classes, in all and those that are trained."""
    model = transfer_model(name, 10, input_size=64)
    biases = sum(conv.out_channels for _, conv in find_layers(model, nn.Conv2d)) if name == "resnet50" else 0
    decomposed = decompose(model)
    set_trainable(decomposed)
    report = measure(decomposed)
    return {"total": report.paper_parameters + biases, "trainable": report.trainable}


def main() -> None:
    counts = {name: count(name) for name in ("vgg16", "densenet121", "resnet50")}
    write_text(COUNTS, json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
