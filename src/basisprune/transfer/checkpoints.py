"""Weights as people have them: files and folders of torch, timm, Lightning and Hugging Face -> tensors by name.

Nothing in a file is run: safetensors, and pickles of which torch reads tensors and plain values alone. These are
measured first: a few bytes can name one value many times over, as in a billion laughs, ask for memory by a number, or
be packed. What is within bounds takes time and memory like the size of the file.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import struct
import warnings
import zipfile
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, TypeGuard

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from basisprune.errors import ModelError, is_about_memory, pass_on
from basisprune.files import open_file, user_path
from basisprune.transfer.hints import NO_HINTS, Hints, hints_of, shards_of

PICKLED = (".pth", ".pt", ".bin", ".ckpt", ".tar")
ALLOWED = (".safetensors", *PICKLED)
_FILES = ("model.safetensors", "pytorch_model.bin")
_ENTRIES = ("state_dict", "model_state_dict", "model", "module", "net", "network", "weights", "params")
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema", "model_ema_state_dict")
_COMPILED = "_orig_mod."
_LISTED, _NESTED = 5, 4
_WAY_OUT = (
    "save only the state dict, with safetensors.torch.save_file(model.state_dict(), 'weights.safetensors'), in the "
    "program that wrote it"
)

_ZIP = b"PK\x03\x04"  # how a file begins that torch reads as an archive
_ENDS, _END = struct.Struct("<4sQ2H2L4Q 4sLQL 4s4H2LH"), 22  # what follows its directory, and the last part of that
_PICKLES = 5  # in files before torch 1.6: magic number, version, system, the content, keys of its storages
_LARGEST, _DEEPEST = 1 << 26, 500
_REFUSED = ("builtins bytearray", "__builtin__ bytearray")  # of any length, for one number
_GETS, _PUTS = ("GET", "BINGET", "LONG_BINGET"), ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE")
_IN_PLACE = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of a file or folder by name, the entry they were found under, and whether it was `asked` for.

    `averaged` are entries with moving averages, which were not taken; `prefix` begins the names that were asked for.
    """

    path: Path
    tensors: Mapping[str, Tensor]
    entry: str = ""
    averaged: tuple[str, ...] = ()
    hints: Hints = NO_HINTS
    prefix: str = ""
    asked: bool = False


@dataclass(frozen=True)
class Fitting:
    """How the tensors of a checkpoint fit a network: the prefix to take off, and all that does not fit."""

    prefix: str
    tensors: Mapping[str, Tensor]
    left_out: tuple[str, ...] = ()
    faults: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_checkpoint(path: str | Path, *, key: str | None = None) -> Checkpoint:
    """What a file of weights holds, or a folder that Hugging Face or timm wrote."""
    place = user_path(path, "weights")
    if place.is_dir():
        return _from_folder(place, key)
    return _found(place, _read(place), key)


def load_weights(
    model: nn.Module, path: str | Path | Checkpoint, *, optional: Collection[str] = (), key: str | None = None
) -> Checkpoint:
    """Fill the model from a file or folder of weights, or what was read of one, and return that.

    Every entry of the model must be there with its shape, and nothing else but the `optional` keys, auxiliary heads and
    what lies outside of the model's prefix. Raises ModelError that lists what does not fit, and changes nothing then.
    """
    found = path if isinstance(path, Checkpoint) else read_checkpoint(path, key=key)
    set_weights(model, found, optional=optional)
    return found


def set_weights(model: nn.Module, found: Checkpoint, *, optional: Collection[str] = ()) -> Fitting:
    """Load the checkpoint into the model and return how it fits; raise ModelError if not, and change nothing."""
    own = model.state_dict()
    fitting = fit_names(own, found, optional=optional)
    if fitting.faults:
        taken = [f"from the entry {found.entry!r}"] * bool(found.entry)
        taken += [f"{fitting.prefix!r} taken off the names"] * bool(fitting.prefix)
        said = f" ({', '.join(taken)})" if taken else ""
        raise ModelError.of(
            f"{found.path}: the weights{said} do not fit {type(model).__name__}; pass the file that belongs to this "
            "network",
            [f"{len(keys)} {fault}: {_first(keys)}" for fault, keys in fitting.faults.items()],
        )
    before = {name: tensor.clone() for name, tensor in own.items()}
    try:
        model.load_state_dict({key: value for key, value in fitting.tensors.items() if key in own}, strict=False)
    except Exception as error:  # code of the network's own that takes part in loading
        model.load_state_dict(before, strict=False)
        raise ModelError(f"{found.path}: {type(model).__name__} does not take these weights: {error}") from error
    return fitting


