"""Which images a run uses, each in one role: written down by name, label and hash, and found again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np

from basisprune.callback import Callback, NullCallback
from basisprune.data.copies import OPENED_AT_ONCE, for_each, look_at, looks_of
from basisprune.data.datasets import LabelledImages, base_of, in_units, take
from basisprune.data.decode import Look
from basisprune.data.folders import FolderImages
from basisprune.data.split import Splits, names_of, white_of
from basisprune.errors import CheckpointError, ConfigError, DataError
from basisprune.files import read_bytes, sealed, unsealed, write_text
from basisprune.types import JsonValue

IMAGES = "images.json"
"""The name of the manifest in a run's folder."""
UNLABELLED = "unlabelled.json"
"""The name of that of the images without labels."""
Role: TypeAlias = Literal["train", "val", "confirm", "test"]
ROLES: tuple[Role, ...] = get_args(Role)
_MOST_SHOWN, _MOST_BYTES = 10, 256 << 20
_PUT_BACK = "put the images back as they were, or start the run again in another folder"


class Entry(NamedTuple):
    """An image: its path or index, its label, and the SHA-256 of its content, empty if that changes at random."""

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
    """The images of a run by role, their classes, and the white level of images of more than 8 bits.

    `units` number the images that belong together, for the parts that have any.

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
        sizes = {role: len(self.parts.get(role, ())) for role in ROLES}
        faults = [
            f"units: {len(units)} of {role}, which has {sizes.get(role, 0)} images"
            for role, units in self.units.items()
            if len(units) != sizes.get(role, 0)
        ]
        if not sizes["train"]:
            faults.append("parts: no training images")
        for role, entries in self.parts.items():
            # Examples of a task without classes all have the label 0.
            wrong = [each for each in entries if not 0 <= each.label < max(len(self.classes), 1)]
            faults += [f"{role}: {each.name}: label {each.label} for {len(self.classes)} classes" for each in wrong[:3]]
        if faults:
            raise ConfigError.of("Manifest", faults)

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(json.dumps([self.classes, self.white]).encode())
        for listed in (self.parts, self.units):
            for role, rows in sorted(listed.items()):
                digest.update(json.dumps([role, rows]).encode())
        return digest.hexdigest()


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write the manifest to the file, whole or not at all."""
    write_text(path, sealed(manifest.to_json()))


def read_manifest(path: Path) -> Manifest:
    """Read the manifest in a file; raise CheckpointError if it cannot be read, is damaged or was changed."""
    try:
        return Manifest.from_json(json.dumps(unsealed(read_bytes(path, most=_MOST_BYTES))))
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else "; ".join(getattr(error, "faults", [str(error)])[:3])
        raise CheckpointError(
            f"{path}: the list of the run's images is damaged or was changed ({said}); restore the file from a "
            "copy, or start the run again in another folder"
        ) from error


def changes(old: Manifest, new: Manifest) -> list[str]:
    """Say how two manifests differ: the number of images of each kind, and the first of them."""
    found = [] if old.classes == new.classes else [f"classes: {list(old.classes)} -> {list(new.classes)}"]
    if old.white != new.white:
        found.append(f"white: {old.white} -> {new.white}")
    if old.units != new.units:
        found.append("which images belong together: copies, or the groups")
    before, after = (
        {entry.name: (role, entry) for role, part in each.parts.items() for entry in part} for each in (old, new)
    )
    both = before.keys() & after.keys()
    kinds = {
        "missing": before.keys() - after.keys(),
        "new": after.keys() - before.keys(),
        "of another content": {name for name in both if before[name][1] != after[name][1]},
        "in another part": {name for name in both if before[name][0] != after[name][0]},
    }
    for kind, names in kinds.items():
        if names:
            first = ", ".join(sorted(names)[:_MOST_SHOWN]) + (", ..." if len(names) > _MOST_SHOWN else "")
            found.append(f"{len(names)} images {kind}: {first}")
    counts = [{role: len(part) for role, part in each.parts.items()} for each in (old, new)]
    return found or [f"the order or number of the images ({counts[0]} -> {counts[1]})"]


def manifest_of(splits: Splits, callback: Callback | None = None) -> Manifest:
    """Return which images are in which labelled part; opens those that were not opened yet."""
    look_at(splits.parts.values(), callback)
    names = names_of(splits)
    parts: dict[Role, tuple[Entry, ...]] = {}
    units: dict[Role, tuple[int, ...]] = {}
    left_out: dict[tuple[int, int], LeftOut] = {}
    for name, part in splits.parts.items():
        if not part.labelled:
            continue
        role = cast("Role", name)
        rows = zip(names[name], part.labels.tolist(), looks_of(part), strict=True)
        parts[role] = tuple(Entry(called, label, look.sha256) for called, label, look in rows)
        if part.units is not None:
            units[role] = tuple(part.units.tolist())
        base, _ = base_of(part)
        for index, look in sorted(base.looks.items()):
            if look.fault:
                left_out.setdefault((id(base), index), LeftOut(base.manifest_name(index, role), look.fault))
    return Manifest(splits.classes, parts, white_of(splits), tuple(left_out.values()), units)


