"""A ladder of networks from large to small, with what each gets right, as a file."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from basisprune.files import write_text


@dataclass(frozen=True)
class Rung:
    """A network of a ladder, in deployed form; `share` of all basis vectors were to be kept."""

    share: float
    parameters: int
    macs: int


@dataclass(frozen=True)
class Ladder:
    """The unpruned network and ever smaller ones; `hits` (rungs x images) says which images each gets right."""

    dataset: str
    seed: int
    rungs: tuple[Rung, ...]
    hits: npt.NDArray[np.bool_]
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    device: str
    seconds: float

    def write(self, path: Path) -> None:
        """Writes it as JSON; the hits as bits, of all but the first network where they differ from that one's."""
        record = {name: value for name, value in vars(self).items() if name != "hits"}
        record["rungs"] = [asdict(rung) for rung in self.rungs]
        coded = np.concatenate([self.hits[:1], self.hits[1:] ^ self.hits[:1]])
        packed = zlib.compress(np.packbits(coded, axis=1).tobytes(), 9)
        record["images"], record["hits"] = self.hits.shape[1], base64.b64encode(packed).decode()
        write_text(path, json.dumps(record) + "\n")

    @classmethod
    def read(cls, path: Path) -> Ladder:
        """The ladder in a file."""
        record = json.loads(path.read_text())
        rungs = tuple(Rung(**rung) for rung in record["rungs"])
        packed = np.frombuffer(zlib.decompress(base64.b64decode(record["hits"])), dtype=np.uint8)
        coded = np.unpackbits(packed.reshape(len(rungs), -1), axis=1, count=record.pop("images")).astype(np.bool_)
        hits = np.concatenate([coded[:1], coded[1:] ^ coded[:1]])
        return cls(**record | {"rungs": rungs, "hits": hits})
