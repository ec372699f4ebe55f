"""The output folder of a run, which belongs to one configuration."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import cast

from pydantic import JsonValue
from torch import nn

from basisprune.callback import Callback
from basisprune.data.load import PREFIXES
from basisprune.data.manifest import IMAGES, UNLABELLED
from basisprune.errors import CheckpointError, ConfigError
from basisprune.files import clear_leftovers, locked, read_checked, set_aside, write_checked
from basisprune.method.states import CLAIM
from basisprune.results import Settings
from basisprune.runs.parsing import differences, parse_settings, yaml_of
from basisprune.runs.settings import OPTIONS, in_python
from basisprune.torchkit.processes import Processes
from basisprune.torchkit.surgery import named_tensors

CONFIG, VERSIONS, DEVICE_DIGEST, PREPARED = "config.yaml", "versions", "device_sha256", "prepared"
BUNDLE, ONNX, INT8, REPORT, SUMMARY = "model", "model.onnx", "model.int8.onnx", "report.html", "summary.json"
CHECKSUMS = "sha256"  # the entry of a bundle's metrics for the files beside it
IN_PYTHON = in_python("")  # the ending of an unnamed object's name in the settings
# What may change when a run resumes: which files it writes, but not its results.
_FREE = frozenset({"onnx", "int8"})
_MOST_BYTES = 1 << 20
# In sizes of the network: a checkpoint with the state of its optimizer, and the results, which are complete before
# they replace older ones.
_CHECKPOINT, _RESULTS = 3, 4
_is_junction: Callable[[str], bool] = getattr(os.path, "isjunction", lambda _: False)  # since Python 3.12
_PACKAGES = ("basisprune", "torch", "timm", "torchvision", "accelerate", "numpy")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that affect the results."""
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}


def is_loadable(data: object) -> bool:
    """Whether data can be loaded by its name in the settings: an existing path, torchvision:NAME and the like.

    >>> is_loadable("torchvision:CIFAR10"), is_loadable("some digits"), is_loadable(None)
    (True, False, False)
    """
    if not isinstance(data, str):
        return False
    try:
        return data.startswith(PREFIXES) or Path(data).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # what cannot be a path, or one without permission
        return False


def same_data(source: object, own: object) -> bool:
    """Whether two names refer to the same data, however the path is written."""
    if not isinstance(source, str | os.PathLike) or not isinstance(own, str) or not is_loadable(own):
        return False
    return str(source) == own or Path(source).expanduser().resolve() == Path(own).expanduser().resolve()


def is_repeatable(config: Settings) -> bool:
    """Whether the settings are enough to load the model and the data of their run again."""
    model = config.get("model")
    return isinstance(model, str) and not model.endswith(IN_PYTHON) and is_loadable(config.get("data"))


def refuse_link(path: Path) -> None:
    """Raise CheckpointError if a file or folder in the folder of a run is a link."""
    if path.is_symlink() or _is_junction(os.fspath(path)):
        raise CheckpointError(
            f"{path}: is a link, and none is followed in the folder of a run: remove it, or use another folder"
        )


