"""The images of each role by name: shared ones found, the roles written down, and found again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import cast, get_args

import numpy as np

from basisprune.data.arrays import Labels
from basisprune.data.datasets import FolderImages, LabelledImages, base_of, in_units, take
from basisprune.data.groups import read_groups, refuse_unknown, units_of
from basisprune.data.looks import Look
from basisprune.data.manifest import (
    IMAGES,
    Entry,
    LeftOut,
    Manifest,
    Role,
    changes,
    read_manifest,
    write_manifest,
)
from basisprune.data.opening import BLOCK, for_each, look_at, looks_of, white_of
from basisprune.data.reading import Reading
from basisprune.data.split import Splits
from basisprune.errors import CheckpointError, DataError
from basisprune.files import user_path
from basisprune.listener import Listener, Silence

ROLES: tuple[Role, ...] = get_args(Role)
JUDGES = frozenset({"val", "confirm"})
_SHARED = ("are exact copies of images", "are of the same groups as images", "are near copies of images")
_WAY_OUT = "put the images back as they were, or start the run anew in another folder"


def names_of(splits: Splits) -> dict[str, list[str]]:
    """The name of each image of each part: the path of its file, or its index in the dataset that holds it.

    A dataset that several parts were drawn from is called as the first of them.
    """
    called: dict[int, str] = {}
    for name, part in splits.parts.items():
        called.setdefault(id(base_of(part)[0]), name)
    return {name: _names(part, called) for name, part in splits.parts.items()}


def _names(part: LabelledImages, called: Mapping[int, str]) -> list[str]:
    base, indices = base_of(part)
    return [base.called(index, called[id(base)]) for index in indices.tolist()]


# ------------------------------------------------------------------------------------------- what stays together


def groups_of(splits: Splits, path: str | os.PathLike[str] | None) -> dict[str, str]:
    """The group of each image that has one, by its name: as the file says, or else as the data says itself."""
    names = names_of(splits)
    if path is not None:
        file = user_path(path, "groups")
        groups = read_groups(file)
        refuse_unknown(groups, [name for each in names.values() for name in each], file)
        return groups
    return {
        name: group
        for part, images in splits.parts.items()
        for name, group in zip(names[part], images.groups or (), strict=images.groups is not None)
    }


def units(splits: Splits, part: str, groups: Mapping[str, str]) -> Labels:
    """The units that a part must not be divided within: exact and near copies, and images of one group."""
    known = splits.parts[part].units
    return units_of(_keys(splits, part, groups)) if known is None else known


def related(splits: Splits, groups: Mapping[str, str]) -> Splits:
    """The splits, of which the parts that judge know the units that they were drawn in."""
    found = dict(splits.parts)
    for name in JUDGES & found.keys():
        found[name] = in_units(found[name], units(splits, name, groups))
    return splits.with_parts(found)


def _keys(splits: Splits, part: str, groups: Mapping[str, str]) -> list[tuple[str, str, str]]:
    names = names_of(splits)[part]
    looks = looks_of(splits.parts[part])
    return [(look.sha256, groups.get(name, ""), look.kin) for look, name in zip(looks, names, strict=True)]


def without_shared(splits: Splits, groups: Mapping[str, str], reading: Reading, where: str) -> Splits:
    """The splits with each image and each group in one part only: the first of the data that has it.

    What is left out of the others is reported, or refused with `strict`. Raises DataError if nothing is left of a part.
    """
    names = names_of(splits)
    keys = {part: _keys(splits, part, groups) for part in names}
    shared: dict[str, set[int]] = {part: set() for part in names}
    for kind, what in enumerate(_SHARED):
        first = {part: {key[kind]: name for key, name in zip(keys[part], names[part], strict=True)} for part in names}
        for part, other in combinations(names, 2):
            both = {
                index: f"{name} and {first[part][key[kind]]}"
                for index, (key, name) in enumerate(zip(keys[other], names[other], strict=True))
                if key[kind] and key[kind] in first[part] and index not in shared[other]
            }
            if both:
                said = f"{where}: {len(both)} of {len(names[other])} images of {other} {what} of {part}"
                reading.report(f"{said}, which would promise too much; they are left out of {other}", [*both.values()])
                shared[other] |= both.keys()
    for part, some in shared.items():
        if some and len(some) == len(names[part]):
            raise DataError(f"{where}: all images of {part} are also in another part; divide the images anew")
    return splits.with_parts({name: _except(part, shared[name]) for name, part in splits.parts.items()})


def _except(part: LabelledImages, some: set[int]) -> LabelledImages:
    return take(part, [index for index in range(len(part)) if index not in some]) if some else part


# ------------------------------------------------------------------------------------------- the manifest


def manifest_of(splits: Splits, listener: Listener | None = None) -> Manifest:
    """Which images are in which part."""
    look_at(splits.parts.values(), listener)
    names = names_of(splits)
    parts = {
        cast("Role", role): tuple(
            Entry(name, label, look.sha256)
            for name, label, look in zip(names[role], part.labels.tolist(), looks_of(part), strict=True)
        )
        for role, part in splits.parts.items()
    }
    judging = {role: splits.parts[role].units for role in ROLES if role in splits.parts}
    together = {role: tuple(found.tolist()) for role, found in judging.items() if found is not None}
    return Manifest(splits.classes, parts, white_of(splits), tuple(_left_out(splits)), together)


def _left_out(splits: Splits) -> list[LeftOut]:
    found: dict[tuple[int, int], LeftOut] = {}
    for role, part in splits.parts.items():
        base, _ = base_of(part)
        for index, look in sorted(base.looks.items()):
            if look.fault:
                found.setdefault((id(base), index), LeftOut(base.called(index, role), look.fault))
    return list(found.values())


def keep_images(folder: Path, splits: Splits, listener: Listener | None = None) -> None:
    """Writes the manifest of the splits into a run's folder; raises CheckpointError if it has that of other images."""
    path, found = folder / IMAGES, manifest_of(splits, listener)
    if not path.exists():
        write_manifest(path, found)
        return
    old = read_manifest(path)
    if old.digest != found.digest:
        raise CheckpointError.of(f"{folder}: its run uses other images; {_WAY_OUT}", changes(old, found))


