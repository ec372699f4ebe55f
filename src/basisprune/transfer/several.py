"""A network of several inputs as one of one, which every stage takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from basisprune.torchkit.running import several


@dataclass(frozen=True)
class InputPart:
    """One of several inputs: its name, None for one by its place, the shape of a row, and its type."""

    name: str | None
    shape: tuple[int, ...]
    dtype: torch.dtype


class SeveralInputs(nn.Module):
    """A network of several inputs, which may lie behind each other in one tensor (N, 1, numbers), as `packed` has them.

    So it is scored, pruned and written as any other. Given more than one tensor, a tuple or a dict, it passes them on.

    >>> network = SeveralInputs.of(nn.Bilinear(2, 3, 4), (torch.zeros(5, 2), torch.zeros(5, 3)))
    >>> network(torch.zeros(5, 1, 5)).shape == network(torch.zeros(5, 2), torch.zeros(5, 3)).shape == (5, 4)
    True
    """

    def __init__(self, network: nn.Module, parts: tuple[InputPart, ...]) -> None:
        super().__init__()
        self.network, self.parts = network, parts

    @property
    def names(self) -> list[str]:
        """What the inputs are called, in their order."""
        return [part.name or f"input{place}" for place, part in enumerate(self.parts)]

    @classmethod
    def of(cls, network: nn.Module, inputs: object) -> SeveralInputs:
        """Take the network, with the parts that the inputs of a batch have."""
        found = several(inputs).items()
        names = [name if isinstance(name, str) else None for name, _ in found]
        return cls(
            network,
            tuple(
                InputPart(name, tuple(each.shape[1:]), each.dtype) for name, (_, each) in zip(names, found, strict=True)
            ),
        )

    def forward(self, *inputs: object, **named: object) -> object:
        if not named and len(inputs) == 1:
            match inputs[0]:
                case Tensor() as rows:
                    inputs = self.unpacked(rows)
                case dict() as given:
                    named, inputs = given, ()
                case list() | tuple() as given:
                    inputs = tuple(given)
        places = [part.name for part in self.parts]
        if inputs and None not in places:
            named, inputs = {str(name): each for name, each in zip(places, inputs, strict=True)} | named, ()
        return self.network(*inputs, **named)

    def unpacked(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return the inputs that lie in such a tensor, each in its shape and type."""
        start, found = 0, []
        for part in self.parts:
            size = math.prod(part.shape)
            each = rows[:, 0, start : start + size].reshape(-1, *part.shape)
            found.append(each if part.dtype.is_floating_point else each.to(part.dtype))
            start += size
        return tuple(found)