def fit_names(own: Mapping[str, Tensor], found: Checkpoint, *, optional: Collection[str] = ()) -> Fitting:
    """Return how the checkpoint's names fit those of a network, which may be called something in the file."""
    names = {name.replace(_COMPILED, ""): name for name in found.tensors}
    if len(names) < len(found.tensors):
        twice = set(found.tensors) - set(names.values())
        raise ModelError(f"{found.path}: has weights compiled and not: {_first(sorted(twice))}; keep one of them")
    given = {name: found.tensors[there] for name, there in names.items() if name.startswith(found.prefix)}
    prefix = _prefix(given, own, optional, found)
    inside = {name.removeprefix(prefix): tensor for name, tensor in given.items() if name.startswith(prefix)}
    left_out = tuple(name for name in names if not name.startswith(prefix))
    # Files of old or without metadata lack the counter of batches, which has no say in the function.
    missing = [name for name in own if name not in inside and not name.endswith("num_batches_tracked")]
    unknown = [
        name for name in inside if name not in own and name not in optional and not name.lower().startswith("aux")
    ]
    wrong = [fault for name in own if name in inside and (fault := _misfit(name, inside[name], own[name]))]
    faults = {"missing": missing, "of another shape": sorted(wrong), "unknown": unknown}
    return Fitting(prefix, inside, left_out, {what: tuple(names) for what, names in faults.items() if names})


def messages(found: Checkpoint, fitting: Fitting) -> list[str]:
    """Messages about loading the weights; empty where there was nothing to decide."""
    lines = []
    if fitting.prefix or found.entry:
        entry = f" under {found.entry!r}" if found.entry else ""
        names = f", named {fitting.prefix}..." if fitting.prefix else ""
        lines.append(f"the weights are those in {found.path}{entry}{names}")
    if fitting.left_out:
        lines.append(f"{len(fitting.left_out)} entries there are not the network's: {_first(fitting.left_out)}")
    if found.averaged:
        lines.append(f"{found.path} also has averaged weights: --weights-key {found.averaged[0]} takes them")
    return lines


def _prefix(
    given: Mapping[str, Tensor], own: Mapping[str, Tensor], optional: Collection[str], found: Checkpoint
) -> str:
    """What precedes the network's names in the file, where more of them fit with it than without."""
    needed = {name for name in own if not name.endswith("num_batches_tracked")}
    counts = _prefixes(given, {*needed, *optional})
    fitting = [
        prefix
        for prefix, count in counts.items()
        if count >= len(needed) > 0
        and all(f"{prefix}{name}" in given and not _misfit("", given[f"{prefix}{name}"], own[name]) for name in needed)
    ]
    first, *others = fitting or [""]
    if any(not torch.equal(given[first + name], given[other + name]) for other in others for name in needed):
        entry = f"{found.entry}." if found.asked else ""
        ways = [f"{entry}{each.removesuffix('.')}" or "(no prefix)" for each in fitting]
        raise ModelError(
            f"{found.path}: holds {len(fitting)} different networks that fit, under the names {_first(ways)}; name the "
            f"one to take with weights_key (--weights-key {ways[-1]}), or save it alone"
        )
    best = max(counts, key=lambda prefix: (counts[prefix], -len(prefix)))
    if counts[best]:
        return best
    # Nothing fits; the usual prefixes are taken off, so that mismatches have their own names.
    return next((usual for usual in ("module.", "model.", "net.") if all(key.startswith(usual) for key in given)), "")


def _prefixes(given: Collection[str], wanted: Collection[str]) -> Counter[str]:
    longest = max((name.count(".") for name in wanted), default=0)
    counts = Counter({"": 0})
    for name in given:
        parts = name.rsplit(".", longest + 1)  # no ending with more dots is wanted
        for first in range(len(parts)):
            end = ".".join(parts[first:])
            if end in wanted and end:
                counts[name.removesuffix(end)] += 1
    return counts


