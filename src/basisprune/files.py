"""How files are written and read: whole or not at all, with a checksum where one is wanted, never more than is sound.

write_together, settle, current   several files that belong together, in a folder that may hold other files too
write_checked, read_checked       a file that ends in its checksum, so that a flipped bit is noticed
sealed, unsealed                  the same for a JSON object that others read too
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeAlias

from filelock import FileLock, Timeout

from basisprune.errors import CheckpointError, ConfigError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_MOST_BYTES, _MOST_CHECKED, _MOST_ROWS = 4 << 30, 256 << 20, 4_000_000
_DEEPEST, _MOST_DIGITS = 200, 100  # levels of JSON, digits of a whole number in it
_MOST_PARTS = 2_000_000  # lists and mappings in JSON, each of which takes 20 times as much memory as two letters
_LONGEST_PATH = 4096
_PARTIAL, _NEW, READY = ".partial", ".basisprune-new", ".basisprune-ready"
_LEFT = re.compile(rf"({re.escape(_PARTIAL)}|{re.escape(_NEW)})-(\d{{1,10}})-[0-9a-f]{{8}}(\.[^.]*)?")
_at_work: set[Path] = set()  # what this process writes just now
_SEAL = re.compile(rb"(\n|# )sha256 ([0-9a-f]{64})\n\Z")
_LONGEST_SEAL = 74
_CHECKSUM = "checksum"
_LOCK = ".basisprune-lock"


def write_text(path: Path, text: str) -> None:
    """Writes the text to `path`; a reader sees the old file or the new one, never a part."""
    with atomic(path) as file:
        file.write(text.encode())


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """A file to write the whole of; it appears at `path` when the block ends well, and not at all otherwise."""
    with replacing(path) as partial, open(partial, "wb") as file:
        yield file


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write what takes the place of `path` when the block ends well, and goes otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _own_name(path.parent, _PARTIAL, path.suffix) as partial:
        try:
            yield partial
            sync(partial)
            os.replace(partial, path)
            sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Has the system bring a file, or the names in a folder, to the disk; where folders cannot be opened, nothing."""
    if os.name != "posix" and path.is_dir():
        return
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # a folder to write into, not to list
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def clear_leftovers(folder: Path) -> None:
    """Removes what writers that were killed left in the folder, and ends what they had ready."""
    settle(folder)
    for entry in _entries(folder):
        if _is_left(entry):
            is_file = entry.is_symlink() or not entry.is_dir()
            entry.unlink(missing_ok=True) if is_file else shutil.rmtree(entry, ignore_errors=True)


# ------------------------------------------------------------------------------------------- with a checksum


def write_checked(path: Path, content: bytes, mark: str = "\n") -> None:
    """Write the content and its checksum, after the mark, to `path`, for `read_checked`; whole or not at all."""
    with checked(path, mark) as file:
        file.write(content)


@contextmanager
def checked(path: Path, mark: str = "\n") -> Iterator[BinaryIO]:
    """Open a file for atomic writing, whose checksum is added at the end."""
    with replacing(path) as partial:
        with open(partial, "wb") as file:
            yield file
        found = file_digest(partial)
        with open(partial, "ab") as file:
            file.write(f"{mark}sha256 {found}\n".encode())


def read_checked(path: Path, *, most: int = _MOST_CHECKED, advice: str = "remove it") -> bytes:
    """Return the content of a file that `write_checked` or `checked` wrote; raise CheckpointError for a damaged one."""
    data = read_bytes(path, most=most)
    seal = _SEAL.search(data, max(len(data) - _LONGEST_SEAL, 0))
    content = data[: seal.start()] if seal else b""
    if seal is None or digest(content).encode() != seal[2]:
        said = "has no checksum at its end" if seal is None else "its checksum is wrong"
        raise CheckpointError(f"{path}: is damaged, or was not written by this version: {said}; {advice}")
    return content


