"""A network of somebody's own, trained on the tiny images by somebody's own loop."""

from __future__ import annotations

from functools import cache

import torch
from tiny import tiny_images
from torch import Tensor, nn
from torch.nn import functional as F

from basisprune.data import PreparedBatches
from basisprune.transfer.hints import Hints
from basisprune.types import InputSpec

SPEC = InputSpec((16, 16), (0.5,) * 3, (0.25,) * 3)
HINTS = Hints(SPEC.size, SPEC.mean, SPEC.std)
PREPARED = {"size": 16, "mean": [0.5], "std": [0.25]}


class Own(nn.Module):
    """Nothing here has a name that basisprune knows."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.middle = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(12)
        self.last = nn.Linear(12, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu(self.first(images))
        x = F.relu(self.norm(self.middle(x)))
        scores: Tensor = self.last(x.mean((2, 3)))
        return scores


@cache
def _state(order: tuple[int, ...]) -> dict[str, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Own()
        optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
        batches = PreparedBatches(tiny_images(60, seed=1), SPEC, batch_size=12)
        for _ in range(4):
            for images, labels in batches:
                optimizer.zero_grad()
                F.cross_entropy(network(images), torch.tensor(order)[labels]).backward()
                optimizer.step()
    return network.state_dict()


def own_network() -> nn.Module:
    """The architecture, as a factory that a command line can name."""
    return Own()


def trained(order: tuple[int, ...] = (0, 1, 2)) -> Own:
    """The network, trained with its classes in that order, in eval mode."""
    network = Own()
    network.load_state_dict(_state(order))
    return network.eval()
