"""Pickled checkpoints, measured before anything is made of them.

torch's restricted unpickler runs no code. But a few bytes can name one value many times over, as in a billion laughs,
ask for memory by a number, or be packed; what is within bounds here takes time and memory like the size of the file.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, BinaryIO

import torch

_ZIP = b"PK\x03\x04"  # how a file begins that torch reads as an archive
_PICKLES = 5  # in files before torch 1.6: magic number, version, system, the content, keys of its storages
_LARGEST, _DEEPEST = 1 << 26, 500
_REFUSED = ("builtins bytearray", "__builtin__ bytearray")  # of any length, for one number
_GETS, _PUTS = ("GET", "BINGET", "LONG_BINGET"), ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_IN_PLACE = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")


class BombError(ValueError):
    """A file that would take far more time or memory than its size tells."""


@dataclass
class _Extent:
    """How large a value is, written out with all that it refers to, and how deep it is nested."""

    size: int = 1
    depth: int = 0

    def add(self, parts: Iterable[_Extent]) -> _Extent:
        for part in parts:
            self.size += part.size
            self.depth = max(self.depth, part.depth + 1)
        if self.size > _LARGEST:
            raise BombError(f"it names the same values over and over, which makes more than {_LARGEST:,} of them")
        if self.depth > _DEEPEST:
            raise BombError(f"it is nested more than {_DEEPEST} levels deep")
        return self


def load_tensors(file: BinaryIO) -> object:
    """What `torch.save` wrote to the file: tensors and plain values, nothing else."""
    refuse_bombs(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about tensors that are refused later
        return torch.load(file, map_location="cpu", weights_only=True)


def refuse_bombs(file: BinaryIO) -> None:
    """Raise BombError for what `torch.load` would make far more of than the file holds."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    is_zip = file.read(len(_ZIP)) == _ZIP
    file.seek(0)
    if is_zip:
        for pickled in _pickles_in(file, size):
            measure(pickled)
    else:
        for _ in range(_PICKLES):
            measure(file)
    file.seek(0)


def _pickles_in(file: BinaryIO, size: int) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(file) as archive:
        parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            raise BombError("its parts are compressed, which torch.save never does; save it again with torch")
        if sum(part.file_size for part in parts) > size:
            raise BombError("its parts overlap, so that it claims to hold more than it does")
        for part in parts:
            if part.filename.lower().endswith(".pkl"):  # torch finds it in any case of letters
                with archive.open(part) as pickled:
                    yield pickled


def measure(file: IO[bytes]) -> None:
    """Reads one pickle to its end and makes nothing of it; raises BombError if its value is out of proportion.

    The instructions are followed with sizes in the place of values.
    """
    stack: list[_Extent | None] = []  # None is a mark
    memo: dict[int, _Extent] = {}
    try:
        for code, argument, _ in pickletools.genops(file):
            if code.name == "GLOBAL" and argument in _REFUSED:
                raise BombError(f"it needs {argument.split()[1]}, which no weights do")
            if code.name in _GETS:
                stack.append(memo[int(argument or 0)])
            elif code.name in _PUTS:
                memo[len(memo) if argument is None else int(argument)] = _value(stack[-1])
            elif code.name == "DUP":
                stack.append(stack[-1])
            elif code.name not in ("PROTO", "FRAME", "STOP"):
                taken = _taken(stack, code)
                own = len(argument) if isinstance(argument, str | bytes) else 0
                made = taken.pop() if code.name in _IN_PLACE else _Extent(1 + own)
                stack += [None if each is pickletools.markobject else made.add(taken) for each in code.stack_after]
    except BombError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise pickle.UnpicklingError(str(error)) from error


def _taken(stack: list[_Extent | None], code: pickletools.OpcodeInfo) -> list[_Extent]:
    before, taken = list(code.stack_before), []
    if pickletools.markobject in before:
        while (each := stack.pop()) is not None:
            taken.append(each)
        before = before[: before.index(pickletools.markobject)]
    return taken + [_value(stack.pop()) for _ in before]


def _value(extent: _Extent | None) -> _Extent:
    if extent is None:
        raise ValueError("a mark stands where a value should")
    return extent