def _misfit(name: str, given: Tensor, own: Tensor) -> str:
    if given.shape != own.shape:
        dims, wanted = ("x".join(map(str, each.shape)) or "scalar" for each in (given, own))
        return f"{name} is {dims}, wanted {wanted}"
    if given.is_floating_point() != own.is_floating_point() or given.is_complex() != own.is_complex():
        return f"{name} is of {given.dtype}, wanted {own.dtype}"
    return ""


def _first(keys: Collection[str]) -> str:
    return ", ".join(list(keys)[:_LISTED]) + (", ..." if len(keys) > _LISTED else "")


def _found(path: Path, content: object, key: str | None, hints: Hints = NO_HINTS) -> Checkpoint:
    """The state dict among what a file holds; raises ModelError that names the entries where none is one."""
    averaged = tuple(name for name in _AVERAGED if isinstance(content, Mapping) and name in content)
    whole = content
    entry, content, prefix = _entered(content, key or "")
    asked = bool(entry)
    for _ in range(_NESTED):
        if _is_state_dict(content):
            if any(name.replace(_COMPILED, "").startswith(prefix) for name in content):
                return Checkpoint(path, content, ".".join(entry), () if asked else averaged, hints, prefix, asked)
            break
        inner = content if isinstance(content, Mapping) else {}
        names = [each for each in _ENTRIES if isinstance(inner.get(each), Mapping)]
        if not names:
            break
        if other := next((each for each in names[1:] if _rival(inner[names[0]], inner[each])), None):
            ways = [".".join([*entry, each]) for each in (names[0], other)]
            raise ModelError(
                f"{path}: holds different weights by the same names in its entries {' and '.join(ways)}; name the one "
                f"to take with weights_key (--weights-key {ways[1]})"
            )
        entry, content = [*entry, names[0]], inner[names[0]]
    if prefix:
        raise ModelError(f"{path}: has no entry {key!r}; {_entries(whole)}")
    raise ModelError(
        f"{path}: contains no state dict (names and tensors, alone or under 'state_dict', 'model_state_dict' or "
        f"'model'); {_entries(content)}; {_WAY_OUT}"
    )


def _entered(content: object, key: str) -> tuple[list[str], object, str]:
    entry: list[str] = []
    while key and isinstance(content, Mapping):
        head, _, rest = (key, "", "") if key in content else key.partition(".")
        if not isinstance(content.get(head), Mapping):
            break
        entry, content, key = [*entry, head], content[head], rest
    return entry, content, f"{key.removesuffix('.')}." if key else ""


def _rival(first: object, other: object) -> bool:
    if not (_is_state_dict(first) and _is_state_dict(other)) or first.keys() != other.keys():
        return False
    return any(first[name].shape != other[name].shape or not torch.equal(first[name], other[name]) for name in first)


def _is_state_dict(content: object) -> TypeGuard[Mapping[str, Tensor]]:
    pairs = content.items() if isinstance(content, Mapping) else ()
    return len(pairs) > 0 and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in pairs)


def _entries(content: object) -> str:
    if not isinstance(content, Mapping):
        return f"it holds a {type(content).__name__}"
    if inside := [str(name)[:60] for name, value in content.items() if isinstance(value, Mapping)]:
        return f"its entries are {_first(inside)}: name the right one with weights_key (--weights-key)"
    return f"its entries are {_first([str(name)[:60] for name in content])}" if content else "it is empty"


def _read(path: Path) -> object:
    if path.suffix not in ALLOWED:
        raise ModelError(f"{path}: weights of this kind are not read; allowed are {', '.join(ALLOWED)}, or a folder")
    try:
        with open_file(path) as file:  # which is no pipe or device
            content = load_file(path) if path.suffix == ".safetensors" else load_tensors(file)
    except Exception as error:  # a damaged file fails in many ways
        if isinstance(error, OSError):
            pass_on(error, path)
        raise ModelError(f"{path}: {_fault(error)}") from error
    for name, tensor in _tensors_in(content):
        vars(tensor).clear()
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            kind = "without values" if tensor.is_meta else "sparse" if tensor.layout != torch.strided else "quantised"
            raise ModelError(f"{path}: the tensor {name[:100]} is {kind}; plain ones are needed")
    return content


