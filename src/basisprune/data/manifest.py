"""Which images a run uses, each in one role: by name, label and a hash of its content."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from basisprune.errors import CheckpointError, ConfigError, PlanError
from basisprune.files import read_bytes, write_text
from basisprune.types import JsonValue

IMAGES = "images.json"
"""What the manifest is called in a run's folder."""
Role: TypeAlias = Literal["train", "val", "confirm", "test"]
_MOST_SHOWN = 10


class Entry(NamedTuple):
    """An image: its path from the folder of the data or its index, its label, and the SHA-256 of its content.

    The hash is empty for an image of a dataset that changes its images at random.
    """

    name: str
    label: int
    sha256: str


@dataclass(frozen=True)
class LeftOut:
    """An image that is in no part, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Manifest(JsonValue):
    """The images of a run by role, the names of their classes, and what counts as white in images of more than 8 bits.

    `units` are the numbers of the units of images that belong together, for the parts that have any.

    >>> images = (Entry("ant/0.png", 0, ""), Entry("bee/0.png", 1, ""))
    >>> Manifest(("ant", "bee"), {"train": images}).digest[:8]
    '0d52bfd3'
    """

    classes: tuple[str, ...]
    parts: Mapping[Role, tuple[Entry, ...]]
    white: int | None = None
    left_out: tuple[LeftOut, ...] = ()
    units: Mapping[Role, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        faults = [
            f"units: {len(units)} of {role}, which has {len(self.parts.get(role, ()))} images"
            for role, units in self.units.items()
            if len(units) != len(self.parts.get(role, ()))
        ]
        if not self.parts.get("train"):
            faults.append("parts: no training images")
        for role, entries in self.parts.items():
            # Examples of a task without classes all have the label 0.
            wrong = [each for each in entries if not 0 <= each.label < max(len(self.classes), 1)]
            faults += [f"{role}: {each.name}: label {each.label} for {len(self.classes)} classes" for each in wrong[:3]]
        if faults:
            raise ConfigError.of("Manifest", faults)

    @property
    def digest(self) -> str:
        """A hash of all images in their roles; what was left out is no part of it."""
        digest = hashlib.sha256(json.dumps([self.classes, self.white]).encode())
        for role, entries in sorted(self.parts.items()):
            digest.update(json.dumps([role, entries]).encode())
        for role, units in sorted(self.units.items()):
            digest.update(json.dumps([role, units]).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class _Sealed(JsonValue):
    """A manifest as it lies on the disk, with its own hash."""

    sha256: str
    images: Manifest = field(repr=False)


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Writes the manifest to the file, whole or not at all."""
    write_text(path, _Sealed(manifest.digest, manifest).to_json() + "\n")


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file; raises CheckpointError for one that cannot be read, is damaged or was changed."""
    try:
        sealed = _Sealed.from_json(read_bytes(path))
    except (OSError, PlanError) as error:
        said = error.strerror if isinstance(error, OSError) else "; ".join(error.faults[:3])
        raise CheckpointError(f"{path}: the list of the run's images is damaged ({said}); {_WAY_OUT}") from error
    if sealed.sha256 != sealed.images.digest:
        raise CheckpointError(f"{path}: the list of the run's images was changed or is damaged; {_WAY_OUT}")
    return sealed.images


_WAY_OUT = "bring the file back from a copy, or start the run anew in another folder"


def changes(old: Manifest, new: Manifest) -> list[str]:
    """What differs between two manifests, in words: the number of images of each kind, and the first of them."""
    found = [] if old.classes == new.classes else [f"classes: {list(old.classes)} -> {list(new.classes)}"]
    if old.white != new.white:
        found.append(f"white: {old.white} -> {new.white}")
    if old.units != new.units:
        found.append("which images belong together: copies, or the groups")
    before, after = (
        {entry.name: (role, entry) for role, part in each.parts.items() for entry in part} for each in (old, new)
    )
    kinds: dict[str, list[str]] = {
        "missing": [name for name in before if name not in after],
        "new": [name for name in after if name not in before],
        "of another content": [name for name in before.keys() & after.keys() if before[name][1] != after[name][1]],
        "in another part": [name for name in before.keys() & after.keys() if before[name][0] != after[name][0]],
    }
    found += [f"{len(names)} images {kind}: {_first(sorted(names))}" for kind, names in kinds.items() if names]
    return found or [f"the order or number of the images ({_counts(old)} -> {_counts(new)})"]


def _first(names: list[str]) -> str:
    return ", ".join(names[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")


def _counts(manifest: Manifest) -> dict[str, int]:
    return dict(Counter({role: len(part) for role, part in manifest.parts.items()}))