def recalled(
    given: Splits | Path,
    manifest: Manifest,
    size: tuple[int, int],
    *,
    roles: Sequence[Role] = ROLES,
    listener: Listener | None = None,
) -> dict[Role, LabelledImages]:
    """The images that a manifest lists for these roles: files of a folder, or images among the parts of other data.

    What the data has beside them is passed over. Raises DataError, which lists them, for images that are missing,
    replaced or of another class.
    """
    wanted = {role: manifest.parts[role] for role in roles if role in manifest.parts}
    faults: list[str] = []
    if isinstance(given, Path):
        where, parts = str(given), _in_folder(given, manifest, wanted, size)
    else:
        where, parts = "the data", _among(given, manifest, wanted, faults)
    if not faults:
        faults = [each for role, part in parts.items() for each in _changed(part, wanted[role], listener or Silence())]
    if faults:
        raise DataError.of(f"{where}: is not as it was when the run started; {_WAY_OUT}", faults)
    return {role: in_units(part, _as_labels(manifest.units.get(role))) for role, part in parts.items()}


def _as_labels(numbers: tuple[int, ...] | None) -> Labels | None:
    return None if numbers is None else np.array(numbers, dtype=np.int64)


def _in_folder(
    root: Path, manifest: Manifest, wanted: Mapping[Role, Sequence[Entry]], size: tuple[int, int]
) -> dict[Role, LabelledImages]:
    outside = [
        entry.name
        for entries in wanted.values()
        for entry in entries
        if PurePosixPath(entry.name).is_absolute() or ".." in PurePosixPath(entry.name).parts
    ]
    if outside:
        raise DataError.of(f"{root}: the run's images are no files in it", outside)
    return {
        role: FolderImages(
            [(root / entry.name, entry.label) for entry in entries],
            manifest.classes,
            size,
            root=root,
            white=manifest.white,
        )
        for role, entries in wanted.items()
    }


def _among(
    given: Splits, manifest: Manifest, wanted: Mapping[Role, Sequence[Entry]], faults: list[str]
) -> dict[Role, LabelledImages]:
    """The images by name among those of the given parts; what is missing or of another class is added to the faults."""
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


def _changed(part: LabelledImages, entries: Sequence[Entry], listener: Listener) -> list[str]:
    """The images whose content is not what the manifest says; those that are as they were count as looked at."""
    base, indices = base_of(part)
    expected = dict(zip(indices.tolist(), entries, strict=True))
    faults = []

    def content(index: int) -> str | DataError:
        try:
            return base.content_hash(index)
        except DataError as error:
            return error

    for done, (index, found) in enumerate(for_each(base, list(expected), content), 1):
        entry = expected[index]
        if isinstance(found, DataError):
            faults.append(f"{entry.name}: missing ({found})")
        elif found != entry.sha256:
            faults.append(f"{entry.name}: replaced, its content is another one")
        else:
            base.looks[index] = Look(found)
        if done % BLOCK == 0 or done == len(expected):
            listener.opened(done, len(expected))
    return faults
