"""A ladder of networks from large to small, with the answers of each, as a file."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import studies

Bytes = npt.NDArray[np.uint8]
_SAME = 255


@dataclass(frozen=True)
class Rung:
    """A network of a ladder, in deployed form; `share` of all basis vectors were to be kept."""

    share: float
    parameters: int
    macs: int


@dataclass(frozen=True)
class Ladder:
    """The unpruned network and ever smaller ones; `answers` (rungs x images) are the classes that each names.

    At most 255 classes, as numbers of 8 bits.
    """

    dataset: str
    seed: int
    rungs: tuple[Rung, ...]
    labels: Bytes
    answers: Bytes
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str
    seconds: float

    @cached_property
    def hits(self) -> npt.NDArray[np.bool_]:
        """Which images each network gets right."""
        found: npt.NDArray[np.bool_] = self.answers == self.labels
        return found

    def write(self, study: Path) -> None:
        """Write it into the study; of all but the first network, only the answers that differ from that one's."""
        record = {field.name: getattr(self, field.name) for field in fields(self)}
        record["rungs"] = [asdict(rung) for rung in self.rungs]
        differing = np.where(self.answers[1:] == self.answers[0], _SAME, self.answers[1:])
        record["images"], record["labels"] = len(self.labels), _packed(self.labels)
        record["answers"] = _packed(np.concatenate([self.answers[:1], differing]))
        studies.add(study, f"{self.dataset}-{self.seed}", record)

    @classmethod
    def read(cls, study: Path) -> list[Ladder]:
        """Read all ladders of the study."""
        return [cls._of(dict(record)) for record in studies.read(study).values()]

    @classmethod
    def _of(cls, record: dict[str, Any]) -> Ladder:
        images = record.pop("images")
        record["rungs"] = tuple(Rung(**rung) for rung in record["rungs"])
        record["labels"], answers = _unpacked(record["labels"]), _unpacked(record["answers"]).reshape(-1, images)
        return cls(**record | {"answers": np.where(answers == _SAME, answers[:1], answers)})


def _packed(numbers: Bytes) -> str:
    return base64.b64encode(zlib.compress(numbers.astype(np.uint8).tobytes(), 9)).decode()


def _unpacked(text: str) -> Bytes:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=np.uint8)
