"""The files of a bundle: written all at once or not at all, and read only if every checksum is right."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from torch import Tensor

from basisprune.deploy.bundle.config import Config, Plan, parse_config, parse_plans
from basisprune.deploy.bundle.structure import read_tensors
from basisprune.errors import BundleError
from basisprune.files import current, digest, json_digest, open_file, parse_json, read_bytes, write_together

FORMAT = 3  # 1 had no networks that stand alone, 2 said nothing to timm
CONFIG, TENSORS, PLANS, CARD = "config.json", "model.safetensors", "plans.json", "README.md"
FILES = (CONFIG, TENSORS, PLANS)  # those that are read
NAMES = frozenset({*FILES, CARD})
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MARK, _CARD_MARK = "basisprune_bundle", "library_name: basisprune"
_TIMM, _BUILT = ("architecture", "num_classes", "label_names", "pretrained_cfg"), "network"
_MOST = {CONFIG: 64 << 20, PLANS: 64 << 20, TENSORS: 4 << 30}  # bytes
_LISTED = 5
_DENSE = (",", ":")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Stored:
    """All that the files of a bundle say; every name and number in it was checked."""

    config: Config
    tensors: dict[str, Tensor]
    plans: tuple[Plan, ...]


def write_folder(folder: Path, config: Config, files: Mapping[str, bytes], check: Callable[[Path], object]) -> Path:
    """Write the config and the files into the folder, after `check` has seen them in a folder of their own.

    An older bundle is replaced in that moment and not before; files by other names stay. Raises BundleError for a
    folder that `check_folder` refuses.
    """
    check_folder(folder)
    sums = {name: digest(content) for name, content in files.items() if name != CARD}
    ours = asdict(config)
    full = {_MARK: FORMAT, **for_timm(config), _BUILT: ours.pop("architecture"), **ours, "files": sums}
    try:
        entries = {**full, "checksum": json_digest(full)}.items()
        lines = [
            f"{json.dumps(key)}: {json.dumps(value, separators=_DENSE, allow_nan=False)}" for key, value in entries
        ]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
    except (TypeError, ValueError) as error:
        raise BundleError(
            f"{folder}: its metrics or classes are no JSON ({error}); pass numbers, texts, lists"
        ) from error
    write_together(folder, {**files, CONFIG: text.encode()}, check)
    return folder


def read_folder(folder: Path) -> Stored:
    """Read the files of a bundle, every checksum compared.

    Raises BundleError that says which file is missing, damaged, newer than this package or not what it should be.
    """
    where = folder / CONFIG
    if not os.path.lexists(current(folder, CONFIG)):
        raise BundleError(f"{folder}: {_what_it_is(folder)}")
    content = {CONFIG: _read(folder, CONFIG)}
    try:
        said = parse_json(content[CONFIG])
    except ValueError as error:
        raise BundleError(f"{where}: is damaged, no JSON ({error}); fetch it again") from error
    if not isinstance(said, dict) or not isinstance(number := said.pop(_MARK, None), int):
        raise BundleError(f"{where}: is not that of a basisprune bundle; save one with save_pretrained")
    if number > FORMAT:
        raise BundleError(
            f"{folder}: format {number} is newer than {FORMAT}, which this version reads; update basisprune"
        )
    sums, checksum = said.get("files"), said.pop("checksum", None)
    if checksum != json_digest({_MARK: number, **said}):
        raise BundleError(f"{where}: is damaged or was changed, its checksum is wrong; fetch it again")
    for name in (TENSORS, PLANS):
        content[name] = _read(folder, name)
        if not isinstance(sums, dict) or digest(content[name]) != sums.get(name):
            raise BundleError(f"{folder / name}: is damaged or was changed, its checksum is wrong; fetch it again")
    del said["files"]
    if number > 2:
        for name in _TIMM:  # is for others
            said.pop(name, None)
        said["architecture"] = said.pop(_BUILT, None)
    return Stored(
        _named(where, parse_config, json.dumps(said).encode()),
        _named(folder / TENSORS, read_tensors, content[TENSORS]),
        _named(folder / PLANS, parse_plans, content[PLANS]),
    )


def for_timm(config: Config) -> dict[str, object]:
    """Return what timm reads of a config: where the network comes from, its classes, and how images are prepared.

    timm builds the whole architecture of that name, not what pruning has left of it.
    """
    spec, count = config.input.spec, config.fingerprint.shape[1:2]
    prepared: dict[str, object] = {"input_size": list(config.input.shape), "num_classes": sum(count)}
    if spec is not None:
        prepared |= {"mean": list(spec.mean), "std": list(spec.std), "interpolation": spec.interpolation}
        prepared |= {"crop_pct": 1.0, "crop_mode": "squash"}
    values = (config.architecture.backbone or "", sum(count), config.classes, prepared)
    return dict(zip(_TIMM, values, strict=True))


def _what_it_is(folder: Path) -> str:
    """What a folder is that is no bundle, and what to do about it."""
    if holds_bundle(folder / "model"):
        return f"is the folder of a run; pass the bundle in it, {folder / 'model'}"
    if (folder / "config.yaml").is_file():
        return "is the folder of a run that has not written its model yet; run its command again to finish it"
    held = sorted(entry.name for entry in folder.iterdir())[:_LISTED] if folder.is_dir() else []
    holds = f"holds {', '.join(held)}" if held else "is empty"
    return f"is neither a bundle nor a run: it {holds}; pass a folder that save_pretrained, compress or train wrote"


def holds_bundle(folder: Path) -> bool:
    """Whether the folder holds a bundle, sound or not: its config says so, or its card where the config is damaged."""
    is_there = os.path.lexists(current(folder, CONFIG))
    return is_there and any(mark in _start(folder, name) for name, mark in ((CONFIG, _MARK), (CARD, _CARD_MARK)))


def _start(folder: Path, name: str) -> str:
    """The first lines of a file, empty if it cannot be read."""
    try:
        with open_file(current(folder, name)) as file:
            return file.read(4096).decode(errors="replace")
    except OSError:
        return ""


def check_folder(folder: Path) -> None:
    """Raise BundleError unless a bundle can be written there, and nothing of anybody else would be lost.

    The folder may be missing, empty, or hold a bundle or files by other names, which stay.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise BundleError(f"{folder}: is a file or a link; name a folder that is new, empty or a bundle")
    held = sorted(name for name in NAMES if os.path.lexists(folder / name))
    if held and not holds_bundle(folder):
        raise BundleError(f"{folder}: is not a bundle, and saving would replace its {held[0]}; name another folder")
    if odd := [name for name in held if (folder / name).is_symlink() or not (folder / name).is_file()]:
        raise BundleError(f"{folder / odd[0]}: is a link or a folder, which saving would replace; move it away")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise BundleError(f"{folder}: {there} is not a folder that one may write into; name another folder")


def _named(path: Path, parse: Callable[[bytes], _T], content: bytes) -> _T:
    """What the file says; an error starts with its name."""
    try:
        return parse(content)
    except BundleError as error:
        raise BundleError(f"{path}: {error}") from error


def _read(folder: Path, name: str) -> bytes:
    try:
        try:
            return read_bytes(current(folder, name), most=_MOST[name])
        except FileNotFoundError:
            return read_bytes(folder / name, most=_MOST[name])  # a writer has just put it in its place
    except OSError as error:
        raise BundleError(
            f"{folder / name}: cannot be read ({error.strerror or error}); a bundle needs this file"
        ) from error