def refuse_links(folder: Path) -> None:
    """Raise CheckpointError, by name, for anything below the folder that leads elsewhere: a link, a pipe, a device."""
    waiting = [os.fspath(folder)]
    while waiting:
        try:
            entries = sorted(os.scandir(waiting.pop()), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        for entry in entries:
            is_folder = entry.is_dir(follow_symlinks=False) and not _is_junction(entry.path)
            if not is_folder and not entry.is_file(follow_symlinks=False):
                raise CheckpointError(
                    f"{entry.path}: is a link, or neither a file nor a folder; nothing of the kind is followed in the "
                    "folder of a run: remove it, or use another folder"
                )
            waiting += [entry.path] * is_folder


def settings_of(folder: Path) -> dict[str, JsonValue]:
    """Return the settings of the run in the folder; raise CheckpointError if their file is damaged or was changed."""
    path = folder / CONFIG
    try:
        content = read_checked(path, most=_MOST_BYTES, advice="repeat the command of the run to mend it")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error
    return parse_settings(content, str(path))


@dataclass(frozen=True)
class OutputFolder:
    """The folder for the configuration, the results, and everything needed to resume."""

    path: Path
    command: str = "compress"

    @property
    def stages(self) -> Path:
        return self.path / "candidates"

    @property
    def is_begun(self) -> bool:
        """Whether a run has stored anything in the folder that it could resume from."""
        names = (BUNDLE, ONNX, SUMMARY)
        return any((self.path / name).exists() for name in names) or any(
            True for place in (self.path, self.stages) for _ in place.glob("*.pt")
        )

    def check(self, config: Settings) -> None:
        """Raise CheckpointError if the folder belongs to another configuration, or contains other files."""
        if not (self.path / CONFIG).exists():
            self._refuse_foreign()
            return
        try:
            changes = changed_settings(settings_of(self.path), json.loads(json.dumps(config)))
        except CheckpointError:
            return  # it will be set aside
        if changes and self.is_begun:
            raise CheckpointError.of(
                f"{self.path}: belongs to a run with other settings; use another folder",
                [f"{name}: {change}" for name, change in changes.items()],
            )

    @contextmanager
    def held(self, config: Settings, callback: Callback) -> Iterator[None]:
        """Hold the folder for this run alone while the block runs; the main process of a run holds it for all.

        If the block fails before anything is stored, the folder is as it was before.
        """
        with ExitStack() as stack:
            Processes.joined().on_main(lambda: stack.enter_context(self._held_here(config, callback)))
            yield

    @contextmanager
    def _held_here(self, config: Settings, callback: Callback) -> Iterator[None]:
        self.check(config)
        refuse_links(self.path)
        is_new, had_folder = not (self.path / CONFIG).exists(), self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with locked(self.path):
                for place in (self.path, self.stages, self.path / BUNDLE):
                    clear_leftovers(place)
                try:
                    self.claim(config, callback)
                    yield
                except BaseException:
                    if is_new:
                        self._let_go()
                    raise
        finally:
            if not had_folder:
                with suppress(OSError):  # there is something in it, which is as it should be
                    self.path.rmdir()

    def claim(self, config: Settings, callback: Callback) -> None:
        """Write the configuration to the folder, unless it belongs to another one; report changed versions."""
        self.check(config)
        file, plain = self.path / CONFIG, json.loads(json.dumps(config))
        now = then = versions()
        if file.exists():
            refuse_links(self.path)
            try:
                old = settings_of(self.path)
            except CheckpointError as error:
                callback.log(f"{error} (it is now {set_aside(file).name}, and is made again)")
            else:
                then = cast("dict[str, str]", old.get(VERSIONS, {}))
                if changed_settings(old, plain):
                    self._let_go()
        again = f"# Repeat this run: basisprune {self.command} --config {CONFIG} --output another\n"
        whole = (again if is_repeatable(plain) else "") + yaml_of({**plain, VERSIONS: dict(now)})
        write_checked(file, whole.encode(), mark="# ")
        for name, change in differences(then, now).items():
            callback.log(f"{self.path} was started with another version of {name}: {change}")

    def _let_go(self) -> None:
        """Remove what marks the folder as that of a run, unless there is something to resume from."""
        if self.is_begun:
            return
        shutil.rmtree(self.stages, ignore_errors=True)
        for name in (CONFIG, CLAIM, IMAGES, UNLABELLED):
            with suppress(OSError):
                (self.path / name).unlink()

    def _refuse_foreign(self) -> None:
        if self.path.is_file():
            raise CheckpointError(f"{self.path}: is a file; pass a new or empty folder")
        held = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
        if any(not name.startswith(".") for name in held) and not (self.path / f"{CONFIG}.damaged").exists():
            raise CheckpointError(
                f"{self.path}: contains {', '.join(held[:3])} but no {CONFIG}, so it is not a run that can be resumed; "
                "pass a new or empty folder"
            )


def changed_settings(old: Settings, new: Settings) -> dict[str, str]:
    """Compare the settings of two runs, but for those that change no result, and defaults that only one notes."""
    ignored = {VERSIONS, *_FREE}
    for one, other in ((old, new), (new, old)):
        ignored |= {name for name in OPTIONS.keys() & one.keys() - other.keys() if one[name] == OPTIONS[name].default}
    return {name: change for name, change in differences(old, new).items() if name.partition(".")[0] not in ignored}


def is_text(value: str) -> bool:
    """Whether a file can hold the text as UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_place(path: Path, data: str) -> None:
    """Raise an error for a folder that cannot be written to, or that lies in that of the images."""
    if not is_text(str(path)):
        raise ConfigError(f"output: {str(path)!r} given, which is not UTF-8; use another name")
    try:
        images = Path(data).expanduser()
        is_inside = images.is_dir() and path.resolve().is_relative_to(images.resolve())
    except (OSError, RuntimeError, ValueError):  # a name that is not a path
        is_inside = False
    if is_inside:
        raise ConfigError(
            f"output: {path} lies in the folder of the images, {data}, where the next start would take it for a class; "
            "use a folder elsewhere"
        )
    there = _nearest(path)
    if not there.is_dir():
        raise CheckpointError(f"{path}: {there} is a file; pass a new or empty folder")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"output: {path} cannot be written to: {there} is read-only for you; use another folder")


def _nearest(path: Path) -> Path:
    """Return the path, or the innermost folder around it that exists."""
    return next(place for place in (path, *path.absolute().parents) if place.exists())


def check_space(network: nn.Module, candidates: int, output: Path, callback: Callback) -> None:
    """Raise ConfigError if the disk cannot hold even one candidate; tell if it may become full."""
    size = sum(tensor.nbytes for _, tensor in named_tensors(network))
    free = shutil.disk_usage(_nearest(output)).free
    least, most = ((_CHECKPOINT * (1 + count) + _RESULTS) * size for count in (min(candidates, 1), candidates))
    if free < least:
        raise ConfigError(
            f"output: the disk of {output} has {free:,} bytes left, and this run needs at least {least:,}; free some, "
            "or use a folder on another disk"
        )
    if free < most:
        callback.log(f"the disk of {output} has {free:,} bytes left, and this run may need up to {most:,}")
