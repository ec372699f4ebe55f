"""One training among many, as a value that goes to another process or machine as JSON."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

import pydantic

from basisprune.errors import BasisPruneError, ConfigError, DataError, MissingExtraError, ModelError
from basisprune.files import read_checked, write_checked
from basisprune.types import JsonValue

Kind: TypeAlias = Literal["compress", "train", "probe", "start", "search", "deliver"]
"""What is done: a whole run, a training without pruning, or one of the stages of a portfolio, in their order."""

_FINAL = (ConfigError, DataError, ModelError, MissingExtraError)
_LONGEST_NAME = 80


@dataclass(frozen=True)
class Backbone(JsonValue):
    """A network to start from, and the folder of its trainings; `weights` is a local file for a timm name.

    With `cached`, its weights are on this machine and nothing is asked of the network.
    """

    name: str
    folder: str
    weights: str | None = None
    cached: bool = False


@dataclass(frozen=True)
class Cell(JsonValue):
    """One training or search: what to start from, on which images, with which options, and the folder it is done in.

    Of a portfolio, `root` is the folder of the whole, `epochs` how long a probe trains, and `best` the backbone that
    accuracies are compared with. `code` are the references that may be imported for it, as somebody typed them.
    """

    name: str
    kind: Kind
    backbone: Backbone
    data: str
    options: dict[str, pydantic.JsonValue] = field(default_factory=dict)
    root: str = ""
    epochs: int = 0
    best: Backbone | None = None
    command: str = ""
    code: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where it is done."""
        return Path(self.backbone.folder)

    @property
    def log(self) -> Path:
        """The file that its progress goes to, beside its folder."""
        return self.folder.with_name(f"{self.folder.name}.log")

    @property
    def result(self) -> Path:
        """The file that a stage of a portfolio leaves when it is done; another one in relation to another best."""
        part = f"{self.kind}-{self.epochs}" if self.epochs else str(self.kind)
        part += "" if self.best is None else f"-against-{slug(self.best.name)}"
        return self.folder.with_name(f"{self.folder.name}.{part}.json")


@dataclass(frozen=True)
class Failure(JsonValue):
    """Why a cell failed; one that is `final` would fail again."""

    error: str
    final: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure that an exception stands for: wrong settings, data or models stay wrong."""
        said = str(error) if isinstance(error, BasisPruneError) else f"{type(error).__name__}: {error}"
        return cls(said, isinstance(error, _FINAL))


def slug(name: str) -> str:
    """The name as that of a folder: letters, digits, dots and dashes, and a checksum where others were lost.

    >>> slug("resnet50"), slug("photos/large set")
    ('resnet50', 'photos-large-set-23e998')
    """
    plain = re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.")[:_LONGEST_NAME]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:6]}".strip("-")


def absolute(source: str) -> str:
    """A path as others find it too, who work in another folder; a name as it is."""
    try:
        path = Path(source).expanduser()
        return str(path.resolve()) if path.exists() else source
    except (OSError, RuntimeError, ValueError):
        return source


def write_cell(path: Path, cell: Cell) -> None:
    """Writes the cell with its checksum."""
    write_checked(path, cell.to_json().encode())


def read_cell(path: Path) -> Cell:
    """The cell in the file; raises CheckpointError or PlanError if it is none."""
    return Cell.from_json(read_checked(path))
