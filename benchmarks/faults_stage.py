"""Where faults strike: a small run of `basisprune compress` in processes that an audit hook watches and strikes.

The processes are forked from one that has done the run before, so that each costs a fraction of a second. What takes
time and touches no file is done once: drawing figures, taking times, and converting a network to ONNX, whose result is
kept by the network's weights.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from basisprune.cli import app
from basisprune.deploy.bundle import load_bundle
from basisprune.deploy.export import onnx as exporting
from basisprune.deploy.export.onnx import to_proto
from basisprune.deploy.latency import Latency, LatencyReport
from basisprune.report import html
from basisprune.results import RunSummary
from basisprune.runs import deliver
from basisprune.runs import summary as summarising

OPERATIONS = frozenset({"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir"})
RECIPE = """
recipe:
  base: quick
  train: {epochs: 1, batch_size: 24}
  finetune: {epochs: 1, batch_size: 24}
  plan: {round_to: null}
  filter_plan: {round_to: null}
search: {tolerance: 0.9}
"""
HUNG = -999  # instead of an exit code
TIMEOUT = 300
_NUMBERED = re.compile(r"-\d+-[0-9a-f]{8}")  # in the names of files that are being written


def backbone() -> nn.Module:
    """The network of the run, by a name that its command line can have."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
    )


def write_data(path: Path) -> None:
    """Writes images of three colours with noise."""
    rng = np.random.default_rng(0)
    parts: dict[str, np.typing.NDArray[np.generic]] = {}
    for part, count in (("train", 24), ("val", 12), ("test", 12)):
        labels = np.arange(count) % 3
        images = rng.integers(0, 120, (count, 16, 16, 3), dtype=np.uint8)
        images[np.arange(count), :, :, labels] += 120
        parts |= {f"x_{part}": images, f"y_{part}": labels}
    np.savez(path, **parts)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Fault:
    """What happens at which file operation; for a flip, the number of the flip in a file."""

    kind: str
    scene: str
    place: int
    what: str = ""

    @property
    def name(self) -> str:
        """What it is called in the results."""
        return ", ".join([self.kind, self.scene, *([self.what] if self.what else []), str(self.place)])


