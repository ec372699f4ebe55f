"""Images that belong together -> units that no split divides."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from basisprune.data.arrays import Labels
from basisprune.errors import DataError, pass_on
from basisprune.files import read_bytes

_HEADER = ["file", "group"]
_MOST_BYTES = 1 << 30


def read_groups(path: Path) -> dict[str, str]:
    """The group of each image that a CSV file lists: two columns, the image's name and its group.

    A first line `file,group` is passed over. Raises DataError, which names the file and the lines, for everything that
    does not fit.
    """
    try:
        text = read_bytes(path, most=_MOST_BYTES).decode("utf-8-sig")
        rows = [(number, row) for number, row in enumerate(csv.reader(text.splitlines(), strict=True), 1) if any(row)]
    except OSError as error:
        pass_on(error, path)
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: is no CSV file in UTF-8 ({error}); write it as file,group") from error
    if rows and [cell.strip().casefold() for cell in rows[0][1]] == _HEADER:
        rows = rows[1:]
    groups: dict[str, str] = {}
    faults = []
    for number, row in rows:
        if len(row) != 2 or not all(cell.strip() for cell in row):
            faults.append(f"line {number}: {','.join(row)[:80]!r} found; file,group is needed")
            continue
        name, group = PurePosixPath(row[0].strip()).as_posix(), row[1].strip()
        if groups.setdefault(name, group) != group:
            faults.append(f"line {number}: {name} is in group {group}, but in {groups[name]} before")
    if not groups and not faults:
        faults.append("no line file,group found")
    if faults:
        raise DataError.of(str(path), faults)
    return groups


def refuse_unknown(groups: Mapping[str, str], names: Iterable[str], path: Path) -> None:
    """Raises DataError for groups of images that the data does not have."""
    unknown = sorted(groups.keys() - set(names))
    if unknown:
        example = next(iter(sorted(names)), "")
        raise DataError.of(
            f"{path}: lists images that the data does not have; their names there start from its folder, as {example}",
            unknown,
        )


def units_of(keys: Sequence[Sequence[str]]) -> Labels:
    """A number for each image, the same for two images that share a key, and for all that are linked in this way.

    The keys of an image are its content and its group; an empty key is none.

    >>> units_of([("a", "x"), ("b", ""), ("c", "x"), ("c", "y"), ("d", "y")])
    array([0, 1, 0, 0, 0])
    """
    first: dict[tuple[int, str], int] = {}
    pairs = [
        (first.setdefault((kind, key), index), index)
        for index, each in enumerate(keys)
        for kind, key in enumerate(each)
        if key
    ]
    return linked(len(keys), pairs)


def linked(count: int, pairs: Iterable[Sequence[int]]) -> Labels:
    """The first of all that each of `count` is linked with by the pairs, over others too."""
    unit = list(range(count))

    def root(index: int) -> int:
        while unit[index] != index:
            unit[index] = unit[unit[index]]
            index = unit[index]
        return index

    for one, other in pairs:
        first, second = root(one), root(other)
        unit[max(first, second)] = min(first, second)
    return np.array([root(index) for index in range(count)], dtype=np.int64)