def sound_or_aside(path: Path, say: Callable[[str], None], *, most: int = _MOST_CHECKED) -> bytes | None:
    """What `read_checked` gives; None where there is no file, and where it is damaged."""
    try:
        return read_checked(path, most=most)
    except FileNotFoundError:
        return None
    except CheckpointError as error:
        say(f"{error.args[0]} (it is now {set_aside(path).name}, and is made again)")
        return None


def set_aside(path: Path) -> Path:
    """The name in the same folder that a damaged file has now, so that nothing takes it for a sound one."""
    for number in range(1, 1000):
        aside = path.with_name(f"{path.name}.damaged{number if number > 1 else ''}")
        if not os.path.lexists(aside):
            path.rename(aside)
            return aside
    raise CheckpointError(f"{path}: is damaged, and so are 999 others beside it; the disk may be failing")


def sealed(text: str) -> str:
    """A JSON object as text, with its checksum as one more entry, for `unsealed`.

    >>> unsealed(sealed('{"a": 1}').encode())
    {'a': 1}
    """
    values = json.loads(text)
    return f'{text.rstrip().removesuffix("}")}{", " if values else ""}"{_CHECKSUM}": "{json_digest(values)}"}}\n'


def unsealed(content: bytes) -> dict[str, Json]:
    """The entries of the object that `sealed` wrote; raises ValueError if its checksum is wrong or missing."""
    values = parse_json(content)
    if not isinstance(values, dict) or _CHECKSUM not in values:
        raise ValueError("it has no checksum")
    if values.pop(_CHECKSUM) != json_digest(values):
        raise ValueError("its checksum is wrong")
    return values


def json_digest(value: object) -> str:
    """The checksum of what JSON says, however it is laid out."""
    return digest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode())


def digest(content: bytes) -> str:
    """The checksum of bytes: their SHA-256."""
    return hashlib.sha256(content).hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, which is not read into memory as a whole."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ------------------------------------------------------------------------------------------- files that belong together


