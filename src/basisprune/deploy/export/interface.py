"""What a runtime is to the rest of the package: a value whose functions write, describe and open its files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from basisprune.deploy.export.common import PixelLayout, outputs_of
from basisprune.deploy.export.facts import FileFacts, input_facts, read_facts
from basisprune.errors import MissingExtraError, ModelError, pass_on
from basisprune.types import InputSpec

_T = TypeVar("_T")
Run: TypeAlias = Callable[[NDArray[np.generic]], NDArray[np.generic]]
"""A batch of what the file takes -> its scores (N, classes)."""


@dataclass(frozen=True)
class Order:
    """What to write: the network, behind the preparation of its images if there is a layout of their pixels.

    `example` is a batch of two of what it takes.
    """

    network: nn.Module
    example: Tensor
    spec: InputSpec
    layout: PixelLayout | None
    classes: tuple[str, ...] | None

    @property
    def notes(self) -> dict[str, str]:
        """What the file has to say of itself, as JSON texts by name; `read_facts` reads them."""
        facts = {"input": input_facts(self.spec, self.layout, self.example), "classes": self.classes}
        return {name: json.dumps(value) for name, value in facts.items()}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes, or their numbers."""
        return self.classes or tuple(map(str, range(outputs_of(self.network, self.example[:1]).shape[-1])))


@dataclass(frozen=True)
class Runtime:
    """One runtime and the format of its files.

    The extra of its name has its `packages`; one without any needs nothing but basisprune. `suffixes` are those of
    all files that belong together, that of the one to open first. `write` is given the path of that one in an empty
    folder, `open` that path and the number of threads, and `notes` gives back what `Order.notes` said. `quantise`,
    where there is 8-bit arithmetic, makes an int8 file of a float one from batches of images. Errors of the runtime's
    own become ModelErrors elsewhere. What does not take pixels is given prepared images, and what does not take
    batches single ones. Outputs may differ from PyTorch's by the share `tolerance` of the largest.
    """

    name: str
    title: str
    what: str
    packages: tuple[str, ...]
    suffixes: tuple[str, ...]
    write: Callable[[Order, Path], None]
    open: Callable[[Path, int], Run]
    notes: Callable[[Path], Mapping[str, str]]
    quantise: Callable[[Path, Path, Sequence[Tensor]], object] | None = None
    takes_pixels: bool = True
    takes_batches: bool = True
    tolerance: float = 1e-4

    @property
    def is_installed(self) -> bool:
        """Whether all its packages are there."""
        return all(find_spec(package) is not None for package in self.packages)

    def require(self) -> None:
        """Raises MissingExtraError for the first of its packages that is not installed."""
        for package in self.packages:
            if find_spec(package) is None:
                raise MissingExtraError(package, extra=self.name)

    def files(self, stem: str = "model") -> tuple[str, ...]:
        """The names of the files that belong together, the one to open first."""
        return tuple(f"{stem}{suffix}" for suffix in self.suffixes)

    def facts(self, path: Path) -> FileFacts:
        """What the file says of itself; raises ModelError where it says nothing, or cannot be read."""
        return read_facts(path, said_by(self.title, path, lambda: self.notes(path)))

    def scores(self, run: Run, batch: Tensor) -> Tensor:
        """The scores (N, classes) of a batch, which goes through image by image where the runtime wants that."""
        given = np.ascontiguousarray(batch.cpu().numpy())
        parts = [given] if self.takes_batches else np.split(given, len(given))
        found = said_by(self.title, given.shape, lambda: [np.asarray(run(part)) for part in parts])
        return torch.from_numpy(np.concatenate(found)).float()


def said_by(title: str, where: object, work: Callable[[], _T]) -> _T:
    """What the work gives; whatever else a runtime raises becomes a ModelError that says where."""
    try:
        return work()
    except ModelError:
        raise
    except Exception as error:  # runtimes raise errors of their own kinds
        pass_on(error, where)
        reason = " ".join(str(error).split())[:500]
        raise ModelError(f"{where}: {title} cannot take it ({type(error).__name__}: {reason})") from error