def _fault(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"no such file; pass a local {', '.join(ALLOWED)} file, or a folder with {_FILES[0]}"
    if isinstance(error, pickle.UnpicklingError):
        _, mark, rest = str(error).partition("Unsupported global: GLOBAL ")
        culprit = f" (it needs {rest.split()[0][:100]})" if mark and rest.split() else ""
        return f"damaged, or holds objects other than tensors, which could run code when read{culprit}; {_WAY_OUT}"
    if isinstance(error, BombError):
        return f"is not read, because {error}; {_WAY_OUT}"
    if is_about_memory(error):
        return f"there is not enough memory to read it ({str(error)[:200]})"
    if "TorchScript" in str(error):
        return f"is a scripted network, which is code; {_WAY_OUT}"
    return f"cannot be read, perhaps damaged or cut off: {getattr(error, 'strerror', None) or error}; fetch it again"


def _tensors_in(content: object) -> Iterator[tuple[str, Tensor]]:
    seen: set[int] = set()
    level = [content]
    for _ in range(_NESTED + 1):
        mappings = {id(each): each for each in level if isinstance(each, Mapping) and id(each) not in seen}
        seen |= mappings.keys()
        for mapping in mappings.values():
            getattr(mapping, "__dict__", {}).clear()  # attributes out of a file would hide methods
            yield from ((str(name), value) for name, value in mapping.items() if isinstance(value, Tensor))
        level = [value for mapping in mappings.values() for value in mapping.values()]


def _from_folder(folder: Path, key: str | None) -> Checkpoint:
    hints = hints_of(folder)
    for name in _FILES:
        if (folder / name).exists():
            return _found(folder / name, _read(folder / name), key, hints)
        index = folder / f"{name}.index.json"
        if index.exists():
            return _found(folder, _from_shards(folder, index), key, hints)
    raise ModelError(
        f"{folder}: is a folder without {' or '.join(_FILES)} (or their index.json); pass the file with the weights"
    )


def _from_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    """Return the tensors of all files that an index names, each of which must hold what is expected of it."""
    places, tensors = shards_of(index), dict[str, Tensor]()
    for name in sorted(set(places.values())):
        tensors |= _found(folder / name, _read(folder / name), None).tensors
    if absent := [name for name in places if name not in tensors]:
        raise ModelError(
            f"{index}: {len(absent)} of its tensors are in none of its files: {_first(absent)}; fetch the folder again"
        )
    return tensors


# ------------------------------------------------------------------------------------------- pickles, measured


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
    if file.read(len(_ZIP)) != _ZIP:
        file.seek(0)
        for _ in range(_PICKLES):
            measure(file)
    else:
        _refuse_other_readings(file, size)
        with zipfile.ZipFile(file) as archive:
            parts = archive.infolist()
            if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
                raise BombError("its parts are compressed, which torch.save never does; save it again with torch")
            if sum(part.file_size for part in parts) > size:
                raise BombError("its parts overlap, so that it claims to hold more than it does")
            for part in parts:
                if part.orig_filename.lower().endswith(".pkl"):  # torch finds it in any case of letters
                    with archive.open(part) as pickled:
                        measure(pickled)
    file.seek(0)


def _refuse_other_readings(file: BinaryIO, size: int) -> None:
    """Raise BadZipFile unless the directory of the archive lies at its end, where everybody finds the same one."""
    file.seek(max(0, size - _ENDS.size))
    ends = _ENDS.unpack(file.read().rjust(_ENDS.size, b"\0"))
    *_, length64, start64, locator, _, found64, _, end, _, _, _, _, length, start, comment = ends
    is_64 = locator == b"PK\6\7"
    before = size - (_ENDS.size if is_64 else _END)
    if is_64:
        length, start = (length64, start64) if (ends[0], found64) == (b"PK\6\6", before) else (0, 0)
    if (end, comment, start + length) != (b"PK\5\6", 0, before):
        raise zipfile.BadZipFile("its directory does not lie at its end")


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