class Watch:
    """An audit hook for one process: counts file operations below a folder, and strikes at one of them.

    With `branches`, the process goes on undisturbed, but a copy of it is made for each fault when it is at its place.
    """

    def __init__(
        self, root: Path, fault: Fault | None = None, log: Path | None = None, branches: Branches | None = None
    ) -> None:
        self.root, self.fault, self.branches, self.count, self.busy = str(root), fault, branches, 0, False
        self.log = None if log is None else os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        sys.addaudithook(self)

    def __call__(self, event: str, args: tuple[object, ...]) -> None:
        if event not in OPERATIONS or self.busy or not str(args[0]).startswith(self.root):
            return
        self.busy = True
        try:
            self.count += 1
            if self.log is not None:
                os.write(self.log, (json.dumps([event, str(args[0]), _writes(event, args)]) + "\n").encode())
            if self.branches is not None and (fault := self.branches.at(self.count)) is not None:
                self.fault, self.branches = fault, None  # this is the copy
            if self.fault is not None:
                self._strike(self.fault, _writes(event, args))
        finally:
            self.busy = False

    def _strike(self, fault: Fault, writes: bool) -> None:
        if fault.kind == "denied" and self.count == fault.place:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if self.count == fault.place and fault.kind in ("kill", "term"):
            os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGTERM)
        if self.count >= fault.place and fault.kind == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
        if self.count == fault.place and fault.kind == "short":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (600, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        numbers = {"full": errno.ENOSPC, "read-only": errno.EROFS}
        if self.count >= fault.place and writes and fault.kind in numbers:
            number = numbers[fault.kind]
            raise OSError(number, os.strerror(number))


def _writes(event: str, args: tuple[object, ...]) -> bool:
    if event == "open":
        return bool(int(str(args[2])) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return event not in ("os.listdir", "os.scandir")


class Branches:
    """Copies of a process at work, each with a fault, made by forking it; `judge` callback what became of each.

    A copy works on a copy of the folders, in their place. Where the process has files open that both would move in,
    no copy is made.
    """

    def __init__(self, folders: Sequence[Path], faults: Sequence[Fault], ask: int, heard: int) -> None:
        self.folders, self.ask, self.heard = folders, ask, heard
        self.faults: dict[int, list[Fault]] = {}
        for fault in faults:
            self.faults.setdefault(fault.place, []).append(fault)

    def at(self, place: int) -> Fault | None:
        """The fault, in the copy of this process that is to suffer it; None in this process."""
        for fault in self.faults.get(place, ()):
            if not self._has_open_files() and self._is_copy(fault):
                return fault
        return None

    def _has_open_files(self) -> bool:
        links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
        within = [link for link in links if link.startswith(str(self.folders[0].parent))]
        return any(not link.endswith("-lock") for link in within)

    def _is_copy(self, fault: Fault) -> bool:
        sys.stdout.flush(), sys.stderr.flush()
        out, into = _pipe()
        for folder in self.folders:
            _set_aside(folder)
        process = os.fork()
        if process == 0:
            os.dup2(into, 1), os.dup2(into, 2)
            return True
        os.close(into)
        code = _wait(process)
        self._rename(os.getpid(), process)
        told = {"fault": asdict(fault), "code": code, "said": _all_of(out)}
        os.write(self.ask, json.dumps(told).encode() + b"\n")
        os.read(self.heard, 1)
        for folder in self.folders:
            _bring_back(folder)
        return False

    def _rename(self, this: int, other: int) -> None:
        """Files that this process began were begun by the copy, as far as the copy is concerned, and it is dead."""
        for path in [path for folder in self.folders for path in folder.rglob(f"*-{this}-*")]:
            path.rename(path.with_name(path.name.replace(f"-{this}-", f"-{other}-")))


def _set_aside(folder: Path) -> None:
    """Puts a copy of the folder in its place."""
    aside, twin = folder.with_name(f"{folder.name}.aside"), folder.with_name(f"{folder.name}.twin")
    if folder.exists():
        shutil.copytree(folder, twin)
        folder.rename(aside)
        twin.rename(folder)


def _bring_back(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    aside = folder.with_name(f"{folder.name}.aside")
    if aside.exists():
        aside.rename(folder)


class Stage:
    """A folder with the data, the settings and the output of a run, and processes that work in it."""

    def __init__(self, root: Path) -> None:
        self.root, self.output, self.temporary, self.said = root, root / "out", root / "tmp", ""
        for folder in (root, self.temporary):
            folder.mkdir(exist_ok=True)
        write_data(root / "data.npz")
        (root / "recipe.yaml").write_text(RECIPE)

    @property
    def command(self) -> list[str]:
        """A search in the default framework, with a certificate and an ONNX file."""
        given = ["--model", "faults_stage:backbone", "--data", str(self.root / "data.npz"), "--size", "16"]
        wanted = ["--max-drop", "50%", "--onnx", "--output", str(self.output)]
        return ["compress", "--config", str(self.root / "recipe.yaml"), *given, *wanted]

    def start(self, words: Sequence[str], fault: Fault | None = None, log: Path | None = None) -> int:
        """The exit code of a process that runs these words; negative for the signal that ended it."""
        out, into = _pipe()
        process = os.fork()
        if process == 0:
            self._run_and_exit(words, into, lambda: Watch(self.root, fault, log))
        os.close(into)
        code = _wait(process)
        self.said = _all_of(out)
        return code

    def branch(self, words: Sequence[str], faults: Sequence[Fault], judge: Callable[[Fault, int, str], None]) -> int:
        """The exit code of a process that runs these words; for each fault, a copy of it meets that fault.

        `judge` gets the fault, the exit code of the copy and what it said, while the folders are as it left them.
        """
        (asked, ask), (heard, hear) = os.pipe(), os.pipe()
        process = os.fork()
        if process == 0:
            for end in (asked, hear):
                os.close(end)
            branches = Branches((self.output, self.temporary), faults, ask, heard)
            nowhere = os.open(os.devnull, os.O_WRONLY)
            self._run_and_exit(words, nowhere, lambda: Watch(self.root, branches=branches))
        for end in (ask, heard):
            os.close(end)
        with os.fdopen(asked) as lines:
            for line in lines:
                told = json.loads(line)
                judge(Fault(**told["fault"]), told["code"], told["said"])
                os.write(hear, b".")
        os.close(hear)
        return _wait(process)

    def _run_and_exit(self, words: Sequence[str], into: int, watch: Callable[[], object]) -> NoReturn:
        code = 70
        try:
            os.dup2(into, 1), os.dup2(into, 2)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            sys.argv = ["basisprune", *words]
            tempfile.tempdir = str(self.temporary)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # which a job in the background lacks
            watch()
            app(words)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)

    def clear(self) -> None:
        """Removes the output and what killed processes left in the folder for temporary files, which is not ours."""
        for folder in (self.output, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)
        self.temporary.mkdir()

    def answer(self) -> dict[str, object]:
        """What the run found; raises BasisPruneError for a result that is not whole."""
        summary = RunSummary.read(self.output / "summary.json")
        rows = [{**asdict(row), "latency_ms": 0} for row in summary.candidates]
        weights = [self.output / "model" / "model.safetensors", self.output / "model.onnx"]
        load_bundle(self.output / "model")
        found = {"rows": rows, "verdict": summary.verdict, "test": asdict(summary)["test"]}
        found["weights"] = [hashlib.sha256(path.read_bytes()).hexdigest() for path in weights]
        for side in ("before", "after"):
            found["test"][side]["latency_ms"] = 0
        return dict(json.loads(json.dumps(found)))

    def leftovers(self) -> list[str]:
        """What is in the folder that does not belong there."""
        return [path.name for path in self.output.rglob(".*")]

    def state(self) -> str:
        """A checksum of all that is in the output, by which the next run goes on."""
        found = hashlib.sha256()
        for path in sorted(self.output.rglob("*")):
            name = _NUMBERED.sub("-N", str(path.relative_to(self.output)))
            content = path.read_bytes() if path.is_file() else b""
            found.update(f"{name} {path.stat().st_mode} {len(content)}\n".encode() + content)
        return found.hexdigest()


def _pipe() -> tuple[int, int]:
    """A pipe, not a file, whose size a fault may limit; so large that nobody has to read it meanwhile."""
    out, into = os.pipe()
    fcntl.fcntl(into, fcntl.F_SETPIPE_SZ, 1 << 20)
    return out, into


def _all_of(pipe: int) -> str:
    with os.fdopen(pipe, "rb") as file:
        return file.read().decode(errors="replace")


def _wait(process: int) -> int:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return HUNG


# ------------------------------------------------------------------------------------------------- what is done once


def warm_up(stage: Stage) -> None:
    """Does the run, and what else is tried, in this process, so that what is forked from it imports nothing."""
    _replace((exporting, "to_proto", _Protos()))
    _replace((deliver, "measure_latency", no_latency), (summarising, "measure_latency", no_latency))
    _replace((deliver, "file_latencies", no_times))
    image = stage.root / "image.png"
    write_image(image)
    for words in (stage.command, *predictions(stage)):
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            code = app(words, standalone_mode=False)
        assert not code, words
    page = html.render_report(RunSummary.read(stage.output / "summary.json"))
    _replace((html, "render_report", lambda _summary: page))
    stage.clear()


def _replace(*places: tuple[ModuleType, str, Callable[..., object]]) -> None:
    for module, name, work in places:
        setattr(module, name, work)


class _Protos:
    """What `to_proto` gives, which is asked once for each network."""

    def __init__(self) -> None:
        self.known = dict[str, bytes]()

    def __call__(self, network: nn.Module, example: Tensor, outputs: Sequence[str] = ("scores",)) -> onnx.ModelProto:
        found = hashlib.sha256(f"{network} {tuple(example.shape)} {example.dtype}".encode())
        for name, tensor in network.state_dict().items():
            found.update(name.encode() + tensor.numpy().tobytes())
        if (key := found.hexdigest()) not in self.known:
            self.known[key] = to_proto(network, example, outputs).SerializeToString()
        return onnx.load_from_string(self.known[key])


def no_latency(
    models: Mapping[str, nn.Module], shape: Sequence[int], *, batch_sizes: Sequence[int], **_: object
) -> LatencyReport:
    """A report as `measure_latency` gives, without measuring anything."""
    rows = (Latency(name, "eager", size, 1.0, 0.0, 1.0) for size in batch_sizes for name in models)
    return LatencyReport(tuple(rows), tuple(shape), 1, 2, "none")


def no_times(files: Mapping[str, object], *, batch_sizes: Sequence[int], **_: object) -> tuple[Latency, ...]:
    """The rows that `file_latencies` gives, without measuring anything."""
    return tuple(Latency(name, "onnxruntime", size, 1.0, 0.0, 1.0) for size in batch_sizes for name in files)


def predictions(stage: Stage) -> list[list[str]]:
    """What reads a result: predictions by the bundle and by the ONNX file, and a measurement on the run's images."""
    image = str(stage.root / "image.png")
    return [
        ["predict", str(stage.output), image],
        ["predict", str(stage.output / "model.onnx"), image],
        ["evaluate", str(stage.output)],
    ]


def write_image(path: Path) -> None:
    """Writes an image to predict the class of."""
    image = importlib.import_module("PIL.Image")
    image.fromarray(np.full((16, 16, 3), (200, 30, 30), dtype=np.uint8)).save(path)
