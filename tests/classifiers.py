"""Small and well-known classifiers, and what the tests of transfer ask of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from networks import IMAGE, NETWORKS
from torch import Tensor, nn
from torch.nn import functional as F

from basisprune.errors import BasisPruneError, ModelError
from basisprune.transfer.body import NormedConv
from basisprune.transfer.model import transfer_model

IMAGES = [name for name, network in NETWORKS.items() if network.shape == IMAGE]


def normed(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, NormedConv)]


def weights_with_statistics(model: nn.Module) -> int:
    """The count of weights as Keras reports it: with the running statistics of batch norms."""
    return sum(v.numel() for key, v in model.state_dict().items() if not key.endswith("num_batches_tracked"))


def input_of(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    """What reaches the layer when the model runs in eval mode."""
    caught: list[Tensor] = []
    hook = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: caught.append(args[0].clone()))
    model(x)
    hook.remove()
    return caught[0]


def tv(name: str, **settings: Any) -> nn.Module:
    return getattr(torchvision.models, name)(weights=None, **settings).eval()


class Tiny(nn.Module):
    """A conv net with a head, whose forward can be changed."""

    def __init__(self, finish: Callable[[Tiny, Tensor], Any] | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc = nn.Linear(6, 4)
        self.finish = finish

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.conv(x))
        return self.finish(self, x) if self.finish else self.fc(F.adaptive_avg_pool2d(self.pool(x), 1).flatten(1))


def refused(
    message: str, backbone: str | nn.Module, error: type[BasisPruneError] = ModelError, **settings: Any
) -> None:
    with pytest.raises(error, match=message):
        transfer_model(backbone, settings.pop("num_classes", 5), **{"input_size": 16, **settings})