def write_together(folder: Path, files: Mapping[str, bytes], check: Callable[[Path], object]) -> None:
    """Puts the files into the folder, all or none of them, after `check` has seen them in a folder of their own."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    with _own_name(folder, _NEW) as staging:
        try:
            staging.mkdir()
            for name, content in files.items():
                (staging / name).write_bytes(content)
                sync(staging / name)
            check(staging)
            sync(staging)
            staging.rename(folder / READY)  # the moment
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if is_new and not _entries(folder):
                folder.rmdir()
    sync(folder)
    settle(folder)
    sync(folder.parent)


def settle(folder: Path) -> None:
    """Puts files that a killed writer had ready in their places; raises CheckpointError for what no writer leaves."""
    ready = folder / READY
    if odd := next((place for place in (ready, *_entries(ready)) if place.is_symlink()), None):
        raise CheckpointError(f"{odd}: is a link, which is never followed here; remove it")
    for entry in _entries(ready):
        os.replace(entry, folder / entry.name)
    if ready.is_dir():
        ready.rmdir()
        sync(folder)


def current(folder: Path, name: str) -> Path:
    """Where the file of that name lies now, which is in its place unless a writer was stopped at the end."""
    ready = folder / READY / name
    return ready if ready.is_file() and not ready.parent.is_symlink() else folder / name


# ------------------------------------------------------------------------------------------- one at a time


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder, which must exist, until the block ends; raise CheckpointError if another run has it."""
    place = Path(os.path.realpath(folder)) / _LOCK
    if place.is_symlink():
        raise CheckpointError(f"{place}: is a link, which is never followed here; remove it")
    lock = FileLock(place, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise CheckpointError(
            f"{folder}: another run works in this folder; wait until it ends, or use another folder"
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # it is gone, or the disk is read-only by now
            (folder / _LOCK).unlink()
        lock.release()


# ------------------------------------------------------------------------------------------- what comes from outside


def read_bytes(path: Path, *, most: int = _MOST_BYTES) -> bytes:
    """The content of a file of at most this many bytes; raises OSError for a larger one, and for what is not a file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most or len(content := file.read(size + 1)) > most:  # `read` takes the memory that it is asked for
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and at most {most:,} are read", str(path))
    return content


def open_file(path: Path) -> io.BufferedReader:
    """Open the file for reading; raise OSError for a folder, a pipe, a device or a socket."""
    return open(path, "rb", opener=_opened)


def _opened(name: str, flags: int) -> int:
    _refuse_special(name, os.stat(name).st_mode)
    handle = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        _refuse_special(name, os.fstat(handle).st_mode)  # it may have been changed in between
    except OSError:
        os.close(handle)
        raise
    return handle


def parse_json(content: bytes) -> Json:
    """Return the value in JSON text; raise ValueError for other text, and for what is too much, deep or not finite."""
    if content.count(b"[") + content.count(b"{") > _MOST_PARTS:
        raise ValueError(f"it has more than {_MOST_PARTS:,} lists and mappings")
    try:
        value: Json = json.loads(content.decode(), parse_constant=_number, parse_float=_number, parse_int=_number)
        json.dumps(value, ensure_ascii=False).encode()  # or half of a surrogate pair is met where it cannot be printed
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep") from None
    level = [value]
    for _ in range(_DEEPEST):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [inner for each in nested for inner in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {_DEEPEST} levels deep")


def csv_rows(path: Path, *, most: int) -> Iterator[tuple[int, list[str]]]:
    """The numbered rows of a CSV file in UTF-8 that are not empty; raises OSError, UnicodeDecodeError or csv.Error."""
    with io.TextIOWrapper(io.BytesIO(read_bytes(path, most=most)), "utf-8-sig", newline="") as lines:
        for number, row in enumerate(csv.reader(lines, strict=True), 1):
            if number > _MOST_ROWS:
                raise csv.Error(f"it has more than {_MOST_ROWS:,} rows")
            if any(row):
                yield number, row


def _number(text: str) -> int | float:
    if len(text) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(text):,} digits is given; at most {_MOST_DIGITS} are read")
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text} is too large" if text[-1].isdigit() else f"{text} is not a number")
    return value if {".", "e", "E"} & set(text) else int(text)


def user_path(given: object, where: str) -> Path:
    """Return the path that a user names, with `~` for a home folder; raise ConfigError for what is none.

    >>> user_path(3, "load_data")
    Traceback (most recent call last):
    basisprune.errors.ConfigError: load_data: 3 given, a path is needed
    """
    if not isinstance(given, str | os.PathLike) or not isinstance(text := os.fspath(given), str):
        raise ConfigError.of(where, [f"{given!r} given, a path is needed"])
    shown = text if len(text) < 100 else f"{text[:60]}... ({len(text):,} characters)"
    if not text or "\0" in text or len(os.fsencode(text)) > _LONGEST_PATH:
        raise ConfigError.of(where, [f"{shown!r} given, which cannot be a path"])
    try:
        path = Path(text).expanduser()
        os.lstat(path)
    except FileNotFoundError:
        pass
    except RuntimeError as error:
        raise ConfigError.of(where, [f"{text!r} given: {error}"]) from error
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise ConfigError.of(where, [f"{shown} given: {error.strerror}"]) from error
    return path


# ------------------------------------------------------------------------------------------- inside


@contextmanager
def _own_name(folder: Path, kind: str, suffix: str = "") -> Iterator[Path]:
    path = folder / f"{kind}-{os.getpid()}-{uuid.uuid4().hex[:8]}{suffix}"
    _at_work.add(path)
    try:
        yield path
    finally:
        _at_work.discard(path)


def _is_left(entry: Path) -> bool:
    """Return whether the file or folder is that of a writer which does not run any more."""
    match = _LEFT.fullmatch(entry.name)
    if match is None or os.name != "posix":  # elsewhere asking for a process would end it
        return False
    if int(match[2]) == os.getpid():
        return entry not in _at_work
    try:
        os.kill(int(match[2]), 0)
        return False
    except (OSError, OverflowError) as error:
        return isinstance(error, ProcessLookupError)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _refuse_special(path: str, mode: int) -> None:
    if stat.S_ISREG(mode):
        return
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    raise OSError(errno.EINVAL, f"it is {kinds.get(stat.S_IFMT(mode), 'a device')}, no file", str(path))