def keep_images(folder: Path, splits: Splits, callback: Callback | None = None) -> None:
    """Write the manifests of the splits into a run's folder; raise CheckpointError if it has those of other images."""
    found = {IMAGES: manifest_of(splits, callback)}
    if splits.confirm is not None and not splits.confirm.labelled:
        found[UNLABELLED] = manifest_of_unlabelled(splits.confirm)
    for name, manifest in found.items():
        if not (folder / name).exists():
            write_manifest(folder / name, manifest)
            continue
        old = read_manifest(folder / name)
        if old.digest != manifest.digest:
            raise CheckpointError.of(f"{folder}: its run uses other images; {_PUT_BACK}", changes(old, manifest))


def manifest_of_unlabelled(images: LabelledImages) -> Manifest:
    """Return the manifest of images without labels, as if they were to train on."""
    base, indices = base_of(images)
    rows = tuple(Entry(base.manifest_name(index, "train"), 0, base.looks[index].sha256) for index in indices.tolist())
    return Manifest(images.classes, {"train": rows})


def recalled(
    given: Splits | Path,
    manifest: Manifest,
    size: tuple[int, int],
    *,
    roles: Sequence[Role] = ROLES,
    callback: Callback | None = None,
) -> dict[Role, LabelledImages]:
    """Return the images that a manifest lists for these roles: files of a folder, or images among the parts given."""
    wanted = {role: manifest.parts[role] for role in roles if role in manifest.parts}
    where, faults = str(given) if isinstance(given, Path) else "the data", list[str]()
    if isinstance(given, Path):
        parts = _in_folder(given, manifest, wanted, size)
    else:
        parts = _among(given, manifest, wanted, faults)
    callback = callback or NullCallback()
    faults = faults or [fault for role, part in parts.items() for fault in _changed(part, wanted[role], callback)]
    if faults:
        raise DataError.of(f"{where}: is not as it was when the run started; {_PUT_BACK}", faults)
    units = {role: np.array(numbers, dtype=np.int64) for role, numbers in manifest.units.items()}
    return {role: in_units(part, units.get(role)) for role, part in parts.items()}


def _in_folder(
    root: Path, manifest: Manifest, wanted: Mapping[Role, Sequence[Entry]], size: tuple[int, int]
) -> dict[Role, LabelledImages]:
    names = [PurePosixPath(entry.name) for entries in wanted.values() for entry in entries]
    if outside := [str(name) for name in names if name.is_absolute() or ".." in name.parts]:
        raise DataError.of(f"{root}: the run's images are no files in it", outside)
    parts: dict[Role, LabelledImages] = {}
    for role, entries in wanted.items():
        files = [(root / entry.name, entry.label) for entry in entries]
        parts[role] = FolderImages(files, manifest.classes, size, root=root, white=manifest.white)
    return parts


def _among(
    given: Splits, manifest: Manifest, wanted: Mapping[Role, Sequence[Entry]], faults: list[str]
) -> dict[Role, LabelledImages]:
    """Find the images by name among the given parts; add those that are missing or of another class to the faults."""
    places = {name: (part, index) for part, each in names_of(given).items() for index, name in enumerate(each)}
    found: dict[Role, LabelledImages] = {}
    if given.classes != manifest.classes:
        faults.append(f"classes: {list(manifest.classes[:10])} -> {list(given.classes[:10])}")
    for role, entries in wanted.items():
        here = [entry for entry in entries if entry.name in places]
        faults += [f"{entry.name}: missing" for entry in entries if entry.name not in places]
        homes = {places[entry.name][0] for entry in here}
        if len(homes) > 1:
            faults.append(f"{role}: its images are now in several parts: {', '.join(sorted(homes))}")
        elif homes:
            part = take(given.parts[homes.pop()], [places[entry.name][1] for entry in here])
            others = [entry for entry, label in zip(here, part.labels.tolist(), strict=True) if entry.label != label]
            faults += [f"{entry.name}: has another label" for entry in others]
            found[role] = part
    return found


def _changed(part: LabelledImages, entries: Sequence[Entry], callback: Callback) -> list[str]:
    """Return the images whose content is not what the manifest says; the others count as opened."""
    base, indices = base_of(part)
    expected = dict(zip(indices.tolist(), entries, strict=True))
    faults = []

    def look(index: int) -> Look:
        try:
            return Look(base.content_hash(index))
        except DataError as error:
            return Look(fault=str(error))

    for done, (index, found) in enumerate(for_each(base, list(expected), look), 1):
        entry = expected[index]
        if found.fault:
            faults.append(f"{entry.name}: missing ({found.fault})")
        elif found.sha256 != entry.sha256:
            faults.append(f"{entry.name}: replaced, its content is another one")
        else:
            base.looks[index] = found
        if done % OPENED_AT_ONCE == 0 or done == len(expected):
            callback.opened(done, len(expected))
    return faults
