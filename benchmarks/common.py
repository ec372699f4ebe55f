"""What every benchmark needs: interleaved timing, and results as JSON that say where they come from."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, config: Mapping[str, Any], results: Any) -> Path:
    """Writes `results/<name>.json` with the configuration, versions and machine; the path."""
    RESULTS.mkdir(exist_ok=True)
    cpu = torch.backends.cpu.get_cpu_capability()
    packages = ("basisprune", "torch", "timm", "numpy")
    record = {
        "config": dict(config),
        "versions": {"python": platform.python_version()} | {package: version(package) for package in packages},
        "device": f"{platform.machine()} {cpu}, threads: {torch.get_num_threads()}",
        "results": results,
    }
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def load(name: str) -> dict[str, Any]:
    """What `results/<name>.json` says."""
    record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return record


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Cells:
    """Results by name that are written as they come, so that a stopped benchmark goes on where it was.

    Two processes may add cells to the same file, if they do not end one in the same moment.
    """

    def __init__(self, name: str, config: Mapping[str, Any]) -> None:
        self.name, self.config = name, dict(config)
        self.results = self._on_file()

    def _on_file(self) -> dict[str, Any]:
        """Those that are there already, if they were made with the same settings."""
        old = load(self.name) if (RESULTS / f"{self.name}.json").exists() else {}
        found: dict[str, Any] = old["results"] if old.get("config") == self.config else {}
        return found

    def run(self, cell: str, work: Callable[[], Any]) -> Any:
        """The result of the cell: the one on file, or else that of `work`, which is then written."""
        if cell not in self.results:
            self.results[cell] = work()
            self.results = self._on_file() | self.results
            write_result(self.name, self.config, self.results)
        print(cell, json.dumps(self.results[cell]), flush=True)
        return self.results[cell]
