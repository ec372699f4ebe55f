"""The files of a bundle: written all at once or not at all, and read only if every checksum is right."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from basisprune.errors import BundleError

FORMAT = 1
CONFIG, TENSORS, PLANS, CARD = "config.json", "model.safetensors", "plans.json", "README.md"
NAMES = frozenset({CONFIG, TENSORS, PLANS, CARD})
_DENSE = (",", ":")


def write_folder(
    folder: Path, config: Mapping[str, Any], files: Mapping[str, bytes], check: Callable[[Path], None]
) -> Path:
    """The folder with the config and the files, after `check` has seen them in a folder beside it.

    An older bundle of that name is replaced. Raises BundleError for a folder that holds anything else.
    """
    _refuse_foreign(folder)
    sums = {name: _digest(content) for name, content in files.items() if name != CARD}
    full = {"basisprune_bundle": FORMAT, **config, "files": sums}
    try:
        entries = {**full, "checksum": _config_digest(full)}.items()
        lines = (
            f"{json.dumps(key)}: {json.dumps(value, separators=_DENSE, allow_nan=False)}" for key, value in entries
        )
        text = "{\n" + ",\n".join(lines) + "\n}\n"
    except (TypeError, ValueError) as error:
        raise BundleError(
            f"{folder}: its metrics or classes are no JSON ({error}); pass numbers, texts, lists"
        ) from error
    folder.parent.mkdir(parents=True, exist_ok=True)
    tag = uuid.uuid4().hex[:8]
    new, old = (folder.with_name(f".{folder.name}.{tag}.{kind}") for kind in ("new", "old"))
    try:
        new.mkdir()
        for name, content in {**files, CONFIG: text.encode()}.items():
            _write(new / name, content)
        check(new)
        _sync(new)
        if folder.exists():
            folder.rename(old)
        try:
            new.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
        _sync(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
    return folder


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The config and the files of a bundle, every checksum compared.

    Raises BundleError that says which file is missing, damaged or newer than this package.
    """
    try:
        config = json.loads(_read(folder / CONFIG))
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{folder / CONFIG}: is damaged, no JSON ({error}); fetch it again") from error
    if not isinstance(config, dict) or not isinstance(config.get("basisprune_bundle"), int):
        raise BundleError(f"{folder / CONFIG}: is not that of a basisprune bundle; save one with save_pretrained")
    if config["basisprune_bundle"] > FORMAT:
        raise BundleError(
            f"{folder}: format {config['basisprune_bundle']} is newer than {FORMAT}, which this version reads; "
            "update basisprune"
        )
    if config.get("checksum") != _config_digest(config):
        raise BundleError(f"{folder / CONFIG}: is damaged or was changed, its checksum is wrong; fetch it again")
    sums = config.get("files")
    files = {}
    for name in (TENSORS, PLANS):
        files[name] = _read(folder / name)
        if not isinstance(sums, dict) or _digest(files[name]) != sums.get(name):
            raise BundleError(f"{folder / name}: is damaged or was changed, its checksum is wrong; fetch it again")
    return config, files


def _refuse_foreign(folder: Path) -> None:
    """Raises BundleError unless the folder is missing, empty, or a bundle and nothing but."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise BundleError(f"{folder}: is a file or a link; name a folder that is new, empty or a bundle")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    foreign = sorted(names - NAMES)
    if foreign or (names and not _is_bundle(folder)):
        held = f"holds {', '.join(foreign[:3])}" if foreign else "is no bundle"
        raise BundleError(f"{folder}: {held}, which saving would remove; name a folder that is new, empty or a bundle")


def _is_bundle(folder: Path) -> bool:
    try:
        return "basisprune_bundle" in json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError, TypeError, RecursionError):
        return False


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BundleError(f"{path}: cannot be read ({error.strerror or error}); a bundle needs this file") from error


def _write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    if os.name != "posix":
        return  # elsewhere a folder cannot be opened
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _config_digest(config: Mapping[str, Any]) -> str:
    """The checksum of what the config says, however it is laid out."""
    said = {key: value for key, value in config.items() if key != "checksum"}
    return _digest(json.dumps(said, sort_keys=True, separators=_DENSE).encode())
