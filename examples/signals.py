"""A 1d conv network that reads two numbers off a signal, made small within a loss of R2.

    python examples/signals.py [OUTPUT]

The signals are sums of two sines and noise; the network tells the frequency of each. Replace `Signals` by your own
loader, which may yield anything: here batches are dicts, and `read` says what is what.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import basisprune as bp

LENGTH = 128


class Signals:
    """Batches of signals (N, 2, 128) with their frequencies (N, 2), the same each time; any iterable will do."""

    def __init__(self, count: int, seed: int, batch_size: int = 32) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.frequencies = torch.rand(count, 2, generator=generator)
        time = torch.arange(LENGTH) / LENGTH
        phases = 2 * math.pi * torch.rand(count, 2, 1, generator=generator)
        waves = torch.sin(2 * math.pi * (3 + 12 * self.frequencies[..., None]) * time + phases)
        self.signals = waves + 0.3 * torch.randn(count, 2, LENGTH, generator=generator)
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for signals, frequencies in zip(
            self.signals.split(self.batch_size), self.frequencies.split(self.batch_size), strict=True
        ):
            yield {"signal": signals, "frequency": frequencies}


def network(width: int = 16) -> nn.Module:
    """Three convs with their norms, and a linear layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((2, width), (width, 2 * width), (2 * width, 2 * width)):
        layers += [nn.Conv1d(inputs, outputs, 7, stride=2, padding=3, bias=False), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(8 * width, 2))


def trained(model: nn.Module, loader: Signals, epochs: int) -> nn.Module:
    """The network after your own training, whatever that is."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(batch["signal"]), batch["frequency"]).backward()
            optimizer.step()
    return model.eval()


def main(output: str | None = None, epochs: int = 12) -> bp.Compressed:
    torch.manual_seed(0)
    train, val, confirm, test = (Signals(count, seed) for seed, count in enumerate((512, 256, 1536, 192)))
    task = bp.regression("r2", limits=(0, 1), read=lambda batch: (batch["signal"], batch["frequency"]))
    result = bp.compress(
        trained(network(), train, epochs),
        bp.Loaders(train=train, val=val, confirm=confirm, test=test),
        task=task,
        max_drop=0.05,
        epochs=3,
        search=bp.SearchConfig(polish=False, tolerance=0.5),
        output=output,
    )
    before, after = result.summary.test.before, result.summary.test.after
    print(result.summary.verdict)
    print(f"R2 on the test signals: {before.accuracy:.3f} before, {after.accuracy:.3f} after")
    print(f"multiply-adds: {before.macs:,} before, {after.macs:,} after")
    return result


if __name__ == "__main__":
    main(*sys.argv[1:2])
