"""The output folder of a run, which belongs to one configuration."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from basisprune.errors import CheckpointError
from basisprune.files import write_text
from basisprune.listener import Listener
from basisprune.results import Settings
from basisprune.runs.validating import differences, read_settings

CONFIG, VERSIONS = "config.yaml", "versions"
BUNDLE, ONNX, INT8, REPORT, SUMMARY = "model", "model.onnx", "model.int8.onnx", "report.html", "summary.json"
IN_PYTHON = " given in Python"  # the ending of an unnamed object's name in the settings
# What may change when a run resumes: which files it writes, but not its results.
_FREE = frozenset({"onnx", "int8"})
_PACKAGES = ("basisprune", "torch", "timm", "torchvision", "accelerate", "numpy")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that affect the results."""
    return {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES}


def is_loadable(data: object) -> bool:
    """Whether data can be loaded by its name in the settings: an existing path, or torchvision:NAME.

    >>> is_loadable("torchvision:CIFAR10"), is_loadable("some digits"), is_loadable(None)
    (True, False, False)
    """
    return isinstance(data, str) and (data.startswith("torchvision:") or Path(data).expanduser().exists())


def is_repeatable(config: Settings) -> bool:
    """Whether the settings are enough to load the model and the data of their run again."""
    model = config.get("model")
    return isinstance(model, str) and not model.endswith(IN_PYTHON) and is_loadable(config.get("data"))


@dataclass(frozen=True)
class OutputFolder:
    """The folder for the configuration, the results, and everything needed to resume."""

    path: Path
    command: str = "compress"

    @property
    def stages(self) -> Path:
        """The subfolder with the pipeline's intermediate results."""
        return self.path / "candidates"

    def claim(self, config: Settings, listener: Listener) -> None:
        """Writes the configuration to a new folder; reports changed versions for an existing one.

        Raises CheckpointError if the folder belongs to another configuration, or contains other files.
        """
        now = versions()
        for name, change in self._claimed(config, now).items():
            listener.say(f"{self.path} was started with another version of {name}: {change}")

    def _claimed(self, config: Settings, now: Mapping[str, str]) -> dict[str, str]:
        plain = json.loads(json.dumps(config))
        file = self.path / CONFIG
        then: Mapping[str, str] = now
        if file.exists():
            old = read_settings(file)
            then = old.pop(VERSIONS, {})  # type: ignore[assignment]
            changes = {name: change for name, change in differences(old, plain).items() if name not in _FREE}
            if changes:
                raise CheckpointError.of(
                    f"{self.path}: belongs to a run with other settings; use another folder",
                    [f"{name}: {change}" for name, change in changes.items()],
                )
        else:
            self._refuse_foreign()
        text = yaml.safe_dump({**plain, VERSIONS: dict(now)}, sort_keys=False, allow_unicode=True)
        again = f"# Repeat this run: basisprune {self.command} --config {CONFIG} --output another\n"
        write_text(file, (again if is_repeatable(plain) else "") + text)
        return differences(then, now)

    def _refuse_foreign(self) -> None:
        if self.path.is_file():
            raise CheckpointError(f"{self.path}: is a file; pass a new or empty folder")
        held = sorted(entry.name for entry in self.path.iterdir()) if self.path.exists() else []
        if any(not name.startswith(".") for name in held):
            raise CheckpointError(
                f"{self.path}: contains {', '.join(held[:3])} but no {CONFIG}, so it is not a run that can be resumed; "
                "pass a new or empty folder"
            )
