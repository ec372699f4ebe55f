"""Names of classes that can be told apart."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from basisprune.errors import DataError

_UNSEEN = ("Cf", "Cc")  # marks of format, and control characters


def told_apart(names: Sequence[str]) -> tuple[str, ...]:
    """The names of numbered classes; of equal ones, as ImageNet has two cranes, all but the first get their number.

    >>> told_apart(["crane", "owl", "crane"])
    ('crane', 'owl', 'crane (2)')
    """
    made: dict[str, None] = {}
    taken = set(names)
    for number, name in enumerate(names):
        other = name
        while other in made or (other != name and other in taken):
            other = f"{other} ({number})"
        made[other] = None
    return tuple(made)


def refuse_alike(names: Sequence[str]) -> None:
    """Raises DataError for two names that are equal or cannot be told apart when they are read.

    Capital and small letters are told apart, as in letters of handwriting; how letters are encoded and what
    cannot be seen, such as a space at the end, are not.

    >>> refuse_alike(["A", "a"])
    >>> refuse_alike(["bee", "bee "])
    Traceback (most recent call last):
    basisprune.errors.DataError: the classes 'bee' and 'bee ' look alike; give them one name, or two that differ
    """
    seen: dict[str, str] = {}
    for name in names:
        visible = "".join(letter for letter in name if letter.isspace() or unicodedata.category(letter) not in _UNSEEN)
        key = " ".join(unicodedata.normalize("NFC", visible).split())
        if key in seen:
            raise DataError(
                f"the classes {seen[key]!a} and {name!a} look alike; give them one name, or two that differ"
            )
        seen[key] = name
